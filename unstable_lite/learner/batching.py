"""Turn steps into padded micro-batches.

Decides which tokens are trained: those of the completion with its stop token, and no others: ids that were forced into
it (`types.Forced`) are read like a prompt. Each trained token is listed with the position that predicts it, so that
padding and prompts cannot be trained by accident. Items of the same tokens, which small games repeat, share a row, so
that the model computes them once. Knows nothing of models, losses or the meaning of rewards. `N` counts a micro-batch's
trained tokens, `U` those of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstable_lite.errors import RequestError
from unstable_lite.reward_transformations.transforms import weight_problem
from unstable_lite.types import Logprobs, TokenIds, TrainItem

ROUNDING = 1e-6
"""Largest advantage that counts as 0, in the loss and in `zero_advantage` alike."""
BATCH_COST = {"cpu": 128, "mps": 128, "cuda": 512}
"""Fixed cost of one more micro-batch by type of device, in tokens: each starts its own forward and backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded on the right. Under causal attention no token sees its right, so no mask is needed."""

    tokens_BT: Tensor
    source_U: Tensor
    """Position in the flattened `tokens_BT` that predicts each token; in a batch of prompts, their ends."""
    target_U: Tensor
    """Token that each of these positions predicts; empty in a batch of prompts, like the other tensors that follow."""
    index_N: Tensor
    """Index of each trained token among the `U` tokens."""
    item_N: Tensor
    """Index of each trained token's item in `rows`."""
    behaviour_logp_N: Tensor
    """Log-probabilities of these tokens when they were sampled (μ)."""
    advantage_N: Tensor
    """Reward of each token's item; exactly 0 if it differs from 0 only by rounding."""
    weight_N: Tensor
    """Factor of the policy's loss on each token."""
    version_N: Tensor
    """Version of the adapter that sampled each token."""
    num_padding: int
    num_tokens: int
    """Number of the items' tokens; those of a shared row count for each of its items."""
    rows: tuple[int, ...]
    """Indices of these items, in this order."""

    def gather(self, per_item: Sequence[Tensor]) -> Tensor:
        """Return `N` values, from one tensor per item over its trained tokens."""
        return torch.cat([self.behaviour_logp_N[:0], *(per_item[row] for row in self.rows)])

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """Return, for each token, the mean of `values_N` over its completion."""
        num_I = torch.bincount(self.item_N, minlength=len(self.rows))
        total_I = values_N.new_zeros(len(num_I)).index_add(0, self.item_N, values_N)
        return (total_I / num_I)[self.item_N]

    def scatter(self, figures_N: Tensor, per_item: list[Tensor]) -> None:
        """Store this micro-batch's `N` values at its items in `per_item`."""
        lengths = torch.bincount(self.item_N, minlength=len(self.rows)).tolist()
        for row, part in zip(self.rows, torch.split(figures_N, lengths), strict=True):
            per_item[row] = part

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Items that are trained on, and the fate of the others."""

    items: list[TrainItem]
    kept: list[int]
    """Index of each of `items` among the given items."""
    num_dropped: int
    """Number of steps that are too long to train on, or have no completion token."""

    @property
    def mean_completion_len(self) -> float:
        """Mean number of completion tokens of `items`, of which there is at least one."""
        return sum(len(item.completion_ids) for item in self.items) / len(self.items)

    def spread(self, of_items: Sequence[Logprobs]) -> tuple[Logprobs, ...]:
        """Map values of `items` back to the given items; a dropped item gets an empty array."""
        spread = [np.empty(0, np.float32)] * (len(self.kept) + self.num_dropped)
        for index, values in zip(self.kept, of_items, strict=True):
            spread[index] = values
        return tuple(spread)


def unsampled(prompt_ids: TokenIds, completion_ids: TokenIds) -> TrainItem:
    """Return an item that no engine sampled, with 0 for the fields of reinforcement learning."""
    return TrainItem(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=np.zeros(len(completion_ids), np.float32),
        reward=0.0,
        trajectory=0,
        adapter_version=0,
    )


def length(item: TrainItem) -> int:
    """Return the number of tokens that the learner reads, forced ones included."""
    return len(item.prompt_ids) + len(item.completion_ids) + (0 if item.forced is None else len(item.forced.ids))


def whole_ids(item: TrainItem) -> TokenIds:
    """Return prompt and completion as the engine read them, with the forced ids in their place."""
    ids, forced = item.completion_ids, item.forced
    if forced is not None:
        ids = np.concatenate([ids[: forced.at], forced.ids, ids[forced.at :]])
    return np.concatenate([item.prompt_ids, ids])


def check(items: Sequence[TrainItem], vocab_size: int) -> None:
    """Raise RequestError for an item that no engine can have sampled; a GPU would fail with a device assert."""
    for i, item in enumerate(items):
        ids, forced = whole_ids(item), item.forced
        if forced is not None and not 0 <= forced.at <= len(item.completion_ids):
            raise RequestError(f"item {i}: forced ids at {forced.at} of {len(item.completion_ids)} completion tokens")
        if len(item.logprobs) != len(item.completion_ids):
            raise RequestError(
                f"item {i}: {len(item.logprobs)} logprobs for {len(item.completion_ids)} completion tokens"
            )
        if reason := weight_problem(item.weight, item.token_weights, item.completion_ids):
            raise RequestError(f"item {i} has {reason}")
        if not len(item.prompt_ids):
            raise RequestError(f"item {i}: an empty prompt predicts no token; begin the template with one")
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise RequestError(
                f"item {i}: token id {outside[0]} is outside the learner's vocabulary of {vocab_size}; "
                "engine and learner must load the same model"
            )


def fit(items: Sequence[TrainItem], max_train_len: int | None) -> Fitted:
    """Drop the steps that cannot be trained on.

    Answers are not truncated, because the move is at the end of the answer and the advantage belongs to the move.
    """
    limit = math.inf if max_train_len is None else max_train_len
    kept = [index for index, item in enumerate(items) if len(item.completion_ids) and length(item) <= limit]
    return Fitted(items=[items[index] for index in kept], kept=kept, num_dropped=len(items) - len(kept))


Share = tuple[int, int]
"""One rank's part of a batch that several ranks divide: the rank, and their number."""
WHOLE: Share = (0, 1)


