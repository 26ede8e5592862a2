"""Adapters as PEFT directories that any engine can load: which ones are accepted, and how they are read and written.

Owns the accepted formats (safetensors, and JSON of bounded size), which are checked before any library maps a file, and
the digest with which two processes confirm that they hold the same adapter. A pickle (`.bin`, `.pt`) can run code, so
it is never opened; the error names it and says how to convert it. Loads torch only to read or write tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, deserialize, safe_open

from unstable_lite.errors import AdapterError, NoRoomError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MAX_JSON_BYTES = 1 << 20
MAX_NAME = 512
MAX_RANK = 1024
"""Rank limit if no run sets one."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

FLOATS = ("F64", "F32", "F16", "BF16")
"""Float types, as named by safetensors."""
ANY_DTYPES = (*FLOATS, "I64", "I32", "U8", "I8", "BOOL")

_HALF = re.compile(r"base_model\.model\.([A-Za-z_][\w.]*)\.lora_([AB])\.weight", re.ASCII)
_NOT_PLAIN_LORA = (
    *("modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "lora_bias", "alora_invocation_tokens"),
)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of `init_lora_weights` for which PEFT subtracts the initial pair from the base's weights."""
_TABLES = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "loftq_config", "auto_mapping")
"""Entries that may be lists or tables and are ignored here: the module that `auto_mapping` names is not imported. Any
other list or table requires more than plain LoRA."""


