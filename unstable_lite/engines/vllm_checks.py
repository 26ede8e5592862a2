"""Checks of the settings for vLLM, without importing it: its import takes ten seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from unstable_lite.config.training import EngineConfig
from unstable_lite.plugins import suggestion

ONLY_VLLM = ("tensor_parallel", "quantization", "options")
"""Keys of section `engine` that other engines do not have."""

DECIDED = {
    "model": "model_name",
    "trust_remote_code": "trust_remote_code",
    "dtype": "engine.dtype",
    "seed": "run.seed",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_parallel_seq",
    "max_loras": "engine.max_loras",
    "max_cpu_loras": "engine.max_loras",
    "max_lora_rank": "lora.lora_rank",
    "lora_target_modules": "lora.target_modules",
    "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "enable_sleep_mode": "engine.when_shared",
    "enable_prefix_caching": "run.schedule",
    "tensor_parallel_size": "engine.tensor_parallel",
    "quantization": "engine.quantization",
    "enable_lora": "",
    "load_format": "",
    "logprobs_mode": "",
    "disable_log_stats": "",
}
"""Arguments of `vllm.EngineArgs` that are not the user's to set, with the key of the config that decides each."""


def vllm_problems(engine: EngineConfig, kind: str, devices: Sequence[int | str]) -> Iterator[str]:
    """Yield the problems of the keys that are for vLLM. `kind`: the engine that was chosen for `devices`."""
    if kind != "vllm":
        for key in ONLY_VLLM:
            if getattr(engine, key) != EngineConfig.model_fields[key].default:
                yield f"engine.{key} is for engine.kind = 'vllm', but the kind is {kind!r}"
        return
    if engine.dtype == "float32" and "cpu" not in devices:
        yield (
            "engine.dtype = 'float32': vLLM's LoRA kernels for GPUs compute with 16 bits only; leave engine.dtype out, "
            "or set engine.kind = 'transformers'"
        )
    yield from _parallel_problems(engine.tensor_parallel, devices)
    for name in engine.options:
        if deciding := DECIDED.get(name):
            yield f"engine.options.{name}: set {deciding} instead"
        elif name in DECIDED:
            yield f"engine.options.{name}: leave it out, unstable_lite needs its own value"
        elif name not in argument_names():
            yield f"engine.options.{name}: vLLM has no such argument; {suggestion(name, argument_names())}"


def _parallel_problems(size: int, devices: Sequence[int | str]) -> Iterator[str]:
    """Yield the problems of engines that have `size` GPUs each."""
    if size == 1:
        return
    if "cpu" in devices:
        yield f"engine.tensor_parallel = {size}: engines on the CPU do not divide a model; leave it out"
    elif len(devices) % size:
        yield (
            f"engine.tensor_parallel = {size} needs {size} GPUs for each engine, but engine.devices = {list(devices)}"
        )
    elif len(set(devices)) != len(devices):
        yield f"engine.devices = {list(devices)}: with engine.tensor_parallel = {size} list each GPU once"


@functools.cache
def argument_names() -> tuple[str, ...]:
    """Return the arguments of `vllm.EngineArgs`, read from its source."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "the engine was chosen without vLLM"
    source = (Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    (arguments,) = (node for node in ast.parse(source).body if getattr(node, "name", None) == "EngineArgs")
    assert isinstance(arguments, ast.ClassDef)
    fields = (node.target for node in arguments.body if isinstance(node, ast.AnnAssign))
    return tuple(target.id for target in fields if isinstance(target, ast.Name))
