"""Choose the env of the next game. Knows nothing of models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.plugins import suggestion
from unstable_lite.reward_transformations.averages import RunningMeans
from unstable_lite.rng import derive_seed, restore, state_of
from unstable_lite.types import GameKind

_ROUNDING = 1e-6
"""Largest difference between averages of equal rewards that counts as rounding and not as progress."""


def is_weight(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < math.inf


class BaseEnvSampler:
    """Base class: override `_choose_train`, `update` to learn from results, and the state if the class keeps any.

    Evaluations draw every env with the same probability, unless `_choose_eval` is overridden too. Train and eval have
    separate random streams, so the number of evaluations does not change the training games.
    """

    def __init__(
        self,
        train_env_specs: Sequence[TrainEnvSpec],
        eval_env_specs: Sequence[EvalEnvSpec] | None = None,
        rng_seed: int = 489,
    ) -> None:
        self.train_env_specs = tuple(train_env_specs)
        self.eval_env_specs = tuple(eval_env_specs or ())
        self._train_rng = random.Random(derive_seed(rng_seed, "env", "train"))
        self._eval_rng = random.Random(derive_seed(rng_seed, "env", "eval"))

    @property
    def kind(self) -> str:
        """Name of the sampler's kind, saved with its state, which no other kind can load."""
        return type(self).__name__

    @overload
    def sample(self, kind: Literal["train"]) -> TrainEnvSpec: ...
    @overload
    def sample(self, kind: Literal["eval"]) -> EvalEnvSpec: ...
    def sample(self, kind: GameKind) -> TrainEnvSpec | EvalEnvSpec:
        specs = self.train_env_specs if kind == "train" else self.eval_env_specs
        if not specs:
            raise ConfigError(f"a game of kind {kind!r} was requested, but {kind}_envs is empty")
        chosen = self._choose_train() if kind == "train" else self._choose_eval()
        if not isinstance(chosen, TrainEnvSpec if kind == "train" else EvalEnvSpec):
            raise ConfigError(f"{self.kind} chose {chosen!r}, which is not one of its {kind}_env_specs")
        return chosen

    def update(self, env_id: str, avg_actor_reward: float, avg_opponent_reward: float | None) -> None:
        """Learn from a training game that was not void; `avg_opponent_reward` is None if no other model played."""

    def env_list(self) -> str:
        return ",".join(spec.env_id for spec in self.train_env_specs)

    def state_dict(self) -> dict[str, Any]:
        return {"train_rng": state_of(self._train_rng), "eval_rng": state_of(self._eval_rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._train_rng, state["train_rng"])
        restore(self._eval_rng, state["eval_rng"])

    def _choose_train(self) -> TrainEnvSpec:
        raise NotImplementedError(f"{self.kind} does not choose the next env: override _choose_train")

    def _choose_eval(self) -> EvalEnvSpec:
        return self._eval_rng.choice(self.eval_env_specs)


class UniformRandomEnvSampler(BaseEnvSampler):
    """Draws every env with the same probability."""

    def _choose_train(self) -> TrainEnvSpec:
        return self._train_rng.choice(self.train_env_specs)


class WeightedEnvSampler(BaseEnvSampler):
    """Draws envs in proportion to a weight for each env id."""

    def __init__(
        self,
        train_env_specs: Sequence[TrainEnvSpec],
        eval_env_specs: Sequence[EvalEnvSpec] | None = None,
        rng_seed: int = 489,
        *,
        weights: Mapping[str, float],
    ) -> None:
        super().__init__(train_env_specs, eval_env_specs, rng_seed)
        env_ids = {spec.env_id for spec in self.train_env_specs}
        problems = [f"weighted: no train env {name!r}; {suggestion(name, env_ids)}" for name in set(weights) - env_ids]
        problems += [f"weighted: train env {name!r} has no weight" for name in sorted(env_ids - set(weights))]
        problems += [
            f"weighted: the weight of {name!r} is {weight!r}; it must be a finite number above 0"
            for name, weight in weights.items()
            if not is_weight(weight)
        ]
        if problems:
            raise ConfigError(*problems)
        self._weights = [weights[spec.env_id] for spec in self.train_env_specs]

    def _choose_train(self) -> TrainEnvSpec:
        (chosen,) = self._train_rng.choices(self.train_env_specs, self._weights)
        return chosen


class RoundRobinEnvSampler(BaseEnvSampler):
    """Takes the envs one after the other, in the order of the config."""

    _position = 0

    def _choose_train(self) -> TrainEnvSpec:
        chosen = self.train_env_specs[self._position % len(self.train_env_specs)]
        self._position += 1
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._position = state["position"]


class LearningProgressEnvSampler(BaseEnvSampler):
    """Prefers the envs in which the policy's reward is changing, up or down.

    `|fast - slow|` is the difference of two exponential averages of the actors' reward, at rates `fast` and `slow` per
    game (Kanitscheider et al. 2021, "Multi-task curriculum learning in a complex, visual, hard-exploration domain:
    Minecraft"; absolute progress as in Matiisen et al. 2017, "Teacher-Student Curriculum Learning"). An env's learning
    progress is the part of it above `noise` standard deviations of its variation by chance, which even the rewards of a
    fair coin cause. That deviation follows from the rates, the number of games and a running variance. The probability
    of an env is `min_share / n + (1 - min_share) * progress / (sum of all progress)`, so envs that are mastered, or
    still too hard, are also played now and then. Rewards of all envs should have the same scale. A zero-sum game in
    which the policy has every seat always has a mean reward of 0, and so shows no progress.
    """

    def __init__(
        self,
        train_env_specs: Sequence[TrainEnvSpec],
        eval_env_specs: Sequence[EvalEnvSpec] | None = None,
        rng_seed: int = 489,
        *,
        fast: float = 0.02,
        slow: float = 0.002,
        min_share: float = 0.2,
        noise: float = 1.5,
    ) -> None:
        super().__init__(train_env_specs, eval_env_specs, rng_seed)
        if not 0 < slow < fast <= 1 or not 0 < min_share <= 1:
            raise ConfigError(
                f"learning-progress: slow = {slow}, fast = {fast}, min_share = {min_share}: "
                "0 < slow < fast <= 1 and 0 < min_share <= 1 are needed"
            )
        if noise < 0:
            raise ConfigError(f"learning-progress: noise = {noise} must be at least 0")
        self._noise = noise
        self._min_share = min_share
        self._fast, self._slow = RunningMeans(fast), RunningMeans(slow)
        self._squares = RunningMeans(slow)
        """Average of the squared reward."""
        self._averages = {"fast": self._fast, "slow": self._slow, "squares": self._squares}

    def progress(self, env_id: str) -> float:
        """Return the learning progress of an env; 0 if it was never played."""
        if not self._slow.weight(env_id):
            return 0.0
        slow = self._slow.mean(env_id)
        variance = max(self._squares.mean(env_id) - slow**2, 0.0)
        deviation = math.sqrt(variance * self._variance_factor(env_id))
        excess = abs(self._fast.mean(env_id) - slow) - self._noise * deviation
        return excess if excess > _ROUNDING else 0.0

    def _variance_factor(self, env_id: str) -> float:
        """Return the variance of `fast - slow` over that of a reward, if rewards are independent and do not change.

        An average weighs its games by `rate * (1 - rate)^age`; sums of products of such weights are geometric series.
        """

        def product(one: RunningMeans, other: RunningMeans) -> float:
            weight, other_weight = one.weight(env_id), other.weight(env_id)
            series = (1 - (1 - weight) * (1 - other_weight)) / (1 - (1 - one.rate) * (1 - other.rate))
            return one.rate * other.rate * series / weight / other_weight

        fast, slow = self._fast, self._slow
        return max(product(fast, fast) - 2 * product(fast, slow) + product(slow, slow), 0.0)

    def probabilities(self) -> list[float]:
        """Return the probabilities of the training envs, in their order."""
        progress = [self.progress(spec.env_id) for spec in self.train_env_specs]
        total, n = sum(progress), len(progress)
        if total == 0:
            return [1 / n] * n
        return [self._min_share / n + (1 - self._min_share) * value / total for value in progress]

    def update(self, env_id: str, avg_actor_reward: float, avg_opponent_reward: float | None) -> None:  # noqa: ARG002
        self._fast.add(env_id, avg_actor_reward)
        self._slow.add(env_id, avg_actor_reward)
        self._squares.add(env_id, avg_actor_reward**2)

    def _choose_train(self) -> TrainEnvSpec:
        (chosen,) = self._train_rng.choices(self.train_env_specs, self.probabilities())
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {name: average.state_dict() for name, average in self._averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, average in self._averages.items():
            average.load_state_dict(state[name])


ENV_SAMPLERS: dict[str, Callable[..., BaseEnvSampler]] = {
    "random": UniformRandomEnvSampler,
    "weighted": WeightedEnvSampler,
    "round-robin": RoundRobinEnvSampler,
    "learning-progress": LearningProgressEnvSampler,
}
"""Samplers by their names in `env_sampling_strategy`."""
