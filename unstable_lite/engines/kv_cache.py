"""Keys and values of every sequence, one slot each, and which of them a new prompt can start from.

The first slots are those of running requests; behind them stand finished sequences, kept because games of one env,
and turns of one game, open alike. A prefix is reused by copying it, token by token exact, and only within one adapter
version. Knows no model and no requests.

Shapes: `L` layers, `S` slots, `T` token positions, `H` key/value heads, `D` head width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from unstable_lite.types import TokenIds

_NOBODY = -1


class KVCache:
    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        max_len: int,
        num_running: int,
        num_kept: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_slots = num_running + num_kept
        # Zeros, not empty: what is masked out must still be finite. The system gives pages as they are written.
        self.key_LSTHD = torch.zeros(num_layers, num_slots, max_len, num_heads, key_width, dtype=dtype, device=device)
        self.value_LSTHD = torch.zeros(
            num_layers, num_slots, max_len, num_heads, value_width, dtype=dtype, device=device
        )
        self.token_ST = np.zeros((num_slots, max_len), np.int32)
        self.length_S = np.zeros(num_slots, np.int64)
        """How many tokens of a slot have keys and values."""
        self._version_S = np.full(num_slots, _NOBODY, np.int64)
        self._used_at_S = np.zeros(num_slots, np.int64)
        self._now = 0
        self._num_running = num_running
        self._free = list(reversed(range(num_running)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def best_prefix(self, ids: TokenIds, version: int) -> tuple[int, int]:
        """The slot that shares the longest prefix with `ids`, and that prefix's length."""
        is_same_ST = self.token_ST[:, : len(ids)] == ids
        shared_S = np.where(is_same_ST.all(1), len(ids), is_same_ST.argmin(1))
        shared_S = np.minimum(shared_S, self.length_S) * (self._version_S == version)
        slot = int(shared_S.argmax())
        return slot, int(shared_S[slot])

    def take(self, ids: TokenIds, version: int, source: int, shared: int) -> int:
        """A slot for a new sequence that starts with the first `shared` tokens of slot `source`."""
        # The lowest free slot: attention of running rows reads all slots up to the highest one in use.
        slot = min(self._free)
        self._free.remove(slot)
        if shared and source != slot:
            self._copy(source, slot, shared)
        self.token_ST[slot, : len(ids)] = ids
        self.length_S[slot] = shared
        self._version_S[slot] = version
        self._touch(source)
        return slot

    def give_back(self, slot: int) -> None:
        """The sequence is finished: keep it for prompts to come, unless one that is kept holds it already."""
        self._free.append(slot)
        if len(self.length_S) == self._num_running:
            return
        length, version = int(self.length_S[slot]), int(self._version_S[slot])
        ids = self.token_ST[slot, :length]
        kept = slice(self._num_running, None)
        is_same_ST = self.token_ST[kept, :length] == ids
        shared_S = np.where(is_same_ST.all(1), length, is_same_ST.argmin(1))
        shared_S = np.minimum(shared_S, self.length_S[kept]) * (self._version_S[kept] == version)

    def forget(self, version: int) -> None:
        """Nothing starts from this version's sequences any more."""
        self.length_S[self._version_S == version] = 0
        self._version_S[self._version_S == version] = _NOBODY

    def _copy(self, source: int, target: int, length: int) -> None:
        for kind in (self.key_LSTHD, self.value_LSTHD):
            kind[:, target, :length] = kind[:, source, :length]

    def _touch(self, slot: int) -> None:
        self._now += 1
        self._used_at_S[slot] = self._now