def make_micro_batches(
    items: Sequence[TrainItem],
    max_tokens: int,
    max_rows: int | None,
    share: Share = WHOLE,
    device: str = "cpu",
    share_rows: bool = True,
) -> list[MicroBatch]:
    """Return micro-batches of prompts and completions, with rows of similar length together.

    share_rows: whether items of the same tokens share a row; not with dropout, which differs from item to item.
    """
    same: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        same.setdefault(_tokens(item) if share_rows else index, []).append(index)
    sequences = list(same.values())
    groups = _groups([length(items[first]) for first, *_ in sequences], max_tokens, max_rows, share, BATCH_COST[device])
    return [pad(items, [sequences[row] for row in rows]) for rows in groups]


def make_prompt_batches(
    items: Sequence[TrainItem], max_tokens: int, max_rows: int | None, share: Share = WHOLE, device: str = "cpu"
) -> list[MicroBatch]:
    """Return micro-batches of prompts, with rows of similar length together."""
    prompts = [unsampled(item.prompt_ids, item.completion_ids[:0]) for item in items]
    batches = []
    for batch in make_micro_batches(prompts, max_tokens, max_rows, share, device, share_rows=False):
        width = batch.tokens_BT.shape[1]
        ends_B = [index * width + len(items[row].prompt_ids) - 1 for index, row in enumerate(batch.rows)]
        batches.append(replace(batch, source_U=torch.tensor(ends_B)))
    return batches


