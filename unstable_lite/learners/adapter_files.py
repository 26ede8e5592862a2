"""Adapters as files: a PEFT directory that any engine loads.

Owns atomicity and durability; knows nothing of training. Safetensors only: nothing read here can run code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from unstable_lite.errors import AdapterError, ModelError
from unstable_lite.outside_files import CONFIG, WEIGHTS, check_adapter, digest_of, read_header


def digest(tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> str:
    """Return the digest by which an engine confirms that it read this adapter."""
    return digest_of(peft_config, safetensors.torch.save(dict(tensors)))


def publish(directory: Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Write a whole new directory, or nothing: a reader sees all of it or none of it.

    Raises AdapterError if it cannot be written or already exists: versions are never reused.
    """
    if directory.exists():
        raise AdapterError(f"{directory} exists: an adapter version is written once")
    unfinished = directory.parent / f".{directory.name}.unfinished"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished, tensors, peft_config)
        unfinished.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        needed_bytes = sum(tensor.nbytes for tensor in tensors.values())
        raise AdapterError(explain(error, directory, needed_bytes)) from error


def write(directory: Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """The two files of a PEFT directory, into one that exists."""
    write_file(directory / WEIGHTS, safetensors.torch.save(dict(tensors), {"format": "pt"}))
    write_file(directory / CONFIG, json.dumps(peft_config, indent=2, sort_keys=True).encode())


def write_file(path: Path, content: bytes) -> None:
    """Durable once this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of a PEFT directory. Raises ModelError if it is none of plain, finite LoRA."""
    try:
        config, _ = check_adapter(directory)
    except AdapterError as error:
        raise ModelError(str(error)) from error
    return read_tensors(directory / WEIGHTS), config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises ModelError for a file that is not whole, or holds a number that is not finite."""
    try:
        read_header(path)
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (OSError, AdapterError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ModelError(f"{path}: {name} has numbers that are not finite")
    return tensors


def explain(error: OSError, path: Path, needed_bytes: int) -> str:
    """What, where, what to do."""
    if not path.parent.exists():
        return (
            f"cannot write {path}: {path.parent} was removed while the run was using it (systemd-logind does so with "
            "what a user without a session left in /dev/shm, unless RemoveIPC=no); go on with: run --resume"
        )
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "free space unknown"
    return (
        f"cannot write {path}: {error.strerror}; it needs {needed_bytes / 1e6:.1f} MB, {free}. "
        "Free some space, or let the run write elsewhere"
    )


def _sync(directory: Path) -> None:
    """Make names durable, not only contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
