"""Attention of many sequences at once, each with its own cache slot, behind transformers' attention interface.

A forward pass is one flat row of `N` tokens: decoding rows and prompts of any length side by side, no padding outside
this file. Rows whose number of new tokens is similar attend together, as one padded bucket. A token attends
to itself and all earlier tokens of its row, in a layer with a window of `w` tokens to the last `w` of them.

Shapes: `N` tokens of the pass, `R` rows of a bucket, `Q` queries per row, `T` key positions, `H` heads, `D` width.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unstable_lite.engines.embedded.kv_cache import KVCache

IntArray = npt.NDArray[np.int64]

_names = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """Key positions to which the queries of a bucket attend within a window."""

    positions: slice
    mask_R1QT: Tensor
    """Summand of the attention logits: 0, or minus infinity if the query does not attend to the key."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Rows that attend together."""

    slots: slice | Tensor
    """Slots of the R rows; a slice needs no copy of keys and values."""
    take: Tensor
    """Index among the N tokens of each of the R × Q queries; that of padding is arbitrary."""
    keys: dict[int, Keys]
    """Keys by window."""


class CachedAttention:
    """Attention that is registered under its own name: `model.set_attn_implementation(attention.name)`."""

    def __init__(self, cache: KVCache, window_L: Sequence[int]) -> None:
        """Register the attention. `window_L`: window of each layer; at least `cache.max_len` if it has none."""
        self.name = f"unstable_lite_{next(_names)}"
        self._write_at: Tensor
        """Index in a layer's cache, flat but for the width, of each head of each of the N tokens."""
        self._buckets: tuple[list[Bucket], Tensor]
        """Index of each token's result among those of all buckets."""
        self._cache = cache
        self._window_L = window_L
        self._windows = set(window_L)
        self._hidden, self._visible = (cache.key_LSHTD.new_full((), summand) for summand in (-torch.inf, 0))
        # The registry keeps its entries forever, but the cache must go with its engine.
        this = weakref.proxy(self)
        transformers.AttentionInterface.register(self.name, lambda *args, **kwargs: this._attend(*args, **kwargs))

    def plan(self, slot_R: IntArray, count_R: IntArray, position_N: IntArray) -> None:
        """Prepare a pass: row i has `count_R[i]` new tokens; rows follow one another."""
        _, _, num_heads, max_len, _ = self._cache.key_LSHTD.shape
        start_R = count_R.cumsum() - count_R
        head_NH = slot_R.repeat(count_R)[:, None] * num_heads + np.arange(num_heads)
        self._write_at = self._on_device((head_NH * max_len + position_N[:, None]).ravel())
        buckets: list[Bucket] = []
        put_N = np.zeros(len(position_N), np.int64)
        num_results = 0
        # Factors of four limit the padding; rows of one new token (decoding) have their own bucket.
        size_R = np.ceil(np.log2(count_R) / 2)
        for size in np.unique(size_R):
            rows = np.flatnonzero(size_R == size)
            bucket, take_RQ, is_real_RQ = self._bucket(slot_R[rows], start_R[rows], count_R[rows], position_N)
            buckets.append(bucket)
            put_N[take_RQ[is_real_RQ]] = num_results + np.flatnonzero(is_real_RQ)
            num_results += take_RQ.size
        self._buckets = buckets, self._on_device(put_N)

    def _on_device(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._cache.key_LSHTD.device)

    def _bucket(
        self, slot_R: IntArray, start_R: IntArray, count_R: IntArray, position_N: IntArray
    ) -> tuple[Bucket, IntArray, npt.NDArray[np.bool_]]:
        """Make a bucket, and return the token of each of its R × Q queries, and which of them are real."""
        low, high = int(slot_R.min()), int(slot_R.max()) + 1
        slots: slice | Tensor
        if 2 * len(slot_R) > high - low:
            # To attend to idle slots in between is cheaper than to copy busy ones.
            slots, row_R, num_rows = slice(low, high), slot_R - low, high - low
        else:
            slots, row_R, num_rows = self._on_device(slot_R), np.arange(len(slot_R)), len(slot_R)
        width = int(count_R.max())
        is_real_RQ = np.zeros((num_rows, width), bool)
        is_real_RQ[row_R] = np.arange(width) < count_R[:, None]
        take_RQ = np.full((num_rows, width), start_R[0])
        take_RQ[row_R] = start_R[:, None] + np.arange(width)
        take_RQ[~is_real_RQ] = start_R[0]
        bucket = Bucket(slots, self._on_device(take_RQ.ravel()), self._keys(position_N[take_RQ]))
        return bucket, take_RQ, is_real_RQ

    def _keys(self, position_RQ: IntArray) -> dict[int, Keys]:
        """Return the keys that queries at these positions attend to, for each window of the model."""
        first, stop = int(position_RQ.min()), int(position_RQ.max()) + 1
        position_RQ1 = self._on_device(position_RQ[..., None])
        by_width: dict[int, Keys] = {}
        # Windows that contain all positions so far share a mask.
        for width in {min(window, stop) for window in self._windows}:
            positions = slice(max(0, first - width + 1), stop)
            key_T = torch.arange(positions.start, positions.stop, device=position_RQ1.device)
            is_hidden_RQT = key_T > position_RQ1
            if width < stop:
                is_hidden_RQT |= key_T <= position_RQ1 - width
            by_width[width] = Keys(positions, torch.where(is_hidden_RQT, self._hidden, self._visible)[:, None])
        return {window: by_width[min(window, stop)] for window in self._windows}

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Store keys and values (1 × H × N × D) of the N tokens, and attend with their queries.

        The parameters have transformers' names, because some models pass them by keyword.
        """
        query_NHD = query[0].transpose(0, 1).contiguous()
        keys_SHTD = self._cache.key_LSHTD[module.layer_idx]
        values_SHTD = self._cache.value_LSHTD[module.layer_idx]
        for cached_SHTD, new_1HND in ((keys_SHTD, key), (values_SHTD, value)):
            cached_SHTD.flatten(0, 2).index_copy_(0, self._write_at, new_1HND[0].transpose(0, 1).flatten(0, 1))
        buckets, put = self._buckets
        window = self._window_L[module.layer_idx]
        results = []
        for bucket in buckets:
            keys = bucket.keys[window]
            results.append(
                _attend_bucket(
                    query_NHD.index_select(0, bucket.take),
                    _select(keys_SHTD, bucket.slots, keys.positions),
                    _select(values_SHTD, bucket.slots, keys.positions),
                    keys.mask_R1QT,
                    scaling,
                )
            )
        return torch.cat(results).index_select(0, put)[None], None


def _attend_bucket(
    query_NHD: Tensor, key_RHTD: Tensor, value_RHTD: Tensor, mask_R1QT: Tensor, scaling: float | None
) -> Tensor:
    """Return the results of R × Q queries, one after the other."""
    num_queries, num_heads, width = query_NHD.shape
    num_rows, num_key_heads, *_ = key_RHTD.shape
    is_decoding = num_queries == num_rows
    # If each row has one query, the queries of heads that share a key head are the rows of one matrix.
    query_RHQD = (
        query_NHD.view(num_rows, num_key_heads, -1, width)
        if is_decoding
        else query_NHD.view(num_rows, -1, num_heads, width).transpose(1, 2)
    )
    is_grouped = not is_decoding and num_key_heads < num_heads
    if is_grouped and query_NHD.is_cuda:  # with a mask, CUDA has fast kernels for as many keys as queries only
        key_RHTD, value_RHTD = (
            kept.repeat_interleave(num_heads // num_key_heads, dim=1) for kept in (key_RHTD, value_RHTD)
        )
        is_grouped = False
    out_RHQD = scaled_dot_product_attention(
        query_RHQD, key_RHTD, value_RHTD, attn_mask=mask_R1QT, scale=scaling, enable_gqa=is_grouped
    )
    return (out_RHQD if is_decoding else out_RHQD.transpose(1, 2)).reshape(num_queries, num_heads, -1)


def _select(cached_SHTD: Tensor, slots: slice | Tensor, positions: slice) -> Tensor:
    if isinstance(slots, slice):
        return cached_SHTD[slots, :, positions]
    return cached_SHTD[:, :, positions].index_select(0, slots)
