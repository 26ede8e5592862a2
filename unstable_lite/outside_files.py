"""Adapters and states that come from elsewhere: what their files are, told before any library maps them.

Owns the forms that are taken: safetensors, and JSON of a bounded size; and the digest by which two processes find out
whether they hold the same adapter. A pickle (`.bin`, `.pt`) can run code, so it is never opened; only its name is told,
and how to convert it. Knows no tensors and loads no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from unstable_lite.errors import AdapterError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MAX_JSON_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 24
"""A header has some 150 bytes for each tensor."""
MAX_NAME = 512
MAX_RANK = 1024
"""Where no run says which."""

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types as safetensors names them."""
ANY_BYTES = FLOAT_BYTES | {"I64": 8, "I32": 4, "U8": 1, "I8": 1, "BOOL": 1}

_HALF = re.compile(r"base_model\.model\.([A-Za-z_][\w.]*)\.lora_([AB])\.weight", re.ASCII)
_NOT_PLAIN_LORA = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""How `init_lora_weights` begins where PEFT takes the fresh pair off the base's weights."""
_TABLES = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "loftq_config", "auto_mapping")
"""Entries that may be lists or tables, and are not asked for; any other that is one asks for more than plain LoRA.

`auto_mapping` names a module to import: nobody here does.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file."""
    stop: int


def is_file(path: Path) -> bool:
    """False also for what cannot be a path."""
    try:
        return path.is_file()
    except OSError:
        return False


def check_adapter(directory: Path, max_rank: int = MAX_RANK) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The config and the header of a PEFT directory of plain LoRA, whose tensors are pairs of that rank.

    Raises AdapterError for anything else.
    """
    if not is_file(directory / WEIGHTS):
        pickles = [name for name in PICKLES if is_file(directory / name)]
        raise AdapterError(_only_a_pickle(directory / pickles[0]) if pickles else f"{directory} has no {WEIGHTS}")
    config = read_json(directory / CONFIG)
    rank, targets = _check_config(config, directory, max_rank)
    header = read_header(directory / WEIGHTS, FLOAT_BYTES)
    pairs: dict[str, set[str]] = {}
    for name, entry in header.items():
        match = _HALF.fullmatch(name)
        if match is None or len(entry.shape) != 2 or entry.shape[match[2] == "B"] != rank:
            raise AdapterError(
                f"{directory}: {name[:MAX_NAME]} of shape {entry.shape} is no half of a pair of rank {rank}"
            )
        if targets is not None and not f".{match[1]}".endswith(targets):
            raise AdapterError(f"{directory}: adapts {match[1]}, which is none of its target_modules")
        pairs.setdefault(match[1], set()).add(match[2])
    if not pairs or any(len(halves) != 2 for halves in pairs.values()):
        raise AdapterError(f"{directory}: lora_A and lora_B do not come in pairs")
    return config, header


def read_json(path: Path) -> dict[str, Any]:
    """A table of at most MAX_JSON_BYTES. Raises AdapterError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise AdapterError(f"{path} is larger than any of its kind ({MAX_JSON_BYTES} bytes)")
        return _table(content)
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def read_header(path: Path, dtypes: Mapping[str, int] = ANY_BYTES) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name: they fill it to its last byte, one after the other.

    Raises AdapterError for a file that is none, or does not hold what its header says.
    """
    try:
        with path.open("rb") as file:
            return _entries(file, path.stat().st_size, dtypes)
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is no whole safetensors file: {error}") from error


def digest_of(config: Mapping[str, Any], content: bytes) -> str:
    """Return the digest of a LoRA adapter, given its PEFT config and the bytes of its safetensors file.

    It covers the scale of the adapter and the name, dtype, shape and bytes of each tensor in the order of the names,
    so it does not depend on where in the file a tensor is. Raises AdapterError if the bytes are no safetensors file.
    """
    digest = hashlib.blake2b(lora_scale(config).hex().encode(), digest_size=16)
    try:
        entries = _entries(io.BytesIO(content), len(content), ANY_BYTES)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"these bytes are no safetensors file: {error}") from error
    view = memoryview(content)
    for name, entry in sorted(entries.items()):
        digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        digest.update(view[entry.start : entry.stop])
    return digest.hexdigest()


def adapter_digest(directory: Path) -> str:
    """Return the digest of the adapter in a PEFT directory. Raises AdapterError if there is none."""
    config, _ = check_adapter(directory)
    try:
        content = (directory / WEIGHTS).read_bytes()
    except OSError as error:
        raise AdapterError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    return digest_of(config, content)


def lora_scale(config: Mapping[str, Any]) -> float:
    """Return the factor by which the adapter's output is scaled, given its PEFT config."""
    rank = config["r"]
    scale: float = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    return float(scale)


