"""Turn steps into micro-batches: forests of prefix trees, or padded rows.

Decides which tokens are trained: those of the completion with its stop token, and no others: ids that were forced into
it (`types.Forced`) are read like a prompt. Each trained token is listed with the position that predicts it, so that
padding and prompts cannot be trained by accident. The prompts of a game begin alike, and small games repeat whole
items; in a forest the model computes a common prefix once. Knows nothing of models, losses or the meaning of rewards.
`S` counts sequences, `N` a micro-batch's trained tokens, `U` the different ones among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstable_lite.errors import RequestError
from unstable_lite.learner.forest import Forest
from unstable_lite.reward_transformations.transforms import weight_problem
from unstable_lite.types import Logprobs, TokenIds, TrainItem

IntArray = npt.NDArray[np.int64]
ROUNDING = 1e-6
"""Largest advantage that counts as 0, in the loss and in `zero_advantage` alike."""
BATCH_COST = {"cpu": 128, "mps": 128, "cuda": 512}
"""Fixed cost of one more micro-batch by type of device, in tokens: each starts its own forward and backward pass."""
FOREST_COST = 1.1
"""Cost of a token in a forest, in tokens of rows: where little is shared, rows are faster."""

Layout = Literal["forest", "rows", "separate"]
"""Way to lay out sequences: a shared prefix once; equal sequences once; each item alone, as dropout needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A forest in one row, or rows padded on the right, which under causal attention no token sees.

    In a batch of prompts the one token after each prompt takes the place of the trained ones. It is not known, so the
    tensors after `index_N`, and `target_U`, are empty.
    """

    tokens_BT: Tensor
    forest: Forest | None
    """None for rows."""
    source_U: Tensor
    """Position in the flattened `tokens_BT` that predicts each token."""
    target_U: Tensor
    """Token that each of these positions predicts."""
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
    """Number of the items' tokens; a shared one counts for each of its items."""
    items: tuple[TrainItem, ...]
    rows: tuple[int, ...]
    """Indices of `items`, in their order."""

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
            name: value.to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, Tensor | Forest)
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
    layout: Layout = "forest",
    of_prompts: bool = False,
) -> list[MicroBatch]:
    """Return micro-batches of prompts and completions, or of prompts alone.

    Each has at most `max_tokens` computed tokens, padding included, and `max_rows` sequences, or is one sequence. The
    largest comes first, so that a lack of memory shows at once.
    """
    same: dict[Any, _Sequence] = {}
    for index, item in enumerate(items):
        ids = item.prompt_ids if of_prompts else whole_ids(item)
        key = index if layout == "separate" else ids.tobytes()
        same.setdefault(key, _Sequence(ids, [])).items.append(index)
    sequences, is_forest = list(same.values()), False
    if layout == "forest":  # the order of big-endian bytes is that of the tokens
        sequences.sort(key=lambda one: one.ids.astype(">u4").tobytes())
        shared = [0, *(common_prefix(one.ids, other.ids) for one, other in itertools.pairwise(sequences))]
        num_tokens = sum(len(one.ids) for one in sequences)
        is_forest = FOREST_COST * (num_tokens - sum(shared)) < num_tokens
    if not is_forest:
        sequences.sort(key=lambda one: len(one.ids), reverse=True)
        shared = [0] * len(sequences)
    length_S = np.array([len(one.ids) for one in sequences], np.int64)
    shared_S = np.array(shared[: len(sequences)], np.int64)
    part = _part(length_S - shared_S, share)
    sequences, length_S, shared_S = sequences[part], length_S[part], shared_S[part]
    groups = _groups(length_S, shared_S if is_forest else None, max_tokens, max_rows, BATCH_COST[device])
    return [lay_out(items, sequences[group], shared_S[group] if is_forest else None, of_prompts) for group in groups]


@dataclass(frozen=True, slots=True)
class _Sequence:
    ids: TokenIds
    items: list[int]
    """Indices of the items with these tokens."""


def common_prefix(one: TokenIds, other: TokenIds) -> int:
    """Return the number of tokens with which both begin."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    return int(differs.argmax()) if differs.any() else most


def _part(cost_S: IntArray, share: Share) -> slice:
    """Return a rank's part of sequences; all parts cost nearly the same."""
    rank, num_ranks = share
    middle_S = cost_S.cumsum() - cost_S / 2
    begin, end = np.searchsorted(middle_S, cost_S.sum() * np.array([rank, rank + 1]) / num_ranks)
    return slice(int(begin), int(end))


