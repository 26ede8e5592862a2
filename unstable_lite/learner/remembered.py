"""Log-probabilities under a policy that never changes: equal steps, which small games repeat, need them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from unstable_lite.learner.batching import whole_ids
from unstable_lite.types import TrainItem

MOST_BYTES = 1 << 23
"""Bytes of the remembered steps' token ids. Values and bookkeeping of short steps take about twice as much."""


class Remembered:
    def __init__(self) -> None:
        self._logp: dict[tuple[bytes, Any], Tensor] = {}
        self._num_bytes = 0

    def of(
        self, items: Sequence[TrainItem], compute: Callable[[Sequence[TrainItem]], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Return each item's values. `compute` returns those of the items that are new; the oldest are forgotten."""
        keys = [_key(item) for item in items]
        new = {key: item for key, item in zip(keys, items, strict=True) if key not in self._logp}
        if new:
            self._logp.update(zip(new, compute([*new.values()]), strict=True))
            self._num_bytes += sum(len(ids) for ids, _ in new)
        values = [self._logp[key] for key in keys]
        while self._num_bytes > MOST_BYTES:
            oldest = next(iter(self._logp))
            del self._logp[oldest]
            self._num_bytes -= len(oldest[0])
        return values


def _key(item: TrainItem) -> tuple[bytes, Any]:
    """Return the tokens, and those among them that are trained."""
    forced = None if item.forced is None else (item.forced.at, len(item.forced.ids))
    return whole_ids(item).tobytes(), (len(item.prompt_ids), forced)
