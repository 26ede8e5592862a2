"""Registry of the models that play in a run, with their strengths and the pairs that met.

Owns the TrueSkill ratings, and the ids of frozen players' adapters. Knows nothing of adapters' files, games or the
choice of opponents.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from operator import eq
from pathlib import Path
from typing import Any

import msgspec
import trueskill
from msgspec.structs import replace

from unstable_lite.adapters.frozen import FIRST_FROZEN_VERSION, members, update_of, with_members
from unstable_lite.config.games import parse_player
from unstable_lite.config.reference import from_reference
from unstable_lite.errors import ConfigError
from unstable_lite.league.ratings import ModelMeta, Rating, Side, Teams, pairs_of, placed, rate_sides, sides_of
from unstable_lite.types import BASE, INITIAL, ModelRef, policy_of

COLUMNS = tuple(column.name for column in fields(ModelMeta) if column.name not in ("ratings", "env_ids"))
OF_CONFIG = ("kind", "name", "active", "adapter_version", "env_ids")
"""Fields of a fixed model that a state does not determine."""
_CHECKPOINT = re.compile(rf"{BASE}|(\w+/)?({INITIAL}(-\d+)?|ckpt-\d+)")
PRIOR_GAMES = 10
"""Number of imagined games added to the measured ones in an env's probability of a draw."""


