"""TrueSkill over all games of a tournament, independent of the order in which they were played.

TrueSkill rates games one after the other, and its result depends on their order. Here the games of a tournament are
rated in many random orders, each from the prior, and μ and σ are the means over the orders. The orders are drawn by a
fixed seed from the games in a canonical order: the same results give the same ladder. Rating the games several times in
a row instead would count each of them several times, and σ would be too small.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from unstable_lite.league.model_registry import ModelMeta, ModelRegistry
from unstable_lite.types import Outcome

MOST_ORDERS = 20
LEAST_ORDERS = 4
RATED_GAMES = 20_000
"""Approximate number of ratings over all orders; it decides the number of orders."""


@dataclass(frozen=True, slots=True)
class RatedGame:
    """Outcome for `model`, which plays one seat, against `opponent`."""

    env_id: str
    model: str
    opponent: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderEntry:
    """One model's place on the ladder."""

    model: str
    mu: float
    sigma: float
    games: int
    wins: int
    draws: int
    losses: int


def make_ladder(games: Sequence[RatedGame], beta: float) -> list[LadderEntry]:
    """Return the models by descending μ. A game of one against several counts as one between the two models."""
    canonical = sorted(games, key=lambda game: (game.env_id, game.model, game.opponent, game.outcome))
    rng = random.Random(0)
    num_orders = max(LEAST_ORDERS, min(MOST_ORDERS, RATED_GAMES // max(len(games), 1)))
    orders = [_rate(rng.sample(canonical, len(canonical)), beta) for _ in range(num_orders)]
    names = sorted({name for game in games for name in (game.model, game.opponent)})
    placed = []
    for name in names:
        metas = [order[name] for order in orders]
        mu, sigma = (fmean(numbers) for numbers in zip(*(meta.rating for meta in metas), strict=True))
        counts = {count: getattr(metas[0], count) for count in ("games", "wins", "draws", "losses")}  # same in all
        placed.append(LadderEntry(model=name, mu=mu, sigma=sigma, **counts))
    return sorted(placed, key=lambda model: -model.mu)


def _rate(games: Sequence[RatedGame], beta: float) -> dict[str, ModelMeta]:
    registry = ModelRegistry(beta)
    uids: dict[str, str] = {}  # one ladder over all envs
    for game in games:
        for name in (game.model, game.opponent):
            if name not in uids:
                uids[name] = registry.add_fixed(name).uid
        score = {"win": 1.0, "draw": 0.0, "loss": -1.0}[game.outcome]
        registry.update_ratings({0: uids[game.model], 1: uids[game.opponent]}, {0: score, 1: 0.0}, "")
    return {name: registry.get(uid) for name, uid in uids.items()}
