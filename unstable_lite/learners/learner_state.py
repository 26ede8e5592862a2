"""What a learner needs to go on as if nothing had happened, as one file beside its adapter.

Owns the file's layout: optimiser moments, random states, counters. Safetensors only: nothing read here can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from unstable_lite.errors import AdapterError, ModelError
from unstable_lite.learners import adapter_files
from unstable_lite.outside_files import read_header

_STATE = "learner.safetensors"


def write_state(
    directory: Path, moments: Mapping[str, Tensor], counters: Mapping[str, Any], device: torch.device
) -> None:
    """Into a directory that exists; with the random states of now."""
    tensors = {"rng.cpu": torch.get_rng_state(), **moments}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    content = safetensors.torch.save(tensors, {"counters": json.dumps(dict(counters))})
    adapter_files.write_file(directory / _STATE, content)


def read_state(directory: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Moments and counters; the random states are put back on the way. Raises ModelError for what is no such state."""
    try:
        read_header(directory / _STATE)
        with safetensors.safe_open(directory / _STATE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            counters: dict[str, Any] = json.loads(file.metadata()["counters"])
        torch.set_rng_state(tensors.pop("rng.cpu"))
    except (OSError, AdapterError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"{directory / _STATE} is no learner's state: {error}") from error
    cuda_state = tensors.pop("rng.cuda", None)
    if cuda_state is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda_state, device)
    return tensors, counters
