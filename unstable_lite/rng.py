"""Private random streams: seeds derived from the run's, and states that survive in JSON.

The global `random` module belongs to TextArena's games; nothing of the orchestrator may draw from it.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from unstable_lite.types import GameKind


def derive_seed(run_seed: int, *path: str | int) -> int:
    """63 bits for the stream that `path` names, e.g. `derive_seed(seed, "buffer")`."""
    text = "/".join(str(part) for part in (run_seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def game_seed(run_seed: int, kind: GameKind, number: int) -> int:
    """31 bits for the `number`-th game of its kind; even for train, odd for eval, so the two never meet."""
    even = derive_seed(run_seed, kind, number) % 2**31 & ~1
    return even if kind == "train" else even | 1


def state_of(rng: random.Random) -> list[Any]:
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def restore(rng: random.Random, state: list[Any]) -> None:
    """Accepts what JSON made of `state_of`."""
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))
