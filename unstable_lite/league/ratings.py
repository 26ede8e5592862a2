"""Facts about one model, sides from scores and teams, and TrueSkill's step for two players."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

import trueskill

from unstable_lite.types import ModelRef

Teams = Mapping[int, Hashable] | None
"""Label of each seat's team; None: there are none."""
Group = TypeVar("Group", bound=Hashable)
LEAST_SIGMA = 1e-3
"""σ of an anchor in a game of three or more models, because the library divides by σ."""


class Rating(NamedTuple):
    mu: float
    sigma: float


@dataclass(slots=True, kw_only=True)
class ModelMeta:
    """Facts about one model."""

    uid: str
    kind: Literal["checkpoint", "fixed"]
    adapter_version: int | None = None
    """Adapter with which engines answer, 0 for the base; None for a fixed model that no engine serves."""
    name: str | None = None
    iteration: int | None = None
    """Number of updates made when the checkpoint was made; None for a fixed model that was not added as one."""
    active: bool = True
    """Whether samplers may choose it as an opponent."""
    env_ids: frozenset[str] | None = None
    """Envs in which samplers may choose it; None: all."""
    games: int = 0
    """Number of all its games, mirror and single-player games included."""
    wins: int = 0
    """Number of wins; like `draws` and `losses`, only of games against other models, by rank."""
    draws: int = 0
    losses: int = 0
    prior_mu: float = 25.0
    ratings: dict[str, Rating] = field(default_factory=dict)
    """Ratings by env id, for every env in which any two models were rated."""

    @property
    def rating(self) -> Rating:
        """Mean rating over the envs, a pooled view for display; the prior before the first rated game."""
        ratings = self.ratings.values()
        if not ratings:
            return Rating(self.prior_mu, trueskill.SIGMA)
        sigma = math.sqrt(sum(rating.sigma**2 for rating in ratings)) / len(ratings)
        return Rating(fmean(rating.mu for rating in ratings), sigma)

    def rating_in(self, env_id: str) -> Rating:
        """Return its rating in one env; the prior if it has none there."""
        return self.ratings.get(env_id) or Rating(self.prior_mu, trueskill.SIGMA)

    @property
    def ref(self) -> ModelRef:
        return ModelRef(uid=self.uid, kind=self.kind, adapter_version=self.adapter_version, name=self.name)


class Side(NamedTuple):
    """Models that win and lose together in one game."""

    place: float
    """Mean rank of its seats."""
    weights: Mapping[str, float]
    """Weight of each model's skill: 1 for a seat, less in a larger team, so that its size makes it no stronger."""


def rate_sides(env: trueskill.TrueSkill, sides: Sequence[Side], before: Mapping[str, Rating]) -> dict[str, Rating]:
    """Return the new ratings of the models that are on one side only. Raises FloatingPointError."""
    uids, ranks = [uid for side in sides for uid in side.weights], [side.place for side in sides]
    if len(uids) == len(sides) == 2:
        after = rate_two(env, before[uids[0]], before[uids[1]], is_draw=ranks[0] == ranks[1])
    else:
        start = {uid: env.create_rating(mu, sigma or LEAST_SIGMA) for uid, (mu, sigma) in before.items()}
        weights = [[*side.weights.values()] for side in sides]
        rated = env.rate([[start[uid] for uid in side.weights] for side in sides], ranks, weights)
        after = [Rating(rating.mu, rating.sigma) for side in rated for rating in side]
    return {uid: rating for uid, rating in zip(uids, after, strict=True) if uids.count(uid) == 1}


def rate_two(env: trueskill.TrueSkill, better: Rating, worse: Rating, is_draw: bool) -> list[Rating]:
    """Return the result of the library's message passing for two players, in a fraction of its time.

    Herbrich et al. 2006, "TrueSkill": with two players no iteration is needed. σ = 0 is certain and stays 0. Raises
    FloatingPointError.
    """
    better_variance, worse_variance = (sigma and sigma**2 + env.tau**2 for _, sigma in (better, worse))
    variance = 2 * env.beta**2 + better_variance + worse_variance
    spread = math.sqrt(variance)
    difference = (better.mu - worse.mu) / spread
    margin = trueskill.calc_draw_margin(env.draw_probability, 2, env) / spread
    v, w = (env.v_draw, env.w_draw) if is_draw else (env.v_win, env.w_win)
    step, shrink = v(difference, margin) / spread, w(difference, margin) / variance
    return [
        Rating(better.mu + better_variance * step, math.sqrt(better_variance * (1 - better_variance * shrink))),
        Rating(worse.mu - worse_variance * step, math.sqrt(worse_variance * (1 - worse_variance * shrink))),
    ]


def mean_ranks(groups: Mapping[int, Group], scores: Mapping[int, float]) -> dict[Group, float]:
    """Return the mean rank of each group's seats; a seat's rank is the number of seats that scored more, 0 is best."""
    all_scores = sorted(scores.values())
    ranks: dict[Group, list[int]] = {}
    for pid, group in groups.items():
        ranks.setdefault(group, []).append(len(all_scores) - bisect_right(all_scores, scores[pid]))
    return {group: sum(seat_ranks) / len(seat_ranks) for group, seat_ranks in ranks.items()}


def team_scores(scores: Mapping[int, float], teams: Mapping[int, Hashable]) -> dict[int, float]:
    """Return the mean score of each seat's team: a partner of a player that forfeits does not win."""
    return {pid: fmean(scores[other] for other in scores if teams[other] == teams[pid]) for pid in scores}


def sides_of(uids: Mapping[int, str], scores: Mapping[int, float], teams: Teams) -> list[Side]:
    """Return the sides of a game, the best first; without teams each model is a side."""
    if teams is None:
        sides = [Side(place, {uid: 1.0}) for uid, place in mean_ranks(uids, scores).items()]
    else:
        places, sizes = mean_ranks(teams, team_scores(scores, teams)), Counter(teams.values())
        least, seats = min(sizes.values()), Counter((team, uids[pid]) for pid, team in teams.items())
        of = {team: {uid: n * least / sizes[team] for (own, uid), n in seats.items() if own == team} for team in places}
        sides = [Side(place, of[team]) for team, place in places.items()]
    return sorted(sides, key=lambda side: side.place)


def placed(sides: Sequence[Side]) -> dict[str, tuple[int, float]]:
    """Return for each model the number and the place of the side with most of it, unless several have as much."""
    best: dict[str, tuple[float, tuple[int, float] | None]] = {}
    for number, side in enumerate(sides):
        for uid, weight in side.weights.items():
            most = best[uid][0] if uid in best else 0.0
            if weight >= most:
                best[uid] = weight, ((number, side.place) if weight > most else None)
    return {uid: found for uid, (_, found) in best.items() if found is not None}


def pairs_of(uids: Mapping[int, str], teams: Teams) -> dict[tuple[str, str], None]:
    """Return the sorted pairs of models that met in one game, each once; those of one team did not meet."""
    met = [(uids[a], uids[b]) for a, b in combinations(uids, 2) if teams is None or teams[a] != teams[b]]
    return {(min(pair), max(pair)): None for pair in met}
