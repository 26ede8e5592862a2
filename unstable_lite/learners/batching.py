"""From steps to padded micro-batches.

Owns which tokens are trained: the completion's, stop token included, and nothing else. Each trained token is
listed with the position that predicts it, so that padding and prompts cannot be trained by accident. Knows nothing
of models, losses or what a reward means. `N` counts a micro-batch's trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstable_lite.errors import RequestError
from unstable_lite.learners.advantages import ROUNDING
from unstable_lite.types import Logprobs, TrainItem

BATCH_COST = 128
"""What one more micro-batch costs, in tokens: its passes are begun anew, however few tokens they are of."""


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
    """The item's reward, the same for all of its tokens; exactly 0 if only rounding keeps it from 0."""
    version_N: Tensor
    """Of the adapter that sampled them."""
    num_padding: int
    rows: tuple[int, ...]
    """Which of the items these are, in this order."""

    def gather(self, per_item: Sequence[Tensor]) -> Tensor:
        """`N` figures, from one tensor of an item's trained tokens for each of all items."""
        return torch.cat([self.behaviour_logp_N[:0], *(per_item[row] for row in self.rows)])

    def scatter(self, figures_N: Tensor, per_item: list[Tensor]) -> None:
        """The way back: put this micro-batch's `N` figures where its items stand in `per_item`."""
        lengths = torch.bincount(self.source_N // self.tokens_BT.shape[1], minlength=len(self.rows)).tolist()
        for row, part in zip(self.rows, torch.split(figures_N, lengths), strict=True):
            per_item[row] = part

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(self, **moved)


_TENSORS = ("tokens_BT", "source_N", "target_N", "behaviour_logp_N", "advantage_N", "version_N")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts padded on the right."""

    tokens_BT: Tensor
    last_B: Tensor
    """Where each prompt's last token stands."""
    rows: tuple[int, ...]
    """Which of the items these are, in this order."""

    def to(self, device: torch.device) -> PromptBatch:
        return replace(self, tokens_BT=self.tokens_BT.to(device), last_B=self.last_B.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The items that are trained, and what happened to the others."""

    items: list[TrainItem]
    kept: list[int]
    """Where each of `items` stood among those that were given."""
    num_dropped: int
    """Number of steps that are too long to train on, or have no completion token."""

    @property
    def mean_completion_len(self) -> float:
        """Mean number of completion tokens of `items`, of which there is at least one."""
        return sum(len(item.completion_ids) for item in self.items) / len(self.items)

    def spread(self, of_items: Sequence[Logprobs]) -> tuple[Logprobs, ...]:
        """What is known of each of `items`, for each one that was given; nothing of those that were dropped."""
        spread = [np.empty(0, np.float32)] * (len(self.kept) + self.num_dropped)
        for index, figures in zip(self.kept, of_items, strict=True):
            spread[index] = figures
        return tuple(spread)


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
    """Drop the steps that cannot be trained on.

    Answers are not truncated, because the move stands at the end of the answer and the advantage belongs to the move.
    """
    limit = math.inf if max_train_len is None else max_train_len
    kept = [index for index, item in enumerate(items) if len(item.completion_ids) and length(item) <= limit]
    return Fitted(items=[items[index] for index in kept], kept=kept, num_dropped=len(items) - len(kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of a batch is whose, where several ranks divide it."""

    rank: int = 0
    num_ranks: int = 1
    in_step: bool = False
    """Every rank makes the same number of micro-batches, empty ones if need be: where the ranks meet in each."""


WHOLE = Share()


def make_micro_batches(
    items: Sequence[TrainItem], max_tokens: int, max_rows: int | None, share: Share = WHOLE
) -> list[MicroBatch]:
    """Prompts and completions; rows of similar length together."""
    groups = _groups([length(item) for item in items], max_tokens, max_rows, share)
    return [replace(pad([items[row] for row in rows]), rows=tuple(rows)) if rows else _NOTHING for rows in groups]


def make_prompt_batches(
    items: Sequence[TrainItem], max_tokens: int, max_rows: int | None, share: Share = WHOLE
) -> list[PromptBatch]:
    """Prompts alone; rows of similar length together."""
    groups = _groups([len(item.prompt_ids) for item in items], max_tokens, max_rows, share)
    return [_pad_prompts(items, rows) if rows else _NO_PROMPT for rows in groups]


def cut(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Rows for each of `num_parts`, with nearly as many tokens in each and the long ones dealt out alike."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        part = tokens.index(min(tokens))
        parts[part].append(row)
        tokens[part] += lengths[row]
    return parts


def _groups(lengths: Sequence[int], max_tokens: int, max_rows: int | None, share: Share) -> list[list[int]]:
    """The rows of each micro-batch of one rank."""
    parts = cut(lengths, share.num_ranks) if share.num_ranks > 1 else [list(range(len(lengths)))]
    if not share.in_step:
        return _group(lengths, parts[share.rank], max_tokens, max_rows)
    of_ranks = [_group(lengths, rows, max_tokens, max_rows) for rows in parts]
    ours = of_ranks[share.rank]
    return ours + [[]] * (max(map(len, of_ranks)) - len(ours))


def _group(lengths: Sequence[int], all_rows: Sequence[int], max_tokens: int, max_rows: int | None) -> list[list[int]]:
    """Rows of similar length together, the largest group first, so that what does not fit the memory fails at once.

    Of all ways to cut the rows, sorted by length, the one that costs least: a token of padding costs a token, and a
    group as much as BATCH_COST tokens.
    """
    order = sorted(all_rows, key=lengths.__getitem__, reverse=True)
    cost = np.full(len(order) + 1, np.inf)  # of the best way to cut the first so many rows
    cost[0] = 0.0
    begin = np.zeros(len(order) + 1, np.int64)  # where its last group begins
    for first, row in enumerate(order):
        most = min(max(1, max_tokens // lengths[row]), max_rows or len(order), len(order) - first)
        sizes = np.arange(1, most + 1)
        with_group = cost[first] + BATCH_COST + sizes * lengths[row]
        is_better = with_group < cost[first + sizes]
        cost[first + sizes[is_better]] = with_group[is_better]
        begin[first + sizes[is_better]] = first
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[begin[end] : end])
        end = int(begin[end])
    return sorted(groups[::-1], key=lambda rows: len(rows) * lengths[rows[0]], reverse=True)


def _pad_prompts(items: Sequence[TrainItem], rows: list[int]) -> PromptBatch:
    lengths = [len(items[row].prompt_ids) for row in rows]
    tokens_BT = np.zeros((len(rows), max(lengths)), np.int64)
    for i, row in enumerate(rows):
        tokens_BT[i, : lengths[i]] = items[row].prompt_ids
    return PromptBatch(
        tokens_BT=torch.from_numpy(tokens_BT), last_B=torch.tensor(lengths, dtype=torch.int64) - 1, rows=tuple(rows)
    )


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
    advantages = np.array([row.reward for row in rows], np.float64)
    advantages[np.abs(advantages) <= ROUNDING] = 0.0
    versions = np.array([row.adapter_version for row in rows], np.int64)
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        source_N=torch.from_numpy(np.concatenate(sources)),
        target_N=torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64)),
        behaviour_logp_N=torch.from_numpy(np.concatenate([row.logprobs for row in rows]).astype(np.float32)),
        advantage_N=torch.from_numpy(np.repeat(advantages, repeats).astype(np.float32)),
        version_N=torch.from_numpy(np.repeat(versions, repeats)),
        num_padding=tokens_BT.size - sum(map(length, rows)),
        rows=tuple(range(len(rows))),
    )


_NOTHING = MicroBatch(
    tokens_BT=torch.zeros(1, 1, dtype=torch.int64),
    source_N=torch.zeros(0, dtype=torch.int64),
    target_N=torch.zeros(0, dtype=torch.int64),
    behaviour_logp_N=torch.zeros(0),
    advantage_N=torch.zeros(0),
    version_N=torch.zeros(0, dtype=torch.int64),
    num_padding=1,
    rows=(),
)
"""A pass over the model that trains nothing."""
_NO_PROMPT = PromptBatch(
    tokens_BT=torch.zeros(1, 1, dtype=torch.int64), last_B=torch.zeros(0, dtype=torch.int64), rows=()
)
