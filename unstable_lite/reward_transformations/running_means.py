"""Exponential averages that start without bias and survive a restart."""

from __future__ import annotations

from typing import Any


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
