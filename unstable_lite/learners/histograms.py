"""How an update's advantages, importance weights and completion lengths were spread, as counts in few buckets.

What leaves the learner is bounded, whatever the batch. Knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unstable_lite.learners import UpdateResult
from unstable_lite.types import Histogram, TrainItem

BUCKETS = 30


def histograms_of(
    items: Sequence[TrainItem], result: UpdateResult, importance_weight_cap: float
) -> tuple[Histogram, ...]:
    """Of the items that were trained on. Completions are as long as they were sampled, cut for training or not.
    Importance weights, one a token, are those that the loss was given: cut at the cap. A learner that does not tell its
    log-probabilities gets none of them.
    """
    told = [(item, logp) for item, logp in zip(items, result.logprobs, strict=False) if len(logp)]
    trained = [item for item, _ in told] or list(items)
    spread = [
        _histogram("advantage", np.asarray(result.advantages or [item.reward for item in trained])),
        _histogram("completion_tokens", np.asarray([len(item.completion_ids) for item in trained])),
    ]
    if told:
        log_ratio = np.concatenate([logp - item.logprobs[: len(logp)] for item, logp in told])
        # Cut twice: the exponential of a large ratio overflows, and that of the cap's logarithm may be just above it.
        weights = np.minimum(np.exp(np.minimum(log_ratio, np.log(importance_weight_cap))), importance_weight_cap)
        spread.append(_histogram("importance_weight", weights, (0.0, importance_weight_cap)))
    return tuple(spread)


def _histogram(name: str, values: npt.NDArray[np.generic], between: tuple[float, float] | None = None) -> Histogram:
    """`between`: the outermost edges; default: the least and the greatest value."""
    counts, edges = np.histogram(values[np.isfinite(values.astype(np.float64))], BUCKETS, between)
    return Histogram(name=name, edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))
