"""Choose the opponent of the next training game among the models that are active in its env."""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from unstable_lite.config.reference import from_reference
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.ratings import ModelMeta, Teams, placed, sides_of
from unstable_lite.plugins import suggestion
from unstable_lite.rng import restore, state_of
from unstable_lite.types import ModelRef, policy_of

PRIOR_GAMES = 2
"""Imagined games of each pair of kept players, all drawn."""
REGRET_STEPS = 1000


@from_reference(renamed={"model_registry": "registry"})
class BaseModelSampler:
    """Base class: override `sample_opponent`, and `update` to learn from results."""

    def __init__(self, registry: ModelRegistry, rng: random.Random | None = None) -> None:
        """Raise ConfigError if an overridden method does not take its arguments. `rng`: default, a stream of seed 0."""
        _check_arguments(self.sample_opponent, "(self, env_id: str)", 1)
        self.registry = registry
        self._rng = rng or random.Random(0)

    @property
    def kind(self) -> str:
        """Name of the sampler's kind, saved with its state, which no other kind can load."""
        return type(self).__name__

    def get_current_ckpt(self) -> str:
        return self.registry.get_current_ckpt()

    def share_of(self, policy: str) -> float:  # noqa: ARG002
        """Return the share of the draws that are the newest adapter of another policy that learns."""
        return 0.0

    def sample_opponent(self, env_id: str) -> ModelRef:
        """Return the `ref` of the model to play against in a game of `env_id`."""
        raise NotImplementedError(f"{self.kind} does not choose the next opponent: override sample_opponent")

    def update(self, uids: Mapping[int, str], scores: Mapping[int, float], env_id: str, teams: Teams = None) -> None:
        """Learn from a training game that was not void, and that the registry has already rated.

        teams: label of each seat's team; None: there are none.
        """

    def state_dict(self) -> dict[str, Any]:
        return {"rng": state_of(self._rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._rng, state["rng"])


class NoOpponentModelSampler(BaseModelSampler):
    """Sampler for envs in which the current policy has every seat."""

    def sample_opponent(self, env_id: str) -> ModelRef:
        raise ConfigError(
            f"opponent_sampling_strategy is 'none', but training env {env_id!r} has num_actors < num_players: "
            "choose a strategy, or give every seat to the current policy"
        )


class MirrorModelSampler(BaseModelSampler):
    """Always chooses the current policy."""

    def sample_opponent(self, env_id: str) -> ModelRef:  # noqa: ARG002
        return self.registry.current


class OtherPolicyModelSampler(BaseModelSampler):
    """Chooses another policy's newest adapter, or draws uniformly from its active checkpoints before that (`/past`)."""

    def __init__(self, registry: ModelRegistry, rng: random.Random, policy: str) -> None:
        super().__init__(registry, rng)
        name, _, past = policy.partition("/")
        self._other, self._is_past = registry.of(name), past == "past"

    def share_of(self, policy: str) -> float:
        return float(policy == self._other.policy and not self._is_past)

    def sample_opponent(self, env_id: str) -> ModelRef:  # noqa: ARG002
        current = self._other.current
        past = [meta.ref for meta in self._other.checkpoints() if meta.uid != current.uid] if self._is_past else []
        return self._rng.choice(past or [current])


class PopulationModelSampler(BaseModelSampler):
    """Draws one of the kept players of all policies; before there is one, chooses the current policy.

    meta: `uniform`, or `nash`: a mixture that none of them beats, by the points in their games with each other. With
    each player as an approximate best response to the mixture of the earlier ones, the latter is PSRO and the former
    fictitious play over policies (Lanctot et al. 2017, arXiv:1711.00832).
    """

    def __init__(self, registry: ModelRegistry, rng: random.Random, meta: str = "uniform") -> None:
        super().__init__(registry, rng)
        if meta not in ("uniform", "nash"):
            raise ConfigError(f"population: meta = {meta!r} is not known; {suggestion(meta, ('uniform', 'nash'))}")
        self._meta = meta

    def sample_opponent(self, env_id: str) -> ModelRef:  # noqa: ARG002
        players = [meta for uid in self.registry.population if (meta := self.registry.get(uid)).active]
        if not players:
            return self.registry.current
        (chosen,) = self._rng.choices(players, self.weights(players))
        return chosen.ref

    def weights(self, players: Sequence[ModelMeta]) -> list[float]:
        """Return the weight of each player, which sum to 1."""
        if self._meta == "uniform":
            return [1 / len(players)] * len(players)
        return nash_weights(tuple(tuple(self._points(one.uid, other.uid) for other in players) for one in players))

    def _points(self, uid: str, other: str) -> float:
        """Return the points of one player against another; 1/2 before they have met."""
        pair = min(uid, other), max(uid, other)
        won, drawn, lost = self.registry.match_results.get(pair, (0, 0, 0))
        points = (won + drawn / 2 + PRIOR_GAMES / 2) / (won + drawn + lost + PRIOR_GAMES)
        return points if uid == pair[0] else 1 - points


@functools.lru_cache(maxsize=8)  # for each game, but players meet only when one is kept
def nash_weights(points: tuple[tuple[float, ...], ...]) -> list[float]:
    """Return an approximate Nash equilibrium of the symmetric game in which row i gets `points[i][j]` from column j.

    Source: regret matching, Hart and Mas-Colell 2000; the average of `REGRET_STEPS` strategies.
    """
    payoff_II = np.asarray(points) - 0.5
    regret_I, total_I = np.zeros(len(payoff_II)), np.zeros(len(payoff_II))
    for _ in range(REGRET_STEPS):
        positive_I = regret_I.clip(min=0)
        strategy_I = positive_I / positive_I.sum() if positive_I.any() else np.full(len(payoff_II), 1 / len(payoff_II))
        total_I += strategy_I
        value_I = payoff_II @ strategy_I
        regret_I += value_I - strategy_I @ value_I
    return [*map(float, total_I / total_I.sum())]


class FixedOpponentModelSampler(BaseModelSampler):
    """Draws uniformly from the env's fixed opponents."""

    def sample_opponent(self, env_id: str) -> ModelRef:
        fixed = self.registry.fixed(env_id)
        if not fixed:
            raise ConfigError(f"a fixed opponent was requested, but {env_id!r} has no fixed_opponents")
        return self._rng.choice(fixed).ref


class LaggedModelSampler(BaseModelSampler):
    """Draws uniformly from the checkpoints whose lag is in `lag_range`; takes the oldest one if there are none."""

    def __init__(self, registry: ModelRegistry, rng: random.Random, lag_range: tuple[int, int] = (1, 7)) -> None:
        super().__init__(registry, rng)
        least, most = lag_range
        if not 0 <= least <= most:
            raise ConfigError(f"opponent_lag = {list(lag_range)}: must be [least, most] with 0 <= least <= most")
        self.lag_range = lag_range

    def sample_opponent(self, env_id: str) -> ModelRef:  # noqa: ARG002
        least, most = self.lag_range
        checkpoints = self.registry.checkpoints()
        lagged = [meta for meta in checkpoints if least <= self.registry.lag(meta.uid) <= most]
        return self._rng.choice(lagged or checkpoints[:1]).ref


class UniformModelSampler(BaseModelSampler):
    """Draws uniformly from the active checkpoints, the current policy included."""

    def sample_opponent(self, env_id: str) -> ModelRef:  # noqa: ARG002
        return self._rng.choice(self.registry.checkpoints()).ref


class RandomModelSampler(BaseModelSampler):
    """Draws uniformly from all active models: checkpoints, the current policy included, and the env's fixed ones."""

    def sample_opponent(self, env_id: str) -> ModelRef:
        return self._rng.choice([*self.registry.checkpoints(), *self.registry.fixed(env_id)]).ref


class WeightedModelSampler(BaseModelSampler):
    """Base class that draws one of the env's active models in proportion to `weights`: override those.

    Chooses the current policy only if there is no other model, and any of the others if all weights are 0.
    """

    def __init__(self, registry: ModelRegistry, rng: random.Random) -> None:
        super().__init__(registry, rng)
        _check_arguments(self.weights, "(self, current, others, env_id: str)", 3)

    def sample_opponent(self, env_id: str) -> ModelRef:
        others = self.registry.others(env_id)
        if not others:
            return self.registry.current
        weights = self.weights(self.registry.get(self.registry.get_current_ckpt()), others, env_id)
        if len(weights) != len(others) or not all(0 <= weight < math.inf for weight in weights):
            raise ConfigError(
                f"{self.kind}: the weights of {len(others)} opponents are {list(weights)}; return one finite number, 0 "
                "or more, for each"
            )
        (chosen,) = self._rng.choices(others, weights if sum(weights) > 0 else None)
        return chosen.ref

    def weights(self, current: ModelMeta, others: Sequence[ModelMeta], env_id: str) -> list[float]:
        """Return a weight for each of `others` in a game of `env_id`, none negative; they need not sum to 1."""
        raise NotImplementedError(f"{self.kind} does not weight the opponents: override weights")


class MatchQualityModelSampler(WeightedModelSampler):
    """Weights by TrueSkill match quality: near in μ, with a certain rating (Herbrich et al. 2006, "TrueSkill")."""

    def weights(self, current: ModelMeta, others: Sequence[ModelMeta], env_id: str) -> list[float]:
        return [self.registry.match_quality(current.uid, other.uid, env_id) for other in others]


class RatingDistanceModelSampler(WeightedModelSampler):
    """Weights by `1 - |Δμ| / Σ|Δμ|`: the nearer in μ, the likelier (reference, `ts-dist`)."""

    def weights(self, current: ModelMeta, others: Sequence[ModelMeta], env_id: str) -> list[float]:
        distances = [abs(other.rating_in(env_id).mu - current.rating_in(env_id).mu) for other in others]
        total = sum(distances)
        return [1 - distance / total for distance in distances] if total > 0 else [1.0] * len(others)


class BiasedRatingDistanceModelSampler(WeightedModelSampler):
    """Weights by `exp(Δμ / 25)`, where Δμ is the opponent's μ minus our own: stronger opponents are likelier."""

    def weights(self, current: ModelMeta, others: Sequence[ModelMeta], env_id: str) -> list[float]:
        differences = [other.rating_in(env_id).mu - current.rating_in(env_id).mu for other in others]
        highest = max(differences)  # subtracted from all: no weight overflows, and their proportions stay
        return [math.exp((difference - highest) / 25) for difference in differences]


class PrioritizedFictitiousModelSampler(WeightedModelSampler):
    """Prioritised fictitious self-play (Vinyals et al. 2019): by how often the policy beats the opponent in the env.

    `p` is the measured win rate, in which a draw counts one half: `hard` weights an opponent by `(1 - p)^k`, `even` by
    `p (1 - p)`. The policy is one lineage: a result of any of its checkpoints counts, and its weight is multiplied by
    `decay` after each further game against the same opponent. `prior_games` imagined draws are added to the measured
    games, so an opponent that was never met has the weight of an even match.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        rng: random.Random,
        weighting: str = "hard",
        k: float = 2.0,
        prior_games: float = 2.0,
        decay: float = 0.99,
    ) -> None:
        super().__init__(registry, rng)
        weightings: dict[str, Callable[[float], float]] = {
            "hard": lambda p: (1 - p) ** k,
            "even": lambda p: p * (1 - p),
        }
        if weighting not in weightings:
            raise ConfigError(f"pfsp: weighting = {weighting!r} is not known; {suggestion(weighting, weightings)}")
        if k <= 0 or prior_games <= 0 or not 0 < decay <= 1:
            raise ConfigError(
                f"pfsp: k = {k} and prior_games = {prior_games} must be above 0, decay = {decay} above 0 and at most 1"
            )
        self._weight = weightings[weighting]
        self._prior_games = prior_games
        self._decay = decay
        self._results: dict[str, dict[str, tuple[float, float]]] = {}
        """Points and games of the policy by env and opponent, decayed."""

    def win_rate(self, uid: str, env_id: str) -> float:
        """Return the policy's win rate against `uid` in an env, the prior included."""
        points, games = self._results.get(env_id, {}).get(uid, (0.0, 0.0))
        return (points + self._prior_games / 2) / (games + self._prior_games)

    def weights(self, current: ModelMeta, others: Sequence[ModelMeta], env_id: str) -> list[float]:  # noqa: ARG002
        return [self._weight(self.win_rate(other.uid, env_id)) for other in others]

    def update(self, uids: Mapping[int, str], scores: Mapping[int, float], env_id: str, teams: Teams = None) -> None:
        """Count a game, in which its newest checkpoint is the policy and every model of another team an opponent."""
        places, own_name = placed(sides_of(uids, scores, teams)), getattr(self.registry, "policy", "")
        metas = [meta for uid in uids.values() if (meta := self.registry.get(uid)).kind == "checkpoint"]
        checkpoints = [meta for meta in metas if policy_of(meta.uid) == own_name]
        if not checkpoints:
            return
        # `initial` and `base` both have 0 updates.
        policy = max(checkpoints, key=lambda meta: (meta.iteration or 0, meta.adapter_version or 0)).uid
        if policy not in places:  # it has as many seats in either team
            return
        in_env = self._results.setdefault(env_id, {})
        own_side, own = places[policy]
        for uid, (side, place) in places.items():
            if side != own_side:
                points, games = in_env.get(uid, (0.0, 0.0))
                result = 0.5 if place == own else float(place > own)
                in_env[uid] = (points * self._decay + result, games * self._decay + 1)

    def state_dict(self) -> dict[str, Any]:
        results = {env_id: {uid: list(r) for uid, r in in_env.items()} for env_id, in_env in self._results.items()}
        return super().state_dict() | {"results": results}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._results = msgspec.convert(state["results"], dict[str, dict[str, tuple[float, float]]])


class MixtureModelSampler(BaseModelSampler):
    """Chooses one of several samplers for each game, with probabilities in proportion to the weights."""

    def __init__(
        self,
        registry: ModelRegistry,
        rng: random.Random,
        samplers: Sequence[BaseModelSampler],
        weights: Sequence[float],
    ) -> None:
        super().__init__(registry, rng)
        if not samplers or len(samplers) != len(weights) or not 0 < min(weights) <= sum(weights) < math.inf:
            raise ConfigError(f"a mixture needs one positive, finite weight for each sampler, got {list(weights)}")
        self.samplers = list(samplers)
        self.weights = list(weights)

    @property
    def kind(self) -> str:
        return f"a mixture of {' and '.join(sampler.kind for sampler in self.samplers)}"

    def share_of(self, policy: str) -> float:
        pairs = zip(self.samplers, self.weights, strict=True)
        return sum(weight * sampler.share_of(policy) for sampler, weight in pairs) / sum(self.weights)

    def sample_opponent(self, env_id: str) -> ModelRef:
        (sampler,) = self._rng.choices(self.samplers, self.weights)
        return sampler.sample_opponent(env_id)

    def update(self, uids: Mapping[int, str], scores: Mapping[int, float], env_id: str, teams: Teams = None) -> None:
        for sampler in self.samplers:
            tell_result(sampler.update, uids, scores, env_id, teams=teams)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(saved)
        super().load_state_dict(state)


MODEL_SAMPLERS: dict[str, Callable[..., BaseModelSampler]] = {
    "none": NoOpponentModelSampler,
    "mirror": MirrorModelSampler,
    "fixed": FixedOpponentModelSampler,
    "lagged": LaggedModelSampler,
    "uniform": UniformModelSampler,
    "random": RandomModelSampler,
    "match-quality": MatchQualityModelSampler,
    "ts-dist": RatingDistanceModelSampler,
    "ts-dist-biased": BiasedRatingDistanceModelSampler,
    "pfsp": PrioritizedFictitiousModelSampler,
    "population": PopulationModelSampler,
}
"""Samplers by their names in `opponent_sampling_strategy`."""


def tell_result(update: Callable[..., None], *result: Any, teams: Teams) -> None:
    """Call the `update` of a registry or a sampler; a custom one may have no parameter `teams`."""
    known = inspect.signature(update).parameters.values() if teams is not None else ()
    takes_teams = any(one.name == "teams" or one.kind is one.VAR_KEYWORD for one in known)
    update(*result, **({"teams": teams} if takes_teams else {}))


def _check_arguments(method: Callable[..., Any], expected: str, number: int) -> None:
    """Raise ConfigError if a sampler's method does not take `number` positional arguments."""
    try:
        inspect.signature(method).bind(*[None] * number)
    except TypeError as error:
        raise ConfigError(f"{method.__qualname__} must have the arguments {expected}: {error}") from error
