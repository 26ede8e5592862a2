"""Adapters as files: PEFT directories that any engine can load.

Owns atomicity and durability; knows nothing of training. Reads safetensors only, so nothing read here can run code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from unstable_lite.adapters.peft_files import CONFIG, WEIGHTS, check_adapter, digest_of, read_header
from unstable_lite.errors import AdapterError, ModelError
from unstable_lite.files import sync


def digest(tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> str:
    """Return the digest by which an engine confirms that it read this adapter."""
    return digest_of(peft_config, safetensors.torch.save(dict(tensors)))


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Write a new directory atomically: a reader sees all of it or none of it.

    Raises AdapterError if it cannot be written or already exists, because versions are never reused.
    """
    if directory.exists():
        raise AdapterError(f"{directory} already exists; an adapter version is written once")
    unfinished = directory.parent / f".{directory.name}.unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished, tensors, peft_config)
        unfinished.rename(directory)
        sync(directory.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        needed_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise AdapterError(explain(error, directory, needed_bytes)) from error


def write(directory: Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Write the two files of a PEFT adapter into an existing directory."""
    write_file(directory / WEIGHTS, safetensors.torch.save(dict(tensors), {"format": "pt"}))
    write_file(directory / CONFIG, json.dumps(peft_config, indent=2, sort_keys=True).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it and its directory to disk."""
    path.write_bytes(content)
    sync(path)
    sync(path.parent)


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config of a PEFT directory. Raises ModelError unless it is plain, finite LoRA."""
    try:
        config, _ = check_adapter(directory)
    except AdapterError as error:
        raise ModelError(str(error)) from error
    return read_tensors(directory / WEIGHTS), config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises ModelError if it is damaged or holds a non-finite number."""
    try:
        read_header(path)
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (OSError, AdapterError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ModelError(f"{path}: {name} has values that are not finite")
    return tensors


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