@from_reference(unused={"tracker"})
class ModelRegistry:
    """Models and ratings, initially only `base`; the current policy is the checkpoint added last.

    If several policies learn, `of` returns the view of each, which shares everything except `current` and
    `checkpoints`.

    Each env has separate ratings. TrueSkill only knows differences, and checkpoints are added all the time, so without
    a fixed point all ratings of an env drift together: the anchor of an env stays at its prior with σ = 0.
    """

    def __init__(self, beta: float = 4.0, policy: str = "") -> None:
        self.policy = policy
        """Name of the policy whose view this is."""
        self._trueskill = trueskill.TrueSkill(beta=beta)
        self._envs: dict[str, None] = {}
        """Ids of the envs that have ratings."""
        self._anchors: dict[str, str] = {}
        """Uid of the fixed model that an env's ratings are relative to, by env id."""
        self._draws: dict[str, tuple[int, int]] = {}
        """Draws and games between neighbouring ranks, for the probability of a draw, by env id."""
        self._models: dict[str, ModelMeta] = {}
        self._checkpoints: list[ModelMeta] = []
        """Active checkpoints, oldest first: every game draws from them, and a long run has thousands of others."""
        self._fixed: list[ModelMeta] = []
        """Active fixed models."""
        self.touched: dict[str, None] = {}
        """Models that may have changed since they were last logged, in this order."""
        self.touched_pairs: dict[tuple[str, str], None] = {}
        """Keys of `match_counts` that may have changed since they were last logged."""
        self._current_uids = {policy: BASE}
        self.match_counts: dict[tuple[str, str], int] = defaultdict(int)
        """Number of games in which two models met, by sorted uids; `(uid, uid)` if a model met itself."""
        self.match_results: dict[tuple[str, str], tuple[int, int, int]] = {}
        """Wins, draws and losses of the first of two different models against the second, by sorted uids."""
        self.population: dict[str, None] = {}
        """Uids of the last checkpoints of lineages that were kept, which are players for the rest of the run."""
        self._frozen: list[str] = []
        """Names of the frozen players with an adapter, in the order of their ids."""
        self.add_policy(BASE, adapter_version=0, iteration=0)

    def of(self, policy: str) -> ModelRegistry:
        """Return the view of a policy."""
        view = self if policy == self.policy else copy.copy(self)
        view.policy = policy
        return view

    @property
    def current(self) -> ModelRef:
        return self._models[self.get_current_ckpt()].ref

    def get_current_ckpt(self) -> str:
        return self._current_uids.get(self.policy, BASE)

    def is_current(self, uid: str) -> bool:
        """Return whether it is the current checkpoint of any policy."""
        return uid in self._current_uids.values()

    def get_all_models(self) -> dict[str, ModelMeta]:
        return dict(self._models)

    def get(self, uid: str) -> ModelMeta:
        return self._models[uid]

    def add_policy(self, uid: str, adapter_version: int, iteration: int, inherit: bool = True) -> ModelRef:
        """Add the new current policy, which inherits its predecessor's μ and twice its σ, at most the prior's."""
        assert uid not in self._models, f"{uid} is already registered"
        ratings = self._inherited() if inherit and self._models else {}
        self.touched[self.get_current_ckpt()] = None  # it is no longer the current policy
        self._register(
            ModelMeta(uid=uid, kind="checkpoint", adapter_version=adapter_version, iteration=iteration, ratings=ratings)
        )
        self._current_uids[self.policy] = uid
        return self.current

    def add_checkpoint(self, uid: str, path: str | Path | None, iteration: int, inherit: bool = True) -> ModelRef:
        """Add the adapter in a PEFT directory as a fixed model (reference), before the run starts.

        It is the frozen player `adapter:PATH` under another uid, and never the current policy, which is always the
        learner's. iteration: number of updates after which it was made, for display. inherit: start with the current
        policy's μ and twice its σ. Raises ConfigError if the uid is taken, or is one that the run gives its own models.
        """
        if path is None:
            raise ConfigError(
                f"add_checkpoint: path = None: the base is there already, as {BASE!r}; leave this line out"
            )
        if uid in self._models:
            raise ConfigError(f"add_checkpoint: there is a model {uid!r} already; choose another uid")
        if uid == INITIAL or uid.startswith("fixed-") or update_of(Path(uid)) is not None:
            raise ConfigError(f"add_checkpoint: {uid!r} is a uid of the run's own models; choose another uid")
        name = f"adapter:{path}"
        ratings = self._inherited() if inherit else {}
        version = self._frozen_version(name)
        self._register(
            ModelMeta(uid=uid, kind="fixed", adapter_version=version, name=name, iteration=iteration, ratings=ratings)
        )
        return self._models[uid].ref

    def add_fixed(self, name: str, prior_mu: float = 25.0, active: bool = True, env_id: str | None = None) -> ModelRef:
        """Register a fixed model once, as `fixed-{name}`; a frozen player gets an id for its adapter.

        active: if false, it is rated in evaluations and never sampled. env_id: env in which it may be sampled, besides
        those of earlier calls; None: in all.
        """
        name = with_members(name)
        uid = f"fixed-{name}"
        env_ids = None if env_id is None else frozenset([env_id])
        if uid not in self._models:
            self._register(ModelMeta(uid=uid, kind="fixed", active=active, env_ids=env_ids, prior_mu=prior_mu))
        meta = self._models[uid]
        if meta.name is None:  # it is new, or known from a state
            meta.name, meta.adapter_version = name, self._frozen_version(name)
        if active:
            if not meta.active or env_ids is None:
                meta.env_ids = env_ids
            elif meta.env_ids is not None:
                meta.env_ids |= env_ids
            self.set_active(uid, True)
        return meta.ref

    def eval_opponent(self, name: str) -> ModelRef:
        """Return the fixed model of that name: rated in evaluations, never sampled; or a policy's current checkpoint.

        A policy's checkpoint gets this name, which distinguishes it from the evaluated policy.
        """
        player = parse_player(name)
        if player.kind != "policy":
            return self.add_fixed(name, active=False)
        model = self.of(player.rest).current if player.rest not in self._models else self.get(player.rest).ref
        return replace(model, name=name)

    def frozen_adapters(self) -> list[ModelMeta]:
        """Return the frozen players of this run that have an adapter, in the order of their registration."""
        return [meta for meta in self._models.values() if meta.kind == "fixed" and meta.adapter_version]

    def set_anchor(self, env_id: str, uid: str) -> None:
        """Measure the ratings of an env relative to this fixed model, whose own rating stays constant."""
        assert self._models[uid].kind == "fixed", f"{uid} changes, so it cannot be an anchor"
        self._anchors[env_id] = uid
        self._add_env(env_id)
        self._fix_anchors()

    def set_active(self, uid: str, active: bool) -> None:
        meta = self._models[uid]
        self.touched[uid] = None
        if meta.active != active:
            meta.active = active
            self._list_active()

    def bring_back(self, uid: str, adapter_version: int) -> None:
        """Make a checkpoint active again, with its old rating and a new version number of its adapter."""
        meta = self._models[uid]
        assert meta.kind == "checkpoint" and not meta.active, f"{uid} is not an inactive checkpoint"
        meta.adapter_version = adapter_version
        self.set_active(uid, True)

    def checkpoints(self) -> list[ModelMeta]:
        """Return the policy's active checkpoints, oldest first."""
        return [meta for meta in self._checkpoints if policy_of(meta.uid) == self.policy]

    def fixed(self, env_id: str) -> list[ModelMeta]:
        """Return the fixed models that are active in an env, in the order of their registration."""
        return [meta for meta in self._fixed if meta.env_ids is None or env_id in meta.env_ids]

    def others(self, env_id: str) -> list[ModelMeta]:
        """Return every model that is active in an env except the current policy: checkpoints first, then fixed ones."""
        current = self.get_current_ckpt()
        return [*(meta for meta in self.checkpoints() if meta.uid != current), *self.fixed(env_id)]

    def lag(self, uid: str) -> int:
        """Return the number of updates from checkpoint `uid` to the current policy."""
        iterations = self._models[self.get_current_ckpt()].iteration, self._models[uid].iteration
        assert iterations[0] is not None and iterations[1] is not None, f"{uid} is not a checkpoint"
        return iterations[0] - iterations[1]

    def match_quality(self, uid: str, other: str, env_id: str | None = None) -> float:
        """Return TrueSkill's chance of a draw, relative to that of two equal models with certain ratings; 0 to 1.

        env_id: env whose ratings count; None: the mean ratings over all envs.
        """
        metas = self._models[uid], self._models[other]
        (mu, sigma), (other_mu, other_sigma) = (m.rating if env_id is None else m.rating_in(env_id) for m in metas)
        known = 2 * self._trueskill.beta**2
        spread = known + sigma**2 + other_sigma**2
        return math.sqrt(known / spread) * math.exp(-((mu - other_mu) ** 2) / (2 * spread))

    def update_ratings(
        self, uids: Mapping[int, str], scores: Mapping[int, float], env_id: str, teams: Teams = None
    ) -> None:
        """Count one game and rate it in its env, given the model and the final score of each seat.

        Only distinct models are rated against each other; equal ranks are draws. A model at several seats is one
        player, placed by the mean rank of its seats, because they are not independent opponents. So a mirror game
        counts as a match and changes no rating; a single-player game is only counted.

        teams: label of each seat's team. A team is as strong as its members together, but no stronger for its size, and
        partners are no rivals. A model in several teams counts for the one with more of it, and is not rated.
        """
        assert uids.keys() == scores.keys() and (teams is None or teams.keys() == uids.keys())
        for uid in dict.fromkeys(uids.values()):
            self._models[uid].games += 1
            self.touched[uid] = None
        for pair in pairs_of(uids, teams):
            self.match_counts[pair] += 1
            self.touched_pairs[pair] = None
        sides = sides_of(uids, scores, teams)
        if len(sides) > 1 and (places := placed(sides)):  # else a mirror game, or one team
            self._count_outcomes(sides, places)
            self._rate(sides, env_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for JSON.

        It has every model that ever existed, because the ladder lists them all: about 100 bytes each, in columns by
        field, and 20 bytes for each pair that met, named by the models' numbers.
        """
        models, numbers = self._models.values(), {uid: number for number, uid in enumerate(self._models)}
        return {
            **({"population": [*self.population]} if self.population else {}),
            "current": self.get_current_ckpt(),
            "models": {name: [getattr(meta, name) for meta in models] for name in COLUMNS},
            "ratings": {env_id: [list(meta.ratings[env_id]) for meta in models] for env_id in self._envs},
            "draws": {env_id: list(counts) for env_id, counts in self._draws.items()},
            "match_counts": [
                [numbers[a], numbers[b], count, *self.match_results.get((a, b), ())]
                for (a, b), count in self.match_counts.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; fixed models that are already registered stay."""
        configured = {uid: meta for uid, meta in self._models.items() if meta.kind == "fixed"}
        saved = _saved_models(state, configured)
        for meta in configured.values():
            meta.ratings.clear()
        met = {(saved[a].uid, saved[b].uid): counts for a, b, *counts in state["match_counts"]}
        models = {meta.uid: meta for meta in saved}
        currents = {policy_of(meta.uid): meta.uid for meta in saved if meta.kind == "checkpoint" and "/" in meta.uid}
        # In place, because the views of other policies share all of these.
        _replace(self._models, models | {uid: meta for uid, meta in configured.items() if uid not in models})
        _replace(self.population, dict.fromkeys(uid for uid in state.get("population", ()) if uid in models))
        _replace(self._current_uids, currents | {self.policy: models[state["current"]].uid})
        self._list_active()
        _replace(self._envs, dict.fromkeys([*state["ratings"], *self._anchors]))
        _start_ratings(self._models.values(), self._envs)
        self._fix_anchors()
        _replace(self._draws, {env_id: (drawn, games) for env_id, (drawn, games) in state["draws"].items()})
        _replace(self.match_counts, {pair: count for pair, (count, *_) in met.items()})
        # Mirror games have no results, and neither have checkpoints of earlier versions.
        _replace(self.match_results, {pair: (of[1], of[2], of[3]) for pair, of in met.items() if len(of) > 1})
        _replace(self.touched, dict.fromkeys(self._models))
        _replace(self.touched_pairs, dict.fromkeys(self.match_counts))

    def _add_env(self, env_id: str) -> None:
        """Give every model a rating in this env."""
        if env_id not in self._envs:
            self._envs[env_id] = None
            _start_ratings(self._models.values(), [env_id])

    def _fix_anchors(self) -> None:
        for env_id, uid in self._anchors.items():
            ratings = self._models[uid].ratings
            ratings[env_id] = Rating(ratings[env_id].mu, 0.0)

    def _inherited(self) -> dict[str, Rating]:
        """Return the ratings of the current policy with twice its σ, at most the prior's."""
        ratings = self._models[self.get_current_ckpt()].ratings
        return {env_id: Rating(mu, min(2 * sigma, trueskill.SIGMA)) for env_id, (mu, sigma) in ratings.items()}

    def _frozen_version(self, name: str) -> int | None:
        """Return the id of its adapter (an average's others follow it); 0 for the base, None if no engine serves it."""
        if not parse_player(name).has_adapter:
            return 0 if name == BASE else None
        first = FIRST_FROZEN_VERSION + len(self._frozen)
        self._frozen += members(name)
        return first

    def _register(self, meta: ModelMeta) -> None:
        self._models[meta.uid] = meta
        self.touched[meta.uid] = None
        _start_ratings([meta], self._envs)
        self._list_active()

    def _list_active(self) -> None:
        active = [meta for meta in self._models.values() if meta.active]
        self._checkpoints[:] = [meta for meta in active if meta.kind == "checkpoint"]
        self._fixed[:] = [meta for meta in active if meta.kind == "fixed"]

    def _count_outcomes(self, sides: Sequence[Side], places: Mapping[str, tuple[int, float]]) -> None:
        best, is_shared = sides[0].place, sides[0].place == sides[1].place
        for uid, (_, place) in places.items():
            meta = self._models[uid]
            if place > best:
                meta.losses += 1
            elif is_shared:
                meta.draws += 1
            else:
                meta.wins += 1
        for a, b in combinations(sorted(places), 2):
            (side, place), (other, other_place) = places[a], places[b]
            if side != other:
                won, drawn, lost = self.match_results.get((a, b), (0, 0, 0))
                behind = place - other_place
                self.match_results[a, b] = (won + (behind < 0), drawn + (behind == 0), lost + (behind > 0))

    def _rate(self, sides: Sequence[Side], env_id: str) -> None:
        self._add_env(env_id)
        before = {uid: self._models[uid].ratings[env_id] for side in sides for uid in side.weights}
        places, (drawn, games) = [side.place for side in sides], self._draws.get(env_id, (0, 0))
        self._draws[env_id] = drawn + sum(map(eq, places, places[1:])), games + len(places) - 1
        # The share of draws before this game, including `PRIOR_GAMES` games at 10 %.
        share = (drawn + 0.1 * PRIOR_GAMES) / (games + PRIOR_GAMES)
        env = trueskill.TrueSkill(beta=self._trueskill.beta, draw_probability=share)
        try:
            after = rate_sides(env, sides, before)
        except FloatingPointError:
            return  # the ratings are so far apart that the result's likelihood underflows: floats have no such step
        for uid, rating in after.items():
            if uid != self._anchors.get(env_id):
                self._models[uid].ratings[env_id] = rating


def _replace(old: dict[Any, Any], new: Mapping[Any, Any]) -> None:
    old.clear()
    old.update(new)


def _start_ratings(metas: Iterable[ModelMeta], env_ids: Iterable[str]) -> None:
    """Rate each model at its prior in each env in which it has no rating."""
    for meta in metas:
        for env_id in env_ids:
            meta.ratings.setdefault(env_id, Rating(meta.prior_mu, trueskill.SIGMA))


def _saved_models(state: dict[str, Any], configured: Mapping[str, ModelMeta]) -> list[ModelMeta]:
    """Return the models of a state with their ratings. Raises ValueError for a checkpoint that no run makes.

    A state may be another person's, so the config alone decides on the player of a fixed model and on its activity.
    """
    columns: dict[str, list[Any]] = state["models"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    models = msgspec.convert(rows, list[ModelMeta])
    for env_id, ratings in state["ratings"].items():
        for meta, rating in zip(models, ratings, strict=True):
            meta.ratings[env_id] = Rating(*rating)
    for meta in models:
        if meta.kind == "fixed" or meta.uid in configured:
            own = configured.get(meta.uid) or ModelMeta(uid=meta.uid, kind="fixed", active=False)
            for name in OF_CONFIG:
                setattr(meta, name, getattr(own, name))
        elif meta.adapter_version is None or meta.name or not _CHECKPOINT.fullmatch(meta.uid):
            raise ValueError(f"{meta.uid!r} is not a checkpoint of a run")  # directories bear its uid
    return models