class Entry(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[int, ...]


def check_adapter(directory: Path, max_rank: int = MAX_RANK) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return the config and the header of a PEFT directory of plain LoRA whose tensors are pairs of its rank.

    Raises AdapterError for anything else.
    """
    if not os.path.isfile(directory / WEIGHTS):
        for name in PICKLES:
            if os.path.isfile(directory / name):
                raise AdapterError(
                    f"{directory / name} is a pickle, which can run code, so it is not opened. If you trust its "
                    f'source, convert it: python -c "import torch, safetensors.torch as s; '
                    f"s.save_file(torch.load('{name}', weights_only=True), '{WEIGHTS}')\""
                )
        raise AdapterError(f"{directory} has no {WEIGHTS}")
    config = read_json(directory / CONFIG)
    rank, targets = _check_config(config, directory, max_rank)
    header = read_header(directory / WEIGHTS, FLOATS)
    pairs: dict[str, set[str]] = {}
    for name, entry in header.items():
        match = _HALF.fullmatch(name)
        if match is None or len(entry.shape) != 2 or entry.shape[match[2] == "B"] != rank:
            raise AdapterError(
                f"{directory}: {name[:MAX_NAME]!r} of shape {entry.shape} is not half of a pair of rank {rank}"
            )
        if targets is not None and not f".{match[1]}".endswith(targets):
            raise AdapterError(f"{directory}: adapts {match[1]}, which is not in its target_modules")
        pairs.setdefault(match[1], set()).add(match[2])
    if not pairs or any(len(halves) != 2 for halves in pairs.values()):
        raise AdapterError(f"{directory}: lora_A and lora_B are not in pairs")
    return config, header


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON table without duplicate keys. Raises AdapterError if it exceeds MAX_JSON_BYTES or cannot be read."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("it has a duplicate key")
        return table

    try:
        if path.is_fifo():
            raise ValueError("it is a FIFO")
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"it is too large; the limit is {MAX_JSON_BYTES} bytes")
        table = json.loads(content.decode(), object_pairs_hook=once)
        if not isinstance(table, dict):
            raise ValueError("it is not a JSON table")
        return table
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def read_header(path: Path, dtypes: Collection[str] | None = ANY_DTYPES) -> dict[str, Entry]:
    """Return the entries of a safetensors file. Raises AdapterError if it is damaged or not of `dtypes` (None: any)."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is not a mapping
            header = {name: Entry(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (OSError, SafetensorError, UnicodeError) as error:
        raise AdapterError(f"{path} is not an intact safetensors file: {error}") from error
    for name, entry in header.items():
        if dtypes is not None and entry.dtype not in dtypes:
            raise AdapterError(f"{path}: {name[:MAX_NAME]!r} is of type {entry.dtype}; accepted: {', '.join(dtypes)}")
    return header


def read_content(path: Path) -> bytes:
    """Return the content of a file. Raises AdapterError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def digest_of(config: Mapping[str, Any], content: bytes) -> str:
    """Return the digest of a LoRA adapter, given its PEFT config and the bytes of its safetensors file.

    It covers the scale of the adapter and the name, dtype, shape and bytes of each tensor in the order of the names,
    so it does not depend on the tensors' order in the file. Raises AdapterError if the bytes are not safetensors.
    """
    digest = hashlib.blake2b(lora_scale(config).hex().encode(), digest_size=16)
    try:
        tensors = sorted(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterError(f"these bytes are not a safetensors file: {error}") from error
    for name, tensor in tensors:
        digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
        digest.update(tensor["data"])
    return digest.hexdigest()


def adapter_digest(directory: Path) -> str:
    """Return the digest of the adapter in a PEFT directory. Raises AdapterError if there is none."""
    config, _ = check_adapter(directory)
    return digest_of(config, read_content(directory / WEIGHTS))


def lora_scale(config: Mapping[str, Any]) -> float:
    """Return the factor by which the adapter's output is scaled, given its PEFT config."""
    rank = config["r"]
    return float(config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank))


def read_adapter(directory: Path, max_rank: int = MAX_RANK) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return the tensors, the config and the digest of a PEFT directory.

    Raises AdapterError unless it is plain LoRA of finite numbers.
    """
    config, _ = check_adapter(directory, max_rank)
    content = read_content(directory / WEIGHTS)
    return _tensors(content, directory / WEIGHTS), config, digest_of(config, content)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises AdapterError if it is damaged or holds a non-finite number."""
    read_header(path)
    return _tensors(read_content(path), path)


def serialized(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the content of a safetensors file."""
    from safetensors.torch import save

    content: bytes = save(dict(tensors), {"format": "pt"})
    return content


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Write an adapter into a new directory; see `new_directory`.

    Raises AdapterError also if the directory exists, because versions are never reused.
    """
    if directory.exists():
        raise AdapterError(f"{directory} already exists; an adapter version is written once")
    with new_directory(directory, sum(tensor.nbytes for tensor in tensors.values())) as unfinished:
        write_files(unfinished, tensors, peft_config)


def write_files(directory: Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Write the two files of a PEFT adapter into an existing directory."""
    write_file(directory / WEIGHTS, serialized(tensors))
    write_file(directory / CONFIG, json.dumps(peft_config, indent=2, sort_keys=True).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it and its directory to disk."""
    path.write_bytes(content)
    sync(path)
    sync(path.parent)


@contextlib.contextmanager
def new_directory(path: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a directory to fill, then rename it to `path`: a reader sees all of it or none of it.

    Raises NoRoomError if the memory or the disk is full, AdapterError if it cannot be written for another reason.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # left behind by a process that died
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        failure = NoRoomError if error.errno in NO_ROOM else AdapterError
        raise failure(explain(error, path, needed_bytes)) from error


def explain(error: OSError, path: Path, needed_bytes: int) -> str:
    """Return an error message that names the failure, the path and the remedy."""
    if not path.parent.exists():
        return (
            f"cannot write {path}: {path.parent} was removed while the run was using it (unless RemoveIPC=no, "
            "systemd-logind removes the files of a user without a session from /dev/shm). Continue with: run --resume"
        )
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "free space unknown"
    return (
        f"cannot write {path}: {error.strerror}; it needs {needed_bytes / 1e6:.1f} MB, {free}. "
        "Free some space, or choose another location"
    )


def sync(path: Path) -> None:
    """Sync a file, or the file names of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors in the content of `path`. Raises AdapterError as `read_tensors` does."""
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise AdapterError(f"{path} cannot be loaded: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.float().isfinite().all():  # as it is computed with: a float64 number may exceed float32
            raise AdapterError(f"{path}: {name} has values that are not finite")
    return tensors


def _check_config(config: Mapping[str, Any], directory: Path, max_rank: int) -> tuple[int, tuple[str, ...] | None]:
    """Return the rank and the suffixes of the adapted modules (None: any). Ignores the base that the config names."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{directory}: peft_type is {str(config.get('peft_type'))[:40]!r}; only LORA can be served")
    tables = [key for key, value in config.items() if isinstance(value, list | dict) and value and key not in _TABLES]
    variants = [key for key in config if key.startswith("use_") and key != "use_rslora"]
    refused = [key for key in (*_NOT_PLAIN_LORA, *variants) if config.get(key)]
    refused += ["bias"] * (config.get("bias") not in (None, "none"))
    if present := list(dict.fromkeys(refused + tables)):
        raise AdapterError(f"{directory}: {', '.join(present)[:200]} cannot be served; only plain LoRA can")
    if (start := str(config.get("init_lora_weights"))[:40]).lower().startswith(_CHANGES_THE_BASE):
        raise AdapterError(
            f"{directory}: init_lora_weights is {start!r}: its pairs belong to a base whose weights PEFT changed, but "
            "would be served over the original base. In the training program, save it as plain LoRA: "
            "save_pretrained(…, path_initial_model_for_weight_conversion=<the adapter as saved before training>)"
        )
    if len(base := str(config.get("base_model_name_or_path") or "")) > MAX_NAME:
        raise AdapterError(f"{directory}: base_model_name_or_path = {base[:40]!r} has {len(base)} characters")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{directory}: r = {str(rank)[:40]} is not a rank")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:
        raise AdapterError(f"{directory}: lora_alpha = {str(alpha)[:40]} is not a finite number")
    if rank > max_rank:
        raise AdapterError(f"{directory}: rank {rank} exceeds the engine's lora_rank = {max_rank}")
    if targets in (None, "all-linear"):
        return rank, None
    if not isinstance(targets, Sequence) or isinstance(targets, str) or not all(isinstance(t, str) for t in targets):
        raise AdapterError(f"{directory}: target_modules is not a list of names")
    return rank, tuple(f".{target}" for target in targets)
