"""Aggregates over seeds: means, interquartile means, and paired differences, with bootstrap intervals.

The interquartile mean leaves out a quarter of the runs at each end, rounded down: with five seeds the lowest and the
highest one (Agarwal et al. 2021, arXiv:2108.13264). The runs of an arm are a stratum of the bootstrap, and the only one
but in the rows of several arms. The mean of the differences has a t interval, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from bench.study.reading import FOR_A_CLAIM, Study
from unstable_lite.tracking.intervals import seeds_interval

RESAMPLES = 10_000
Row = dict[str, Any]


def summarise(study: Study, records: Sequence[Mapping[str, Any]]) -> dict[str, list[Row]]:
    """Return the rows of `aggregates` (by measure and arm) and of `differences` from the first arm, on paired seeds."""
    aggregates, differences = list[Row](), list[Row]()
    first = study.arms[0].name
    for measure in study.measures:
        values = {arm.name: _values(records, arm.name, measure) for arm in study.arms}
        for arm, of_arm in values.items():
            aggregates.append({"measure": measure, "arm": arm, **_row(of_arm)})
            if arm != first:
                paired = {seed: of_arm[seed] - values[first][seed] for seed in of_arm if seed in values[first]}
                of_mean = (
                    [*map(rounded, seeds_interval([*paired.values()]))]
                    if len({*map(rounded, paired.values())}) > 1
                    else None
                )
                row = {"from": first, **_row(paired), "interval_of_mean": of_mean}
                differences.append({"measure": measure, "arm": arm, **row})
        for pool, arms in study.pools.items():
            aggregates.append({"measure": measure, "arm": pool, **_row(*(values[arm] for arm in arms))})
    return {"aggregates": aggregates, "differences": differences}


def supports_no_claim(study: Study, records: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the reason why the results support no claim; None if every arm has enough seeds."""
    counts = {arm.name: len(_values(records, arm.name, study.primary)) for arm in study.arms}
    few = [f"{arm}: {count}" for arm, count in counts.items() if count < FOR_A_CLAIM]
    claim = f"These results support no claim, which needs {FOR_A_CLAIM} seeds of each arm"
    return f"{claim} ({', '.join(few)})." if few else None


def interquartile_mean(values: Any, axis: int = 0) -> Any:
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(*strata: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval of the interquartile mean; None if a stratum has under two values.

    It repeats exactly. Each stratum is resampled by itself. With five values it is too narrow: see docs/evaluate.md.
    """
    if min(map(len, strata)) < 2:
        return None
    result = stats.bootstrap(
        tuple(map(np.asarray, strata)),
        lambda *parts, axis: interquartile_mean(np.concatenate(parts, axis), axis),
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return rounded(result.low), rounded(result.high)


def _values(records: Sequence[Mapping[str, Any]], arm: str, measure: str) -> dict[int, float]:
    """Return the values of an arm by seed, without the runs that lack the measure."""
    found = {run["seed"]: run["measures"].get(measure) for run in records if run["arm"] == arm}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def _row(*by_seed: Mapping[int, float]) -> Row:
    """Return the row of an arm, or of several together."""
    strata = [list(values.values()) for values in by_seed]
    values = [value for stratum in strata for value in stratum]
    return {
        "n": len(values),
        "seeds": sorted({seed for values in by_seed for seed in values}),
        "mean": rounded(np.mean(values)) if values else None,
        "iqm": rounded(interquartile_mean(values)) if values else None,
        "interval": interval(*strata),
    }


def rounded(value: Any) -> float:
    """Return the value as results have it: with six digits."""
    return float(f"{value:.6g}")
