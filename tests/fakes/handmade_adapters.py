"""Handmade adapters: small intact files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

Arrays = Mapping[str, np.ndarray]


def write_adapter(directory: Path, arrays: Arrays, base: str = "builtin:tiny", **config: object) -> Path:
    directory.mkdir(parents=True)
    safetensors.numpy.save_file(dict(arrays), directory / "adapter_model.safetensors")
    stored = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": base} | config
    (directory / "adapter_config.json").write_text(json.dumps(stored))
    return directory


def small(seed: int = 0, is_zero: bool = False, rank: int = 4) -> Arrays:
    """Return the matrices of one pair, of no particular model."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rank, 6)), rng.normal(size=(8, rank))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    return {
        name.format("A"): a.astype(np.float32),
        name.format("B"): (0 * b if is_zero else b).astype(np.float32),
    }


def write_run(directory: Path, config: Path, checkpoints: int) -> Path:
    """Write the files of a run: its config and checkpoints."""
    for number in range(1, checkpoints + 1):
        write_adapter(directory / "checkpoints" / f"ckpt-{number}", small(number))
    (directory / "config.toml").write_text(config.read_text())
    return directory
