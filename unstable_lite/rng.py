"""Private random streams: seeds derived from the run's seed, and states that JSON can hold; digests of texts.

The global `random` module belongs to TextArena's games; the orchestrator must not draw from it.
"""

from __future__ import annotations

import base64
import hashlib
import random
import struct
from typing import Any

from unstable_lite.types import GameKind


def derive_seed(run_seed: int, *path: str | int) -> int:
    """Return a 63-bit seed for the stream that `path` names, e.g. `derive_seed(seed, "buffer")`."""
    text = "/".join(map(str, (run_seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def digest_of(text: str) -> str:
    """Return a short text that differs for two texts."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def game_seed(run_seed: int, kind: GameKind, number: int) -> int:
    """Return a 31-bit seed for the `number`-th game of its kind; even for train, odd for eval, so none coincide."""
    even = derive_seed(run_seed, kind, number) % 2**31 & ~1
    return even if kind == "train" else even | 1


def question_seed(number: int) -> int:
    """Return the seed of the `number`-th question of an evaluation: questions are asked in the order of their file."""
    return 2 * number + 1


def question_number(seed: int) -> int:
    """Return the number of a game's question, to be taken modulo the number of questions."""
    return seed // 2


def state_of(rng: random.Random) -> list[Any]:
    """Return the state in a form for JSON that is half as long as the generator's words would be."""
    version, words, gauss = rng.getstate()
    return [version, base64.b64encode(struct.pack(f"<{len(words)}I", *words)).decode(), gauss]


def restore(rng: random.Random, state: list[Any]) -> None:
    """Restore a state that `state_of` returned, before or after JSON."""
    version, words, gauss = state
    rng.setstate((version, tuple(word for (word,) in struct.iter_unpack("<I", base64.b64decode(words))), gauss))
