"""From steps to padded micro-batches.

Owns which tokens are trained: the completion's, stop token included, and nothing else. Each trained token is
listed with the position that predicts it, so that padding and prompts cannot be trained by accident. Knows nothing
of models, losses or what an advantage means. `N` counts a micro-batch's trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstable_lite.errors import RequestError
from unstable_lite.types import TrainItem


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded on the right: under causal attention no token sees its right, so that no mask is needed."""

    tokens_BT: Tensor
    source_N: Tensor
    """Where in the flattened `tokens_BT` each trained token is predicted from."""
    target_N: Tensor
    """The trained tokens themselves."""
    behaviour_logp_N: Tensor
    """Their log-probabilities when they were sampled (μ)."""
    advantage_N: Tensor
    version_N: Tensor
    """Of the adapter that sampled them."""
    num_padding: int

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(self, **moved)


_TENSORS = ("tokens_BT", "source_N", "target_N", "behaviour_logp_N", "advantage_N", "version_N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The items that are trained, and what happened to the others."""

    items: list[TrainItem]
    num_cut: int
    """Completions whose tail was cut to fit."""
    num_dropped: int
    """Steps whose prompt leaves no room for a completion token."""


def length(item: TrainItem) -> int:
    return len(item.prompt_ids) + len(item.completion_ids)


def check(items: Sequence[TrainItem], vocab_size: int) -> None:
    """Raises RequestError for an item that no engine can have sampled; a GPU would answer with a device assert."""
    for i, item in enumerate(items):
        ids = np.concatenate([item.prompt_ids, item.completion_ids])
        if len(item.logprobs) != len(item.completion_ids):
            raise RequestError(
                f"item {i}: {len(item.logprobs)} logprobs for {len(item.completion_ids)} completion tokens"
            )
        if not len(item.prompt_ids):
            raise RequestError(f"item {i}: an empty prompt predicts nothing; begin the template with a token")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise RequestError(
                f"item {i}: token id {outside[0]} is outside the learner's vocabulary of {vocab_size}; "
                "engine and learner must load the same model"
            )


def fit(items: Sequence[TrainItem], max_train_len: int | None) -> Fitted:
    """Cut completions so that prompt and completion fit; drop what cannot be trained."""
    fitted: list[TrainItem] = []
    num_cut = 0
    for item in items:
        num_completion = len(item.completion_ids)
        room = num_completion if max_train_len is None else max_train_len - len(item.prompt_ids)
        if min(room, num_completion) < 1:
            continue
        if room < num_completion:
            num_cut += 1
            item = replace(item, completion_ids=item.completion_ids[:room], logprobs=item.logprobs[:room])
        fitted.append(item)
    return Fitted(items=fitted, num_cut=num_cut, num_dropped=len(items) - len(fitted))


def make_micro_batches(items: Sequence[TrainItem], max_tokens: int, max_rows: int | None) -> list[MicroBatch]:
    """Rows of similar length together, longest first, so that what does not fit the memory fails at once."""
    rows: list[TrainItem] = []
    batches: list[MicroBatch] = []
    for item in sorted(items, key=length, reverse=True):
        if rows and ((len(rows) + 1) * length(rows[0]) > max_tokens or len(rows) == max_rows):
            batches.append(pad(rows))
            rows = []
        rows.append(item)
    if rows:
        batches.append(pad(rows))
    return batches


def pad(rows: Sequence[TrainItem]) -> MicroBatch:
    """`rows` as one rectangle, with the list of its trained tokens."""
    width = max(map(length, rows))
    tokens_BT = np.zeros((len(rows), width), np.int64)
    sources: list[npt.NDArray[np.int64]] = []
    for i, row in enumerate(rows):
        num_prompt = len(row.prompt_ids)
        tokens_BT[i, :num_prompt] = row.prompt_ids
        tokens_BT[i, num_prompt : length(row)] = row.completion_ids
        # A token is predicted from the position before it.
        sources.append(i * width + np.arange(num_prompt - 1, length(row) - 1))
    repeats = [len(row.completion_ids) for row in rows]
    advantages = np.array([row.advantage for row in rows], np.float64)
    versions = np.array([row.adapter_version for row in rows], np.int64)
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        source_N=torch.from_numpy(np.concatenate(sources)),
        target_N=torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64)),
        behaviour_logp_N=torch.from_numpy(np.concatenate([row.logprobs for row in rows]).astype(np.float32)),
        advantage_N=torch.from_numpy(np.repeat(advantages, repeats).astype(np.float32)),
        version_N=torch.from_numpy(np.repeat(versions, repeats)),
        num_padding=tokens_BT.size - sum(map(length, rows)),
    )
