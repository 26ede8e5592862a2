"""Attention of many sequences at once, each with its own cache slot, behind transformers' attention interface.

A forward pass is one flat row of `N` tokens: decoding rows and prompts of any length side by side, no padding outside
this file. Rows whose number of new tokens is similar attend together, as one padded bucket.

Shapes: `N` tokens of the pass, `R` rows of a bucket, `Q` queries a row, `T` key positions, `H` heads, `D` width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from unstable_lite.engines.kv_cache import KVCache
from unstable_lite.errors import ModelError

IntArray = npt.NDArray[np.int64]

_names = itertools.count()


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that attend together."""

    slots: slice | Tensor
    """Of the R rows; a slice needs no copy of keys and values."""
    take_RQ: Tensor
    """Where in the N tokens each query is; padding points anywhere."""
    num_rows: int
    put_from: Tensor
    """Which of the R × Q results are real …"""
    put_to: Tensor
    """… and where they go."""
    span: int
    mask_R1QT: Tensor


class CachedAttention:
    """Registered under a name of its own: `model.set_attn_implementation(attention.name)`."""

    def __init__(self, cache: KVCache) -> None:
        self.name = f"unstable_lite_{next(_names)}"
        self.buckets: list[Bucket] = []
        self.write_at: Tensor
        """Flat cache positions of the N tokens."""
        self._cache = cache
        transformers.AttentionInterface.register(self.name, self._attend)

    def plan(self, slot_R: IntArray, count_R: IntArray, position_N: IntArray) -> None:
        """Prepare a pass: row i has `count_R[i]` new tokens, which stand one row after the other."""
        device, max_len = self._cache.key_LSTHD.device, self._cache.max_len
        start_R = count_R.cumsum() - count_R
        self.write_at = torch.from_numpy(slot_R.repeat(count_R) * max_len + position_N).to(device)
        self.buckets = []
        # Factors of four bound the padding; one new token (decoding) is a bucket of its own.
        size_R = np.ceil(np.log2(count_R) / 2)
        for size in np.unique(size_R):
            rows = np.flatnonzero(size_R == size)
            self.buckets.append(self._bucket(slot_R[rows], start_R[rows], count_R[rows], position_N))

    def _bucket(self, slot_R: IntArray, start_R: IntArray, count_R: IntArray, position_N: IntArray) -> Bucket:
        device, dtype = self._cache.key_LSTHD.device, self._cache.key_LSTHD.dtype
        low, high = int(slot_R.min()), int(slot_R.max()) + 1
        slots: slice | Tensor
        if 2 * len(slot_R) > high - low:
            # Idle slots in between are cheaper to attend to than busy ones are to copy.
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
        return Bucket(
            slots=slots,
            take_RQ=torch.from_numpy(take_RQ.ravel()).to(device),
            num_rows=num_rows,
            put_from=torch.from_numpy(np.flatnonzero(is_real_RQ)).to(device),
            put_to=torch.from_numpy(take_RQ[is_real_RQ]).to(device),
            span=span,
            mask_R1QT=zeros.masked_fill_(mask_RQT, -torch.inf)[:, None].to(device),
        )

    def _attend(
        self,
        module: Any,
        query_1HND: Tensor,
        key_1HND: Tensor,
        value_1HND: Tensor,
        _mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if softcap is not None or (sliding_window is not None and sliding_window < self._cache.max_len):
            raise ModelError(
                f"{type(module).__name__} attends with a sliding window of {sliding_window} tokens or a soft cap "
                f"({softcap}), which the embedded engine does not compute; lower engine.max_model_len to the window, "
                "take another model, or engine.kind = 'vllm'"
            )
        keys_STHD = self._cache.key_LSTHD[module.layer_idx]
        values_STHD = self._cache.value_LSTHD[module.layer_idx]
        keys_STHD.flatten(0, 1).index_copy_(0, self.write_at, key_1HND[0].transpose(0, 1))
        values_STHD.flatten(0, 1).index_copy_(0, self.write_at, value_1HND[0].transpose(0, 1))
        query_NHD = query_1HND[0].transpose(0, 1)
        out_NHD = query_NHD.new_empty(*query_NHD.shape[:2], values_STHD.shape[-1])
        for bucket in self.buckets:
            query_RQHD = query_NHD[bucket.take_RQ].view(bucket.num_rows, -1, *query_NHD.shape[1:])
            out_RHQD = scaled_dot_product_attention(
                query_RQHD.transpose(1, 2),
                _select(keys_STHD, bucket).transpose(1, 2),
                _select(values_STHD, bucket).transpose(1, 2),
                attn_mask=bucket.mask_R1QT,
                scale=scaling,
                enable_gqa=True,
            )
            real_NHD = out_RHQD.transpose(1, 2).flatten(0, 1)[bucket.put_from]
            out_NHD.index_copy_(0, bucket.put_to, real_NHD)
        return out_NHD[None], None


def _select(cached_STHD: Tensor, bucket: Bucket) -> Tensor:
    spanned_STHD = cached_STHD[:, : bucket.span]
    if isinstance(bucket.slots, slice):
        return spanned_STHD[bucket.slots]
    return spanned_STHD.index_select(0, bucket.slots)
