"""Data gathered per micro-batch while a gradient is computed, and the metrics derived from it.

Knows nothing of optimisers or of the loss's formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unstable_lite.learner import distributed, losses
from unstable_lite.learner.batching import MicroBatch
from unstable_lite.types import Logprobs, TrainItem


@dataclass(slots=True)
class Trained:
    """Tokens of a pass. `N` counts the trained tokens of all micro-batches so far."""

    kl_metric: str = "kl_to_base"
    """Name of the KL metric, which names the reference."""
    _loss: Tensor | float = 0.0
    _tokens: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    _reference_logp: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Items that the tokens belong to, in the order of the tokens."""
    _num_padding: int = 0
    _num_positions: int = 0

    def add(
        self, batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor, reference_logp_N: Tensor | None, loss: Tensor
    ) -> None:
        """Add a micro-batch. reference_logp_N: if it was computed."""
        self._loss = self._loss + loss.detach()
        self._tokens.append((logp_N.detach(), batch.behaviour_logp_N, entropy_N.detach(), batch.version_N))
        if reference_logp_N is not None:
            self._reference_logp.append(reference_logp_N)
        self.rows += batch.rows
        self._num_padding += batch.num_padding
        self._num_positions += batch.tokens_BT.numel()

    def gather(self) -> None:
        """Replace this rank's data with the data of all ranks."""
        if distributed.num_ranks() == 1:
            return
        columns = [torch.cat(parts).double() for parts in zip(*self._tokens, strict=True)] or [torch.zeros(0)] * 4
        has_reference = bool(self._reference_logp)
        columns += [torch.cat(self._reference_logp).double() if has_reference else torch.zeros_like(columns[0])]
        *columns, reference_logp_N = distributed.concat(torch.stack(columns))
        rows_1I = distributed.concat(torch.tensor([self.rows], dtype=torch.float64))
        counted = [self.loss, self._num_padding, self._num_positions, has_reference]
        loss, num_padding, num_positions, num_references = distributed.sum_metrics(
            np.array(counted, np.float64)
        ).tolist()
        logp_N, behaviour_logp_N, entropy_N, version_N = columns
        self._tokens = [(logp_N, behaviour_logp_N, entropy_N, version_N)]
        self._reference_logp = [reference_logp_N] if num_references else []
        self.rows = rows_1I[0].int().tolist()
        self._loss, self._num_padding, self._num_positions = loss, int(num_padding), int(num_positions)

    @property
    def loss(self) -> float:
        """Loss, summed over all micro-batches."""
        return float(self._loss)

    @property
    def logp_std(self) -> float:
        """Standard deviation of the log-probabilities over all tokens."""
        return torch.cat([logp_N for logp_N, *_ in self._tokens]).std(correction=0).item()

    def logprobs(self, items: Sequence[TrainItem]) -> list[Logprobs]:
        """Return the log-probabilities of each item's tokens. `items`: the items of the micro-batches."""
        logp_N = torch.cat([logp_N for logp_N, *_ in self._tokens]).float().cpu().numpy()
        ends = np.cumsum([len(items[row].completion_ids) for row in self.rows])
        of_row = dict(zip(self.rows, np.split(logp_N, ends[:-1]), strict=True))
        return [of_row[row] for row in range(len(items))]

    @property
    def padding_share(self) -> float:
        return self._num_padding / self._num_positions

    def metrics(self, version: int, importance_weight_cap: float) -> dict[str, float]:
        """Return metrics of the tokens. version: version of the adapter with these log-probabilities."""
        logp_N, behaviour_logp_N, entropy_N, version_N = map(torch.cat, zip(*self._tokens, strict=True))
        staleness_N = (version - version_N).float()
        kl = {}
        if self._reference_logp:
            reference_logp_N = torch.cat(self._reference_logp)
            kl = losses.kl_metrics(self.kl_metric, logp_N, reference_logp_N, behaviour_logp_N, importance_weight_cap)
        return {
            "loss": self.loss,
            "logp_mean": logp_N.mean().item(),
            "entropy": entropy_N.mean().item(),
            "staleness_mean": staleness_N.mean().item(),
            "staleness_max": staleness_N.max().item(),
            "num_tokens": float(len(logp_N)),
            "avg_train_len": (self._num_positions - self._num_padding) / len(self.rows),
            "padding_share": self.padding_share,
            **kl,
            **losses.importance_metrics(logp_N, behaviour_logp_N, importance_weight_cap),
        }


@dataclass(slots=True)
class Clipped:
    """Steps of a clipped update, relative to its first policy."""

    _loss: Tensor | float = 0.0
    _tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, logp_N: Tensor, old_logp_N: Tensor, loss: Tensor) -> None:
        self._loss = self._loss + loss.detach()
        self._tokens.append((logp_N.detach(), old_logp_N))

    def extend(self, other: Clipped) -> None:
        """Add the tokens of another step."""
        self._tokens += other._tokens

    def gather(self) -> None:
        """Replace this rank's data with the data of all ranks."""
        if distributed.num_ranks() == 1:
            return
        columns = [torch.cat(parts) for parts in zip(*self._tokens, strict=True)] or [torch.zeros(0)] * 2
        logp_N, old_logp_N = distributed.concat(torch.stack(columns))
        self._tokens = [(logp_N, old_logp_N)]
        self._loss = distributed.sum_metric(self.loss)

    @property
    def loss(self) -> float:
        """Loss, summed over all micro-batches."""
        return float(self._loss)

    def metrics(self, clip_range: float) -> dict[str, float]:
        """Return the metrics of the last pass, each token at its own step; empty if the update stopped earlier."""
        if not self._tokens:
            return {}
        logp_N, old_logp_N = map(torch.cat, zip(*self._tokens, strict=True))
        return losses.clipping_metrics(logp_N, old_logp_N, clip_range)