def _groups(
    length_S: IntArray, shared_S: IntArray | None, max_tokens: int, max_rows: int | None, batch_cost: int
) -> list[slice]:
    """Cut sequences, in their order, into groups of least cost; the largest comes first.

    A computed token costs one token, padding and repeated prefixes included, and a group `batch_cost` tokens.
    shared_S: number of tokens that each shares with the one before it; None: rows of descending length.
    """
    num = len(length_S)
    sum_S = np.zeros(0) if shared_S is None else (length_S - shared_S).cumsum()
    cost = np.full(num + 1, np.inf)  # of the best cut of the first n sequences
    cost[0] = 0.0
    begin = np.zeros(num + 1, np.int64)  # start of its last group
    size = np.zeros(num + 1, np.int64)  # number of tokens of its last group
    for first, longest in enumerate(length_S.tolist()):
        most = min(max_rows or num, num - first)
        if shared_S is None:
            size_G = longest * np.arange(1, max(1, min(most, max_tokens // longest)) + 1)
        else:
            fitting = int(np.searchsorted(sum_S, sum_S[first] + max_tokens - longest, side="right")) - first
            size_G = longest + sum_S[first : first + max(1, min(most, fitting))] - sum_S[first]
        stop_G = first + 1 + np.arange(len(size_G))
        cost_G = cost[first] + batch_cost + size_G
        is_better_G = cost_G < cost[stop_G]
        stop_G = stop_G[is_better_G]
        cost[stop_G], size[stop_G], begin[stop_G] = cost_G[is_better_G], size_G[is_better_G], first
        if shared_S is not None and len(size_G) == num:
            break  # all fit into one forest, and a cut repeats a prefix
    groups: list[slice] = []
    stop = num
    while stop:
        groups.append(slice(int(begin[stop]), stop))
        stop = int(begin[stop])
    return sorted(groups[::-1], key=lambda group: size[group.stop], reverse=True)


def lay_out(
    items: Sequence[TrainItem], sequences: Sequence[_Sequence], shared_S: IntArray | None, of_prompts: bool = False
) -> MicroBatch:
    """Return a micro-batch of sequences, with the list of its trained tokens.

    shared_S: number of tokens that each shares with the one before it; None for rows.
    """
    all_ids = [one.ids for one in sequences]
    tokens_BT, paths, forest = _rows(all_ids) if shared_S is None else _trees(all_ids, shared_S)
    order = [index for one in sequences for index in one.items]
    own = [items[index] for index in order]
    path_of = [path for path, one in zip(paths, sequences, strict=True) for _ in one.items]
    position_of = [_predicting(item, of_prompts) for item in own]
    pairs = list(zip(path_of, position_of, strict=True))
    # Equal predictions have the same target in the forest; of the token after a prompt only the source is there.
    source_N = np.concatenate([path[position] for path, position in pairs])
    target_N = source_N if of_prompts else np.concatenate([path[position + 1] for path, position in pairs])
    node_U, first_U, index_N = np.unique(target_N, return_index=True, return_inverse=True)
    trained = [] if of_prompts else own
    repeats = [len(item.completion_ids) for item in trained]
    advantages = np.array([item.reward for item in trained], np.float64)
    advantages[np.abs(advantages) <= ROUNDING] = 0.0
    of_tokens = [1.0 if item.token_weights is None else item.token_weights for item in trained]
    weights = [item.weight * np.ones(n) * each for item, n, each in zip(trained, repeats, of_tokens, strict=True)]
    versions = np.array([item.adapter_version for item in trained], np.int64)
    nothing = np.empty(0, np.float32)
    num_read = sum(len(one.ids) for one in sequences) if shared_S is None else tokens_BT.size
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        forest=forest,
        source_U=torch.from_numpy(source_N[first_U]),
        target_U=torch.from_numpy(tokens_BT.ravel()[node_U[: 0 if of_prompts else None]]),
        index_N=torch.from_numpy(index_N),
        item_N=torch.from_numpy(np.repeat(np.arange(len(trained)), repeats)),
        behaviour_logp_N=torch.from_numpy(
            np.concatenate([nothing, *(item.logprobs for item in trained)]).astype(np.float32)
        ),
        advantage_N=torch.from_numpy(np.repeat(advantages, repeats).astype(np.float32)),
        weight_N=torch.from_numpy(np.concatenate([nothing, *weights]).astype(np.float32)),
        version_N=torch.from_numpy(np.repeat(versions, repeats)),
        num_padding=tokens_BT.size - num_read,
        num_tokens=sum(len(one.ids) * len(one.items) for one in sequences),
        items=tuple(own),
        rows=tuple(order),
    )


def _predicting(item: TrainItem, of_prompts: bool) -> IntArray:
    """Return the position before each trained token, or before the one after the prompt."""
    position_N = len(item.prompt_ids) - 1 + np.arange(1 if of_prompts else len(item.completion_ids))
    if item.forced is not None and not of_prompts:
        position_N[item.forced.at :] += len(item.forced.ids)
    return position_N


def _rows(all_ids: Sequence[TokenIds]) -> tuple[IntArray, list[IntArray], None]:
    """Return the padded tokens, and the flattened position of each token of each sequence."""
    width = max(map(len, all_ids))
    tokens_BT = np.zeros((len(all_ids), width), np.int64)
    for row_T, ids in zip(tokens_BT, all_ids, strict=True):
        row_T[: len(ids)] = ids
    return tokens_BT, [row * width + np.arange(len(ids)) for row, ids in enumerate(all_ids)], None


def _trees(all_ids: Sequence[TokenIds], shared_S: IntArray) -> tuple[IntArray, list[IntArray], Forest]:
    """Return the tokens in depth-first order, the index of each token of each sequence, and the forest.

    shared_S: number of tokens that each sequence shares with the one before it; that of the first does not matter.
    """
    shared = [0, *shared_S[1:].tolist()]
    starts = np.cumsum([0, *(len(ids) - common for ids, common in zip(all_ids, shared, strict=True))])
    tokens_T, depth_T = (np.empty(starts[-1], np.int64) for _ in range(2))
    end_T = np.full(starts[-1], starts[-1])
    path, paths = np.empty(0, np.int64), []
    for ids, common, start, stop in zip(all_ids, shared, starts, starts[1:], strict=False):
        end_T[path[common:]] = start
        path = np.concatenate([path[:common], np.arange(start, stop)])
        paths.append(path)
        tokens_T[start:stop], depth_T[start:stop] = ids[common:], np.arange(common, len(ids))
    return tokens_T[None], paths, Forest(torch.from_numpy(depth_T), torch.from_numpy(end_T))
