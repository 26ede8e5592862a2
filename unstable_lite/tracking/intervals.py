"""Confidence intervals of proportions, points, means and differences, and the text of a share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

Z_95 = 1.96
PRIOR_DEALS = 8
"""Weight with which the variance between deals is taken to be that of independent games."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A mean over seeds, of scores or of differences, with its 95 % interval."""

    mean: float
    low: float
    high: float
    seeds: int
    """Number of seeds; 0 for the difference of two results without common seeds."""


def wilson_interval(successes: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """Return the interval of Wilson (1927) for a proportion. It stays within [0, 1]; it is [0, 1] if n is 0."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def share_interval(deals: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """Return the interval of the mean of scores within [0, 1], such as points; [0, 1] without a game.

    deals: scores of the games of each deal (env seed), which are not independent. It is the score interval of Wilson
    (1927) at the effective number of games (Kish 1965, section 8.2), with Student's quantile. The variance between
    deals, relative to that of independent games, is drawn towards 1 by `PRIOR_DEALS`. docs/evaluate.md shows how often
    it covers the truth.
    """
    sizes, sums = [len(games) for games in deals], [sum(games) for games in deals]
    mean = sum(sums) / max(sum(sizes), 1)
    squares = sum((total - mean * size) ** 2 for total, size in zip(sums, sizes, strict=True))
    return _effective_wilson(mean, sum(sizes), len(sizes), squares, level)


def points_interval(wins: int, draws: int, losses: int, level: float = 0.95) -> tuple[float, float]:
    """Return the `share_interval` of games each of which is a deal of its own."""
    n = wins + draws + losses
    mean = (wins + draws / 2) / max(n, 1)
    squares = wins * (1 - mean) ** 2 + draws * (0.5 - mean) ** 2 + losses * mean**2
    return _effective_wilson(mean, n, n, squares, level)


def _effective_wilson(mean: float, n: int, num_deals: int, squares: float, level: float) -> tuple[float, float]:
    """squares: sum over the deals of the squared distance between the sum of their scores and its mean."""
    if num_deals < 2:
        return 0.0, 1.0
    effect = (1 + n / num_deals) / 2  # all scores are 0, or all are 1: halfway between independent and equal games
    if 0 < mean < 1:
        effect = squares * num_deals / (num_deals - 1) / (n * mean * (1 - mean))
    effect = (effect * (num_deals - 1) + PRIOR_DEALS) / (num_deals - 1 + PRIOR_DEALS)
    return wilson_interval(mean * n / effect, n / effect, student(num_deals - 1, level))


def bisect(inside: float, outside: float, is_inside: Callable[[float], bool]) -> float:
    """Return the edge, between a number inside of an interval and one outside, to 2^-40 of their distance."""
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
    return inside


def mean_interval(mean: float, std: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return the t-interval of the mean of n >= 2 values. It has a width even if std is 0.

    If all values are equal, other values are rare, not impossible. Then their share is taken as the upper end of
    Wilson's interval, and each is as far off as rewards within [-1, 1], or within the size of these, can be.
    """
    if std <= 1e-9 * max(1.0, abs(mean)):  # equal but for rounding
        most, largest = wilson_interval(0, n, student(n - 1, level))[1], max(1.0, abs(mean))
        return mean - most * (largest + mean), mean + most * (largest - mean)
    half = student(n - 1, level) * std / math.sqrt(n)
    return mean - half, mean + half


def seeds_interval(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> tuple[float, float]:
    """Return the t-interval of the mean over at least two seeds, cut at the least and the largest possible value."""
    low, high = mean_interval(fmean(values), stdev(values), len(values))
    return max(low, least), min(high, most)


def paired_difference(
    before: Sequence[Sequence[float | None]], after: Sequence[Sequence[float | None]], most: float = math.inf
) -> Gain | None:
    """Compare two evaluations that played the same seeds from the same seats; None for fewer than two common seeds.

    The games of one seed are not independent, so the t-interval is over the seeds' mean differences. most: largest
    difference that is possible, at which the interval is cut.
    """
    gained = []
    for old, new in zip(before, after, strict=False):
        pairs = [y - x for x, y in zip(old, new, strict=False) if x is not None and y is not None]
        if pairs:
            gained.append(fmean(pairs))
    return gain_over(gained, most) if len(gained) > 1 else None


def gain_over(gained: Sequence[float], most: float) -> Gain:
    """Return the mean of the differences of at least two seeds. most: as for `paired_difference`."""
    low, high = seeds_interval(gained, -most, most)
    return Gain(mean=fmean(gained), low=low, high=high, seeds=len(gained))


def unpaired_difference(
    before: tuple[float, float, float], after: tuple[float, float, float], most: float = math.inf
) -> Gain:
    """Compare two independent results, each a mean with its interval, by the hybrid of Newcombe (1998, method 10)."""
    (old, old_low, old_high), (new, new_low, new_high) = before, after
    low = new - old - math.hypot(new - new_low, old_high - old)
    high = new - old + math.hypot(new_high - new, old - old_low)
    return Gain(mean=new - old, low=max(low, -most), high=min(high, most), seeds=0)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def percent_range(low: float, high: float) -> str:
    """Return the edges of an interval in per cent, without its sign: `75.8–83.6`."""
    return f"{100 * low:.1f}–{100 * high:.1f}"


@lru_cache(maxsize=10_000)
def student(freedom: int, level: float = 0.95) -> float:
    """Return Student's two-sided quantile.

    Up to 100 degrees of freedom it is found by the finite series of its distribution (Abramowitz and Stegun 26.7.3 and
    26.7.4), beyond by the expansion of the quantile (26.7.5).
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    if freedom > 100:
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)

    is_odd = freedom % 2

    def is_below(angle: float) -> bool:
        term, total = math.cos(angle) ** is_odd, 0.0
        for power in range(is_odd, freedom - 1, 2):
            total += term
            term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
        total *= math.sin(angle)
        return (2 / math.pi * (angle + total) if is_odd else total) < level

    return math.sqrt(freedom) * math.tan(bisect(0.0, math.pi / 2, is_below))
