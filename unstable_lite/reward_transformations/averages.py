"""Statistics of earlier rewards, which survive a restart: averages, and how much results and advantages vary.

Works on plain numbers: knows nothing of steps, models or losses. A cell is an env, a seat and the kinds of opponents;
its results share one baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unstable_lite.types import StepContext

Values = npt.NDArray[np.float64]

FLOOR = 0.1
"""Smallest standard deviation by which advantages are divided, relative to the running one."""
DECAY = 0.95
"""Weight of the running standard deviation against one batch's."""
_ROUNDING = 1e-6
_EPSILON = 1e-8


def cell_of(env_id: str, pid: int, context: StepContext | None) -> str:
    """Return the cell of a step as a key that JSON can hold."""
    return f"{env_id}/{pid}/{context.opponent_kinds if context is not None else ''}"


def differ(values: Sequence[float] | Values) -> bool:
    """Return whether values differ by more than rounding errors. NaN differs from everything."""
    given = np.asarray(values, np.float64)
    return not np.abs(given - given[0]).max() <= _ROUNDING * max(1.0, float(np.abs(given).max()))


class RunningMeans:
    """Exponential average of the values of each key, in which a new value counts `rate`; its state fits in JSON.

    Each average has a weight, 1 - (1 - rate)^n after n values, which corrects the bias of its start.
    """

    def __init__(self, rate: float, initial: float = 0.0) -> None:
        self.rate = rate
        self.initial = initial
        """Average of a key without values."""
        self._means: dict[str, tuple[float, float]] = {}

    def mean(self, key: str) -> float:
        return self._means.get(key, (self.initial, 0.0))[0]

    def weight(self, key: str) -> float:
        return self._means.get(key, (self.initial, 0.0))[1]

    def add(self, key: str, value: float) -> None:
        """Include `value` in the average of `key`; with a rate of 0 the average stays at `initial`."""
        if self.rate:
            weight = self.weight(key) + self.rate * (1 - self.weight(key))
            self._means[key] = (self.mean(key) + self.rate / weight * (value - self.mean(key)), weight)

    def state_dict(self) -> dict[str, Any]:
        return {key: list(pair) for key, pair in self._means.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._means = {key: (mean, weight) for key, (mean, weight) in state.items()}


class Spread:
    """Memory of the results of earlier batches; its state fits in JSON."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        """Newest result of each cell, with which the results of the next batch are compared."""
        self._deviation = RunningMeans(1 - DECAY)
        """Running standard deviation of each group."""

    def tells_apart(self, results: Values, cells: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return, for each result, whether its cell has different results in this batch or since the last one.

        If not, no result shows whether an action was good, and subtracting a baseline leaves only the baseline's error.
        """
        by_cell: dict[str, list[int]] = {}
        for row, cell in enumerate(cells):
            by_cell.setdefault(cell, []).append(row)
        is_different = np.zeros(len(results), np.bool_)
        for cell, rows in by_cell.items():
            seen = np.append(results[rows], self._last.get(cell, results[rows[0]]))
            is_different[rows] = differ(seen)  # if it is NaN, the learner skips an update whose loss becomes NaN
            if np.isfinite(results[rows[-1]]):
                self._last[cell] = float(results[rows[-1]])
        return is_different

    def standardized(self, group: str, advantages: Values) -> Values:
        """Return `advantages` with mean 0 and standard deviation 1, or less if this batch varies far less than usual.

        Equal advantages become zeros: rounding errors are not scaled up to a signal.
        """
        if not len(advantages):
            return advantages
        deviation = float(advantages.std())
        running = self._deviation.mean(group)
        rounding = _EPSILON * max(1.0, float(np.abs(advantages).max()))
        scaled: Values = (advantages - advantages.mean()) / (max(deviation, FLOOR * running) + rounding)
        if np.isfinite(deviation):
            self._deviation.add(group, deviation)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self._last), "deviation": self._deviation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = dict(state["last"])
        self._deviation.load_state_dict(state["deviation"])
