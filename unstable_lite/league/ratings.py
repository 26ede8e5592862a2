"""Arithmetic of ratings: the rating of a model, ranks from scores, and TrueSkill's step for two players."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import trueskill


class Rating(NamedTuple):
    mu: float
    sigma: float


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


def mean_ranks(uids: Mapping[int, str], scores: Mapping[int, float]) -> dict[str, float]:
    """Return the mean rank of each model's seats; a seat's rank is the number of seats that scored more, 0 is best."""
    all_scores = sorted(scores.values())
    ranks: dict[str, list[int]] = {}
    for pid, uid in uids.items():
        ranks.setdefault(uid, []).append(len(all_scores) - bisect_right(all_scores, scores[pid]))
    return {uid: sum(seat_ranks) / len(seat_ranks) for uid, seat_ranks in ranks.items()}
