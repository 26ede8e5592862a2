"""Attention of many sequences at once, each with its own cache slot, behind transformers' attention interface.

A forward pass is one flat row of `N` tokens: decoding rows and prompts of any length side by side, no padding outside
this file. Rows whose number of new tokens is similar attend together, as one padded bucket.

Shapes: `N` tokens of the pass, `R` rows of a bucket, `Q` queries per row, `T` key positions, `H` heads, `D` width.
"""

from __future__ import annotations

import itertools
import weakref
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
class Bucket:
    """Rows that attend together."""

    slots: slice | Tensor
    """Slots of the R rows; a slice needs no copy of keys and values."""
    take: Tensor
    """Index among the N tokens of each of the R × Q queries; that of padding is arbitrary."""
    num_rows: int
    span: int
    mask_R1QT: Tensor


class CachedAttention:
    """Attention that is registered under its own name: `model.set_attn_implementation(attention.name)`."""

    def __init__(self, cache: KVCache) -> None:
        self.name = f"unstable_lite_{next(_names)}"
        self._write_at: Tensor
        """Index in a layer's cache, flat but for the width, of each head of each of the N tokens."""
        self._buckets: tuple[list[Bucket], Tensor]
        """Index of each token's result among those of all buckets."""
        self._cache = cache
        # The registry keeps its entries forever, but the cache must go with its engine.
        this = weakref.proxy(self)
        transformers.AttentionInterface.register(self.name, lambda *args, **kwargs: this._attend(*args, **kwargs))

    def plan(self, slot_R: IntArray, count_R: IntArray, position_N: IntArray) -> None:
        """Prepare a pass: row i has `count_R[i]` new tokens; rows follow one another."""
        device = self._cache.key_LSHTD.device
        _, _, num_heads, max_len, _ = self._cache.key_LSHTD.shape
        start_R = count_R.cumsum() - count_R
        head_NH = slot_R.repeat(count_R)[:, None] * num_heads + np.arange(num_heads)
        self._write_at = torch.from_numpy((head_NH * max_len + position_N[:, None]).ravel()).to(device)
        self._buckets = self._sort(slot_R, start_R, count_R, position_N)

    def _sort(
        self, slot_R: IntArray, start_R: IntArray, count_R: IntArray, position_N: IntArray
    ) -> tuple[list[Bucket], Tensor]:
        buckets: list[Bucket] = []
        put_N = np.zeros(len(position_N), np.int64)
        num_results = 0
        # Factors of four limit the padding; rows of one new token (decoding) have their own bucket.
        size_R = np.ceil(np.log2(count_R) / 2)
        for size in np.unique(size_R):
            rows = np.flatnonzero(size_R == size)
            bucket, is_real = self._bucket(slot_R[rows], start_R[rows], count_R[rows], position_N)
            buckets.append(bucket)
            put_N[bucket.take.numpy(force=True)[is_real]] = num_results + np.flatnonzero(is_real)
            num_results += len(is_real)
        return buckets, torch.from_numpy(put_N).to(self._cache.key_LSHTD.device)

    def _bucket(
        self, slot_R: IntArray, start_R: IntArray, count_R: IntArray, position_N: IntArray
    ) -> tuple[Bucket, npt.NDArray[np.bool_]]:
        """Make a bucket, and return which of its R × Q queries are real."""
        device, dtype = self._cache.key_LSHTD.device, self._cache.key_LSHTD.dtype
        low, high = int(slot_R.min()), int(slot_R.max()) + 1
        slots: slice | Tensor
        if 2 * len(slot_R) > high - low:
            # To attend to idle slots in between is cheaper than to copy busy ones.
            slots, row_R, num_rows = slice(low, high), slot_R - low, high - low
        else:
            slots, row_R, num_rows = torch.from_numpy(slot_R).to(device), np.arange(len(slot_R)), len(slot_R)
        width = int(count_R.max())
        is_real_RQ = np.zeros((num_rows, width), bool)
        is_real_RQ[row_R] = np.arange(width) < count_R[:, None]
        take_RQ = np.zeros((num_rows, width), np.int64)
        take_RQ[row_R] = start_R[:, None] + np.arange(width)
        take_RQ[~is_real_RQ] = 0
        position_RQ = np.where(is_real_RQ, position_N[take_RQ], 0)
        span = int(position_RQ.max()) + 1
        mask_RQT = torch.arange(span) > torch.from_numpy(position_RQ)[..., None]
        zeros = torch.zeros(mask_RQT.shape, dtype=dtype)
        bucket = Bucket(
            slots=slots,
            take=torch.from_numpy(take_RQ.ravel()).to(device),
            num_rows=num_rows,
            span=span,
            mask_R1QT=zeros.masked_fill_(mask_RQT, -torch.inf)[:, None].to(device),
        )
        return bucket, is_real_RQ.ravel()

    def _attend(
        self,
        module: Any,
        query_1HND: Tensor,
        key_1HND: Tensor,
        value_1HND: Tensor,
        _mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Store keys and values of the N tokens, and attend with their queries."""
        query_NHD = query_1HND[0].transpose(0, 1).contiguous()
        keys_SHTD = self._cache.key_LSHTD[module.layer_idx]
        values_SHTD = self._cache.value_LSHTD[module.layer_idx]
        for cached_SHTD, new_1HND in ((keys_SHTD, key_1HND), (values_SHTD, value_1HND)):
            cached_SHTD.flatten(0, 2).index_copy_(0, self._write_at, new_1HND[0].transpose(0, 1).flatten(0, 1))
        buckets, put = self._buckets
        results = [
            self._attend_bucket(query_NHD.index_select(0, bucket.take), keys_SHTD, values_SHTD, bucket, scaling)
            for bucket in buckets
        ]
        return torch.cat(results).index_select(0, put)[None], None

    def _attend_bucket(
        self, query_NHD: Tensor, keys_SHTD: Tensor, values_SHTD: Tensor, bucket: Bucket, scaling: float | None
    ) -> Tensor:
        """Return the results of R × Q queries, one after the other."""
        num_queries, num_heads, width = query_NHD.shape
        is_decoding = num_queries == bucket.num_rows
        # If each row has one query, the queries of heads that share a key head are the rows of one matrix.
        query_RHQD = (
            query_NHD.view(bucket.num_rows, keys_SHTD.shape[1], -1, width)
            if is_decoding
            else query_NHD.view(bucket.num_rows, -1, num_heads, width).transpose(1, 2)
        )
        out_RHQD = scaled_dot_product_attention(
            query_RHQD,
            _select(keys_SHTD, bucket),
            _select(values_SHTD, bucket),
            attn_mask=bucket.mask_R1QT,
            scale=scaling,
            enable_gqa=not is_decoding,
        )
        return (out_RHQD if is_decoding else out_RHQD.transpose(1, 2)).reshape(num_queries, num_heads, -1)


def _select(cached_SHTD: Tensor, bucket: Bucket) -> Tensor:
    if isinstance(bucket.slots, slice):
        return cached_SHTD[bucket.slots, :, : bucket.span]
    return cached_SHTD[:, :, : bucket.span].index_select(0, bucket.slots)