def _entries(file: BinaryIO, size: int, dtypes: Mapping[str, int]) -> dict[str, Entry]:
    """Read the header of a safetensors file of `size` bytes. Raises ValueError."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
    table = _table(file.read(header_bytes))
    table.pop("__metadata__", None)
    entries = {name: _entry(name, value, 8 + header_bytes, dtypes) for name, value in table.items()}
    stop = 8 + header_bytes
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != stop:
            raise ValueError(f"{name} begins at byte {entry.start}, where {stop} is expected")
        stop = entry.stop
    if stop != size:
        raise ValueError(f"it has {size} bytes, and its header tells of {stop}")
    return entries


def _entry(name: str, value: Any, base: int, dtypes: Mapping[str, int]) -> Entry:
    if len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"a tensor called {name[:40]!r}")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name}: shape and offsets are not sizes")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise ValueError(f"{name} is of type {str(dtype)[:40]}; taken are {', '.join(dtypes)}")
    if offsets[1] - offsets[0] != math.prod(shape) * dtypes[dtype]:
        raise ValueError(f"{name} has {offsets[1] - offsets[0]} bytes for {shape} of {dtype}")
    return Entry(dtype=dtype, shape=tuple(shape), start=base + offsets[0], stop=base + offsets[1])


def _are_sizes(numbers: Any) -> bool:
    return isinstance(numbers, list) and len(numbers) <= 8 and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)


def _check_config(config: Mapping[str, Any], directory: Path, max_rank: int) -> tuple[int, tuple[str, ...] | None]:
    """The rank, and how names of adapted modules end (None: any). The base that it names is not asked for."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{directory}: peft_type is {str(config.get('peft_type'))[:40]!r}; only LORA can be served")
    tables = [key for key, value in config.items() if isinstance(value, list | dict) and value and key not in _TABLES]
    refused = [key for key in _NOT_PLAIN_LORA if config.get(key)] + ["bias"] * (
        config.get("bias") not in (None, "none")
    )
    if present := list(dict.fromkeys(refused + tables)):
        raise AdapterError(f"{directory}: {', '.join(present)[:200]} cannot be served; plain LoRA can")
    if (start := str(config.get("init_lora_weights"))[:40]).lower().startswith(_CHANGES_THE_BASE):
        raise AdapterError(
            f"{directory}: init_lora_weights is {start!r}: its pairs belong to a base whose weights PEFT changed, and "
            "would be served over the plain one. Where it was trained, save it as plain LoRA: "
            "save_pretrained(…, path_initial_model_for_weight_conversion=<the adapter as saved before training>)"
        )
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{directory}: r = {str(rank)[:40]} is no rank")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise AdapterError(f"{directory}: lora_alpha = {str(alpha)[:40]} is no finite number")
    if rank > max_rank:
        raise AdapterError(f"{directory}: rank {rank}; the engine was started for at most lora_rank = {max_rank}")
    if targets in (None, "all-linear"):
        return rank, None
    if not isinstance(targets, Sequence) or isinstance(targets, str) or not all(isinstance(t, str) for t in targets):
        raise AdapterError(f"{directory}: target_modules is no list of names")
    return rank, tuple(f".{target}" for target in targets)


def _table(content: bytes) -> dict[str, Any]:
    """Raises ValueError unless it is a JSON table that says everything once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("it says something twice")
        return table

    table = json.loads(content.decode(), object_pairs_hook=once)
    if not isinstance(table, dict):
        raise ValueError("it is no JSON table")
    return table


def _only_a_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run code: it is not opened. If you trust where it is from, convert it: "
        f'python -c "import torch, safetensors.torch as s; '
        f"s.save_file(torch.load('{path.name}', weights_only=True), '{WEIGHTS}')\""
    )
