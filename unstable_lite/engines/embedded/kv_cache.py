"""Keys and values of every sequence, one slot each, and the reuse of prefixes by new prompts.

The first slots are those of running requests; the others keep finished sequences, because games of one env, and
turns of one game, begin alike. A prefix is reused by copying it, exact to the token, and within one adapter version
only. Knows no model and no requests.

Shapes: `L` layers, `S` slots, `H` key/value heads, `T` token positions, `D` head width.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from unstable_lite.types import TokenIds

IntArray = npt.NDArray[np.int64]

_NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape that the model determines."""

    num_layers: int
    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Prefix:
    """Longest prefix that a prompt shares with a slot now, and that it will share once the slot is computed."""

    slot: int
    length: int
    promised: int


class KVCache:
    def __init__(self, shape: CacheShape, max_len: int, num_running: int, num_kept: int) -> None:
        num_slots = num_running + num_kept
        self.key_LSHTD: torch.Tensor
        self.value_LSHTD: torch.Tensor
        self._shape = shape
        self.length_S = np.zeros(num_slots, np.int64)
        """Number of tokens with keys and values, by slot."""
        self.max_len = max_len
        self.num_running = num_running
        self.num_kept = num_kept
        self._token_ST = np.zeros((num_slots, max_len), np.int32)
        self._promised_S = np.zeros(num_slots, np.int64)
        self._version_S = np.full(num_slots, _NOBODY, np.int64)
        self._used_at_S = np.zeros(num_slots, np.int64)
        self._now = 0
        self._free = list(range(num_running))
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory for keys and values."""
        shape = self._shape
        # Heads before positions, so that the keys of one head are contiguous.
        sizes = (shape.num_layers, len(self.length_S), shape.num_heads, self.max_len)
        # Zeros, because masked values must be finite too. The system provides pages when they are written.
        self.key_LSHTD = torch.zeros(*sizes, shape.key_width, dtype=shape.dtype, device=shape.device)
        self.value_LSHTD = torch.zeros(*sizes, shape.value_width, dtype=shape.dtype, device=shape.device)

    def release(self) -> None:
        """Release the memory until `allocate`, and drop all sequences; none may be running."""
        self.clear()
        del self.key_LSHTD, self.value_LSHTD

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, ids: TokenIds, version: int) -> Prefix:
        """Return the prefix from which a prompt can start."""
        slots = np.flatnonzero(self._version_S == version)
        if not len(slots):
            return Prefix(0, 0, 0)
        shared = self._shared(slots, ids)
        ready = np.minimum(shared, self.length_S[slots])
        best = int(ready.argmax())
        promised = int(np.minimum(shared, self._promised_S[slots]).max())
        return Prefix(int(slots[best]), int(ready[best]), promised)

    def take(self, ids: TokenIds, version: int, source: int, shared: int) -> int:
        """Return a slot for a sequence whose first `shared` tokens are those of slot `source`."""
        # The lowest free slot, because attention over running rows reads every slot up to the highest in use.
        slot = heapq.heappop(self._free)
        if shared and source != slot:
            self._copy(source, slot, 0, shared)
        self._token_ST[slot, : len(ids)] = ids
        self._version_S[slot] = version
        self.length_S[slot] = shared
        self._promised_S[slot] = len(ids)
        self._touch(source)
        return slot

    def extend(self, slot_R: IntArray, count_R: IntArray, position_N: IntArray, id_N: IntArray) -> None:
        """Count new tokens of these slots as computed."""
        self._token_ST[np.repeat(slot_R, count_R), position_N] = id_N
        self.length_S[slot_R] += count_R

    def give_back(self, slot: int, num_prompt_tokens: int) -> None:
        """End a sequence: keep a copy, unless its prompt is kept already."""
        heapq.heappush(self._free, slot)
        self._promised_S[slot] = 0
        length, version = int(self.length_S[slot]), int(self._version_S[slot])
        if not self.num_kept or not length:
            return
        kept = self.num_running + np.flatnonzero(self._version_S[self.num_running :] == version)
        shared, target = 0, -1
        if len(kept):
            shared_S = np.minimum(self._shared(kept, self._token_ST[slot, :length]), self.length_S[kept])
            best = int(shared_S.argmax())
            shared, target = int(shared_S[best]), int(kept[best])
        if shared < num_prompt_tokens - 1:
            if shared == 0 or shared < self.length_S[target]:
                shared, target = 0, self.num_running + int(self._used_at_S[self.num_running :].argmin())
            self._copy(slot, target, shared, length)
            self._token_ST[target, :length] = self._token_ST[slot, :length]
            self._version_S[target] = version
            self.length_S[target] = length
        self._touch(target)

    def forget(self, version: int) -> None:
        """Stop reusing sequences of a version; their kept slots are overwritten first."""
        is_gone_S = self._version_S == version
        self._version_S[is_gone_S] = _NOBODY
        self._used_at_S[is_gone_S] = 0

    def clear(self) -> None:
        """Drop all cached sequences; none may be running."""
        assert self.num_free == self.num_running
        self._version_S[:] = _NOBODY
        self._used_at_S[:] = 0
        self._now = 0

    def _shared(self, slots: IntArray, ids: TokenIds) -> IntArray:
        """Return the number of equal tokens from the start, for each slot."""
        differs_ST = self._token_ST[slots, : len(ids)] != ids
        first_S = differs_ST.argmax(1)
        return np.where(differs_ST[np.arange(len(slots)), first_S], first_S, len(ids))

    def _copy(self, source: int, target: int, start: int, stop: int) -> None:
        for kind in (self.key_LSHTD, self.value_LSHTD):
            kind[:, target, :, start:stop] = kind[:, source, :, start:stop]

    def _touch(self, slot: int) -> None:
        self._now += 1
        self._used_at_S[slot] = self._now