def cut(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide rows into `num_parts` with nearly equal numbers of tokens, and long ones spread evenly."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        part = tokens.index(min(tokens))
        parts[part].append(row)
        tokens[part] += lengths[row]
    return parts


def _groups(
    lengths: Sequence[int], max_tokens: int, max_rows: int | None, share: Share, batch_cost: int
) -> list[list[int]]:
    """Group one rank's rows of similar length, the largest group first, so that a lack of memory shows at once.

    The rows are sorted by length and cut at the lowest cost: a token of padding costs one token, a group `batch_cost`
    tokens.
    """
    rank, num_ranks = share
    own = cut(lengths, num_ranks)[rank] if num_ranks > 1 else range(len(lengths))
    order = sorted(own, key=lengths.__getitem__, reverse=True)
    cost = np.full(len(order) + 1, np.inf)  # of the best cut of the first n rows
    cost[0] = 0.0
    begin = np.zeros(len(order) + 1, np.int64)  # start of its last group
    for first, row in enumerate(order):
        most = min(max(1, max_tokens // lengths[row]), max_rows or len(order), len(order) - first)
        sizes = np.arange(1, most + 1)
        with_group = cost[first] + batch_cost + sizes * lengths[row]
        is_better = with_group < cost[first + sizes]
        cost[first + sizes[is_better]] = with_group[is_better]
        begin[first + sizes[is_better]] = first
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begin[end] : end])
        end = int(begin[end])
    return sorted(groups[::-1], key=lambda rows: len(rows) * lengths[rows[0]], reverse=True)


def _tokens(item: TrainItem) -> tuple[bytes, ...]:
    """Return a key that only items of the same prompt, completion and forced ids have."""
    forced = () if item.forced is None else (str(item.forced.at).encode(), item.forced.ids.tobytes())
    return item.prompt_ids.tobytes(), item.completion_ids.tobytes(), *forced


def pad(items: Sequence[TrainItem], sequences: Sequence[Sequence[int]] | None = None) -> MicroBatch:
    """Return items as one padded rectangle, with the list of its trained tokens.

    sequences: for each row, the indices of its items, which have the same tokens; default: a row for each item.
    """
    if sequences is None:
        sequences = [[index] for index in range(len(items))]
    rows = [items[first] for first, *_ in sequences]
    tokens_BT, sources = _rectangle(rows)
    starts = np.cumsum([0, *map(len, sources)])
    indices = [
        start + np.arange(len(of_row))
        for start, of_row, sharing in zip(starts, sources, sequences, strict=False)
        for _ in sharing
    ]
    order = [index for sharing in sequences for index in sharing]
    own = [items[index] for index in order]
    repeats = [len(item.completion_ids) for item in own]
    advantages = np.array([item.reward for item in own], np.float64)
    advantages[np.abs(advantages) <= ROUNDING] = 0.0
    of_tokens = [1.0 if item.token_weights is None else item.token_weights for item in own]
    weights = [item.weight * np.ones(n) * each for item, n, each in zip(own, repeats, of_tokens, strict=True)]
    versions = np.array([item.adapter_version for item in own], np.int64)
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        source_U=torch.from_numpy(np.concatenate(sources)),
        target_U=torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64)),
        index_N=torch.from_numpy(np.concatenate(indices)),
        item_N=torch.from_numpy(np.repeat(np.arange(len(own)), repeats)),
        behaviour_logp_N=torch.from_numpy(np.concatenate([item.logprobs for item in own]).astype(np.float32)),
        advantage_N=torch.from_numpy(np.repeat(advantages, repeats).astype(np.float32)),
        weight_N=torch.from_numpy(np.concatenate(weights).astype(np.float32)),
        version_N=torch.from_numpy(np.repeat(versions, repeats)),
        num_padding=tokens_BT.size - sum(map(length, rows)),
        num_tokens=sum(map(length, own)),
        rows=tuple(order),
    )


def _rectangle(rows: Sequence[TrainItem]) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    """Return the padded tokens, and for each row the flattened positions that predict its trained tokens."""
    tokens_BT = np.zeros((len(rows), max(map(length, rows))), np.int64)
    sources: list[npt.NDArray[np.int64]] = []
    for i, row in enumerate(rows):
        tokens_BT[i, : length(row)] = whole_ids(row)
        # A token is predicted from the position before it.
        of_row = i * tokens_BT.shape[1] + len(row.prompt_ids) - 1 + np.arange(len(row.completion_ids))
        if row.forced is not None:
            of_row[row.forced.at :] += len(row.forced.ids)
        sources.append(of_row)
    return tokens_BT, sources
