"""Checks of the settings for vLLM and its servers, without a request and without importing vLLM, which takes 10 s."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from unstable_lite.config.training import EngineConfig
from unstable_lite.games.api_keys import SERVER_KEY, url_problem
from unstable_lite.plugins import suggestion

SERVER_KIND = "vllm-server"
EXAMPLE_URL = "http://gpu-node-7:8000"

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
    if (size := engine.tensor_parallel) > 1:
        if "cpu" in devices:
            yield f"engine.tensor_parallel = {size}: engines on the CPU do not divide a model; leave it out"
        elif len(devices) % size:
            yield (
                f"engine.tensor_parallel = {size} needs {size} GPUs for each engine, but engine.devices = "
                f"{list(devices)}"
            )
        elif len(set(devices)) != len(devices):
            yield f"engine.devices = {list(devices)}: with engine.tensor_parallel = {size} list each GPU once"
    for name in engine.options:
        if deciding := DECIDED.get(name):
            yield f"engine.options.{name}: set {deciding} instead"
        elif name in DECIDED:
            yield f"engine.options.{name}: leave it out, unstable_lite needs its own value"
        elif name not in argument_names():
            yield f"engine.options.{name}: vLLM has no such argument; {suggestion(name, argument_names())}"


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


def server_url(url: str) -> str:
    """Return the URL without `/v1`, which some users write."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def server_keys() -> dict[str, str]:
    """Return the keys for an engine worker that talks to a server; other workers get none."""
    return {SERVER_KEY: key} if (key := os.environ.get(SERVER_KEY)) else {}


def server_problems(engine: EngineConfig) -> Iterator[str]:
    """Yield the problems of the keys that are for `engine.kind = "vllm-server"`, if it is set or not."""
    if engine.kind != SERVER_KIND:
        for key in ("urls", "adapter_folder"):
            if getattr(engine, key):
                yield f"engine.{key} is for engine.kind = {SERVER_KIND!r}, but the kind is {engine.kind!r}"
        return
    if not engine.urls:
        yield f"engine.urls is empty: name the servers, as in urls = [{EXAMPLE_URL!r}]"
    if engine.devices != "auto":
        yield f"engine.devices = {list(engine.devices)}: the servers have their own devices; leave it out"
    for index, url in enumerate(engine.urls):
        if (problem := url_problem(url, EXAMPLE_URL, SERVER_KEY)) is not None:
            yield f"engine.urls.{index}: {problem}"
    bare = [server_url(url) for url in engine.urls]
    if twice := {url for url in bare if bare.count(url) > 1}:
        yield f"engine.urls: {', '.join(sorted(twice))} is listed twice; one worker serves one server"
    if (folder := engine.adapter_folder) is None:
        yield f"engine.kind = {SERVER_KIND!r} needs engine.adapter_folder, a folder that all machines share"
    elif not folder.is_absolute():
        yield f"engine.adapter_folder = {str(folder)!r}: the servers need it as an absolute path"
    elif "\0" in str(folder) or not os.access(f"{folder}/.", os.W_OK | os.X_OK):
        yield f"engine.adapter_folder = {str(folder)!r} is not a writable directory; is it mounted?"
