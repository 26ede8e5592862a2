"""Data gathered per micro-batch while a gradient is computed, and the metrics derived from it.

Also the histograms of an update, in few buckets. Knows nothing of optimisers or of the loss's formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstable_lite.learner import UpdateResult, distributed, losses
from unstable_lite.learner.batching import MicroBatch
from unstable_lite.types import Histogram, TrainItem

BUCKETS = 30
"""Number of buckets of a histogram. It does not depend on the size of the batch."""


@dataclass(slots=True)
class Trained:
    """Loss and tokens of a pass. `N` counts the trained tokens of all micro-batches so far."""

    rows: list[int] = field(default_factory=list)
    """Items that the tokens belong to, in the order of the tokens."""
    _loss: Tensor | float = 0.0
    _tokens: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Columns of each micro-batch: log-probability, that when it was sampled, entropy, version, weight, and the
    log-probability under the reference (NaN if it was not computed)."""
    _num_padding: int = 0
    _num_positions: int = 0
    _num_read: int = 0
    """Number of the items' tokens, those of prompts included."""

    def add(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, reference_logp_N: Tensor | None, loss: Tensor
    ) -> None:
        """Add a micro-batch.

        reference_logp_N: if it was computed. In a clipped step the reference is the update's first policy.
        """
        if reference_logp_N is None:
            reference_logp_N = torch.full_like(logp_N, torch.nan)
        of_batch = batch.behaviour_logp_N, entropy_N.detach(), batch.version_N, batch.weight_N
        self._tokens.append((logp_N.detach(), *of_batch, reference_logp_N.detach()))
        self._loss = self._loss + loss.detach()
        self.rows += batch.rows
        self._num_padding += batch.num_padding
        self._num_positions += batch.tokens_BT.numel()
        self._num_read += batch.num_tokens

    def gather(self) -> None:
        """Replace this rank's data with the data of all ranks."""
        if distributed.num_ranks() == 1:
            return
        columns = [torch.cat(parts).double() for parts in zip(*self._tokens, strict=True)] or [torch.zeros(0)] * 6
        logp_N, *of_batch, reference_logp_N = distributed.concat(torch.stack(columns))
        rows_1I = distributed.concat(torch.tensor([self.rows], dtype=torch.float64))
        counts = self._num_padding, self._num_positions, self._num_read
        loss, *counts = distributed.sum_metrics(np.array([self.loss, *counts], np.float64)).tolist()
        self._tokens = [(logp_N, *of_batch, reference_logp_N)]
        self.rows = rows_1I[0].int().tolist()
        self._loss = loss
        self._num_padding, self._num_positions, self._num_read = map(int, counts)

    def extend(self, other: Trained) -> None:
        """Add the tokens of another clipped step."""
        self._tokens += other._tokens

    @property
    def loss(self) -> float:
        """Loss, summed over all micro-batches."""
        return float(self._loss)

    @property
    def logp_N(self) -> Tensor:
        return torch.cat([logp_N for logp_N, *_ in self._tokens])

    @property
    def reference_logp_N(self) -> Tensor:
        return torch.cat([reference_logp_N for *_, reference_logp_N in self._tokens])

    @property
    def logp_std(self) -> float:
        """Standard deviation of the log-probabilities over all tokens."""
        return self.logp_N.std(correction=0).item()

    def per_item(self, figures_N: Tensor, items: Sequence[TrainItem]) -> list[Tensor]:
        """Return the values of each item's tokens. `items`: the items of the micro-batches."""
        parts = torch.split(figures_N, [len(items[row].completion_ids) for row in self.rows])
        of_row = dict(zip(self.rows, parts, strict=True))
        return [of_row[row] for row in range(len(items))]

    def metrics(self, version: int, importance_weight_cap: float, kl_metric: str) -> dict[str, float]:
        """Return metrics of the tokens.

        version: version of the adapter with these log-probabilities. kl_metric: name of the KL to the reference.
        """
        logp_N, behaviour_logp_N, entropy_N, version_N, weight_N, reference_logp_N = map(
            torch.cat, zip(*self._tokens, strict=True)
        )
        staleness_N = (version - version_N).float()
        num_computed = self._num_positions - self._num_padding
        kl = {}
        if not reference_logp_N.isnan().all():
            kl = losses.kl_metrics(kl_metric, logp_N, reference_logp_N, behaviour_logp_N, importance_weight_cap)
        return {
            "loss": self.loss,
            "logp_mean": logp_N.mean().item(),
            "entropy": entropy_N.mean().item(),
            "staleness_mean": staleness_N.mean().item(),
            "staleness_max": staleness_N.max().item(),
            "num_tokens": float(len(logp_N)),
            "weight_mean": weight_N.mean().item(),
            "weight_zero": (weight_N == 0).float().mean().item(),
            "avg_train_len": self._num_read / len(self.rows),
            "padding_share": self._num_padding / self._num_positions,
            "tokens_computed": float(num_computed),
            "tokens_repeated": float(self._num_read - num_computed),
            **kl,
            **losses.importance_metrics(logp_N, behaviour_logp_N, importance_weight_cap),
        }

    def clipping_metrics(self, clip_range: float, clip_range_high: float | None = None) -> dict[str, float]:
        """Return how far the policy had moved in clipped steps, each token at its own; empty without a step."""
        limits = clip_range, clip_range_high
        return losses.clipping_metrics(self.logp_N, self.reference_logp_N, *limits) if self._tokens else {}


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
