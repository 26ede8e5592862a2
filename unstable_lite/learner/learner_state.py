"""State with which a learner continues exactly, as one file beside its adapter.

Owns the file's layout: optimiser moments, random states, counters. It is safetensors, so reading it can run no code.
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

from unstable_lite.adapters.peft_files import read_header, write_file
from unstable_lite.errors import AdapterError, ModelError

_STATE = "learner.safetensors"


def write_state(
    directory: Path, moments: Mapping[str, Tensor], counters: Mapping[str, Any], device: torch.device
) -> None:
    """Write the file into an existing directory, with the current random states."""
    tensors = {"rng.cpu": torch.get_rng_state(), **moments}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    content = safetensors.torch.save(tensors, {"counters": json.dumps(dict(counters))})
    write_file(directory / _STATE, content)


def read_state(directory: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return moments and counters, and restore the random states. Raises ModelError if the file is not such a state."""
    try:
        read_header(directory / _STATE)
        with safetensors.safe_open(directory / _STATE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            counters: dict[str, Any] = json.loads(file.metadata()["counters"])
        torch.set_rng_state(tensors.pop("rng.cpu"))
    except (OSError, AdapterError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"{directory / _STATE} is not a learner's state: {error}") from error
    cuda_state = tensors.pop("rng.cuda", None)
    if cuda_state is not None and device.type == "cuda":
        torch.cuda.set_rng_state(cuda_state, device)
    return tensors, counters
