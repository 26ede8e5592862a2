"""Handmade adapters: small intact files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

from unstable_lite.planning.memory import shape_of

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
    pair = {"A": rng.normal(size=(rank, 6)), "B": rng.normal(size=(8, rank)) * (not is_zero)}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    return {name.format(part): matrix.astype(np.float32) for part, matrix in pair.items()}


def write_run(directory: Path, config: Path, checkpoints: int) -> Path:
    for number in range(1, checkpoints + 1):
        write_adapter(directory / "checkpoints" / f"ckpt-{number}", small(number))
    (directory / "config.toml").write_text(config.read_text())
    return directory


def fitting(model: str, seed: int = 0, rank: int = 4, modules: Iterable[str] = ("q_proj", "down_proj")) -> Arrays:
    """Return matrices for these layers of a model whose shape is known, large enough to change its answers."""
    shape, rng, arrays = shape_of(model), np.random.default_rng(seed), dict[str, np.ndarray]()
    for layer in range(shape.layers):
        for module in modules:
            inputs, outputs = shape.linear_layers[module]
            part = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}.lora_{{}}.weight"
            arrays[name.format("A")] = rng.normal(size=(rank, inputs), scale=0.2).astype(np.float32)
            arrays[name.format("B")] = rng.normal(size=(outputs, rank), scale=0.1).astype(np.float32)
    return arrays
