"""Confidence intervals of proportions, points, means and paired differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

Z_95 = 1.96
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for two-sided 95 %, by degrees of freedom from 1 on (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A mean over seeds, of scores or of differences, with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Return the interval of Wilson (1927) for a proportion. It stays within [0, 1]; it is [0, 1] if n is 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def points_interval(wins: int, draws: int, losses: int, z: float = Z_95) -> tuple[float, float]:
    """Return the score interval of the mean of wins (1), draws (1/2) and losses (0); [0, 1] without a game.

    A mean belongs to the interval if it is within z standard errors of the observed one, given the most likely share of
    draws for that mean (score test with a constrained estimate: Tango 1998, Statistics in Medicine 17, 891-908; Agresti
    and Min 2005, Statistics in Medicine 24, 729-740). Without draws it is Wilson's interval. It has a width even if all
    games were drawn.
    """
    n = wins + draws + losses
    if not draws:
        return wilson_interval(wins, n, z)
    observed = (wins + draws / 2) / n

    def is_inside(mean: float) -> bool:
        win_room, loss_room = 2 * mean, 2 * (1 - mean)  # upper bounds of the share of draws at this mean
        b = 2 * draws + wins * loss_room + losses * win_room
        drawn = (b - math.sqrt(max(b * b - 4 * n * draws * win_room * loss_room, 0.0))) / (2 * n)
        return (observed - mean) ** 2 <= z * z * (mean * (1 - mean) - drawn / 4) / n

    return bisect(observed, 0.0, is_inside), bisect(observed, 1.0, is_inside)


def bisect(inside: float, outside: float, is_inside: Callable[[float], bool]) -> float:
    """Return the edge, between a number inside of an interval and one outside, to 2^-40 of their distance."""
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
    return inside


def mean_interval(mean: float, std: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Return the interval of the mean of n rewards by the normal approximation. It has a width even if std is 0.

    If all rewards are equal, other rewards are rare, not impossible. Then their share is taken as the upper end of
    Wilson's interval, and each is as far off as rewards within [-1, 1], or within the size of these, can be.
    """
    if std == 0:
        most, largest = wilson_interval(0, n, z)[1], max(1.0, abs(mean))
        return mean - most * (largest + mean), mean + most * (largest - mean)
    half = z * std / math.sqrt(n)
    return mean - half, mean + half


def paired_difference(before: Sequence[Sequence[float | None]], after: Sequence[Sequence[float | None]]) -> Gain | None:
    """Compare two evaluations that played the same seeds from the same seats; None for fewer than two common seeds.

    The games of one seed are not independent, so the t-interval is over the seeds' mean differences.
    """
    gained = []
    for old, new in zip(before, after, strict=False):
        pairs = [y - x for x, y in zip(old, new, strict=False) if x is not None and y is not None]
        if pairs:
            gained.append(fmean(pairs))
    return _over_seeds(gained)


def _over_seeds(means: Sequence[float]) -> Gain | None:
    if len(means) < 2:
        return None
    low, high = mean_interval(fmean(means), stdev(means), len(means), t_95(len(means) - 1))
    return Gain(mean=fmean(means), low=low, high=high, seeds=len(means))


def deals_interval(scores: Sequence[Sequence[float | None]]) -> Gain | None:
    """Return the mean, with its t-interval, over deals of the mean over the seats of one deal.

    scores: by deal (env seed) and seat. Only deals count whose games all ended. In a zero-sum game the luck of a deal
    that was played from every seat cancels within its mean. None for fewer than two such deals, and for one seat.
    """
    seats = max(map(len, scores), default=0)
    whole = [[score for score in of_deal if score is not None] for of_deal in scores]
    means = [fmean(of_deal) for of_deal in whole if len(of_deal) == seats]
    return _over_seeds(means) if seats > 1 else None


def t_95(freedom: int) -> float:
    """Return Student's t for two-sided 95 %; beyond the table by its expansion (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
