"""Histograms of an update's advantages, importance weights and completion lengths, in few buckets.

The size of the result does not depend on the batch. Knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unstable_lite.learner import UpdateResult
from unstable_lite.types import Histogram, TrainItem

BUCKETS = 30


def histograms_of(
    items: Sequence[TrainItem], result: UpdateResult, importance_weight_cap: float
) -> tuple[Histogram, ...]:
    """Return the histograms of the trained items.

    Importance weights are those of single tokens, truncated at the cap, regardless of the loss's level and mode. They
    are left out if the learner returned no log-probabilities.
    """
    reported = [(item, logp) for item, logp in zip(items, result.logprobs, strict=False) if len(logp)]
    trained = [item for item, _ in reported] or list(items)
    spread = [
        _histogram("advantage", np.asarray(result.advantages or [item.reward for item in trained])),
        _histogram("completion_tokens", np.asarray([len(item.completion_ids) for item in trained])),
    ]
    if reported:
        log_ratio = np.concatenate([logp - item.logprobs[: len(logp)] for item, logp in reported])
        # Capped twice: the exponential of a large ratio overflows, and that of the cap's logarithm may exceed the cap.
        weights = np.minimum(np.exp(np.minimum(log_ratio, np.log(importance_weight_cap))), importance_weight_cap)
        spread.append(_histogram("importance_weight", weights, (0.0, importance_weight_cap)))
    return tuple(spread)


def _histogram(name: str, values: npt.NDArray[np.generic], between: tuple[float, float] | None = None) -> Histogram:
    """Count `values` in buckets. `between`: the outermost edges; default: the least and the greatest value."""
    counts, edges = np.histogram(values[np.isfinite(values.astype(np.float64))], BUCKETS, between)
    return Histogram(name=name, edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))
