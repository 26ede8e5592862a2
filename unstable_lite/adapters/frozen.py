"""Frozen players: the base, and adapters that do not change, by the names that configs and commands give them.

Owns the names `base`, `adapter:DIRECTORY` and `run:DIRECTORY/ckpt-N` (or `newest`, `best`), the facts that an adapter's
files alone show, and the copies in a run directory. Loads no weights; the engines do.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import deserialize

from unstable_lite.adapters.peft_files import (
    CONFIG,
    WEIGHTS,
    adapter_digest,
    check_adapter,
    new_directory,
    read_content,
    read_json,
    sync,
    write_file,
)
from unstable_lite.adapters.run_adapters import find_saved
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.types import BASE

ADAPTER, RUN = "adapter:", "run:"
COPIES = "opponents"
"""Directory of the copies in a run directory."""
RECORD = "opponent.json"
"""File in a copy that says whose copy it is, and its digest."""
FIRST_FROZEN_VERSION = 1 << 29
"""First id of frozen adapters in a run. Updates count from 1, and adapters that return from 1 << 30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAdapter:
    """Facts about an adapter on disk."""

    path: Path
    """PEFT directory."""
    key: str
    """Digest of its weights and scale."""
    rank: int
    base: str
    """Base model that it names; "" if it names none."""
    sizes: dict[str, tuple[int, int]] = field(hash=False)
    """Inputs and outputs of each linear layer that it adapts, by the layer's name in the model."""
    is_zero: bool
    """Whether every B matrix is zero, so that it answers like the base."""


def is_frozen(name: str) -> bool:
    """Return whether an opponent's name is that of a frozen player. `adapter` and `run` are no modules of players."""
    return name == BASE or is_adapter(name)


def is_adapter(name: str) -> bool:
    """Return whether a name is that of a frozen player with an adapter."""
    return name.startswith((ADAPTER, RUN))


def find_adapter(name: str, *copies: Path | None) -> FrozenAdapter:
    """Return the adapter that `name` stands for: its copy in the first of the directories `copies` that has one.

    Raises ConfigError if there is no such directory, run or checkpoint; AdapterError if its files are not an adapter,
    or if the copy is damaged.
    """
    for directory in copies:
        if directory is not None and (copy := directory / slug(name)).is_dir():
            return _read_copy(copy)
    if name.startswith(RUN):
        try:
            return read_facts(find_saved(name.removeprefix(RUN)))
        except ConfigError as error:
            raise ConfigError(f"{name!r}: {error}") from error
    path = Path(name.removeprefix(ADAPTER)).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{name!r}: there is no directory {path}")
    return read_facts(path)


def read_facts(path: Path) -> FrozenAdapter:
    """Read an adapter. Raises AdapterError unless both files exist and are valid."""
    path = path.resolve()
    stored, header = check_adapter(path)
    try:
        with (path / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        is_zero = _is_zero(path / WEIGHTS)
    except OSError as error:
        raise AdapterError(f"{path} is not a readable adapter: {error}") from error
    halves = {name.removeprefix("base_model.model.").partition(".lora_")[::2]: e.shape for name, e in header.items()}
    layers = dict.fromkeys(layer for layer, _ in halves)
    return FrozenAdapter(
        path=path,
        # The same matrices with another scale are another model.
        key=f"{digest}-{stored.get('r')}-{stored.get('lora_alpha')}" + "-rslora" * bool(stored.get("use_rslora")),
        rank=stored["r"],
        base=stored.get("base_model_name_or_path") or "",
        sizes={layer: (halves[layer, "A.weight"][1], halves[layer, "B.weight"][0]) for layer in layers},
        is_zero=is_zero,
    )


def keep_copy(name: str, copies: Path, others: Path | None = None) -> FrozenAdapter:
    """Return the copy of an adapter in the directory `copies`, made now unless there is one.

    others: directory of another run's copies, from which it is made if they include it.
    Raises ConfigError and AdapterError as `find_adapter` does, NoRoomError and AdapterError as `new_directory` does,
    and OSError if the directory `copies` cannot be made.
    """
    found = find_adapter(name, copies, others)
    copy = copies / slug(name)
    if found.path == copy.resolve():
        return found
    contents = {file: read_content(found.path / file) for file in (CONFIG, WEIGHTS)}
    copies.mkdir(parents=True, exist_ok=True)
    sync(copies.parent)
    with new_directory(copy, sum(map(len, contents.values()))) as unfinished:
        for file, content in contents.items():
            write_file(unfinished / file, content)
        record = {"name": name, "source": str(found.path), "digest": adapter_digest(unfinished)}
        write_file(unfinished / RECORD, json.dumps(record, indent=2).encode())
    return read_facts(copy)


def source_of(name: str, copies: Path) -> str:
    """Return the directory that an adapter was copied from. Raises AdapterError for a copy without a record."""
    return str(read_json(copies / slug(name) / RECORD).get("source"))


def copies_of(config: Path) -> Path | None:
    """Return the directory of the copies if `config` is the config.toml of a run that has them."""
    copies = config.with_name(COPIES)
    return copies if config.name == "config.toml" and copies.is_dir() else None


def slug(name: str) -> str:
    """Return the directory name of a copy: readable, and different for different names."""
    readable = re.sub(r"[^\w.-]+", "-", name)[-60:].strip("-.")
    return f"{readable}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _read_copy(copy: Path) -> FrozenAdapter:
    found, written = read_facts(copy), read_json(copy / RECORD).get("digest")
    if (digest := adapter_digest(copy)) != written:
        raise AdapterError(
            f"{copy} is damaged: the digest of its adapter is {digest}, {written} was written. Restore the directory "
            "from a backup, or remove it to copy the opponent again from where its name points now"
        )
    return found


def _is_zero(weights: Path) -> bool:
    """Return whether every B matrix of an adapter is zero, given the bytes of its file, of any type."""
    for name, tensor in deserialize(weights.read_bytes()):  # type: ignore[no-untyped-call]
        if ".lora_B." in name:
            items_NB = np.frombuffer(bytearray(tensor["data"]), np.uint8).reshape(math.prod(tensor["shape"]), -1)
            items_NB[:, -1] &= 0x7F  # the sign is in the last byte, and zero may be negative
            if items_NB.any():
                return False
    return True
