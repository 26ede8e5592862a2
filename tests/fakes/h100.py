"""Settings to which vLLM's CPU build resolves our arguments on H100s: `python -m fakes.h100 CONFIG_JSON MODEL`.

Prints the resolved settings of our engine and, with the same limits, of vLLM's own `LLM`. No kernel runs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from types import ModuleType
from typing import Any

NUM_GPUS = 2


def pretend() -> None:
    """Let vLLM find H100s. Its module for CUDA loads kernels that a CPU build does not have."""
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):  # type: ignore[misc, valid-type]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return NUM_GPUS

    vllm.platforms.current_platform = H100()


def resolved(arguments: dict[str, Any], context: Any = None) -> dict[str, Any]:
    """Return what vLLM makes of `arguments` of its `EngineArgs`."""
    from vllm import EngineArgs

    # Beyond the model's own config, a quantised base needs kernels.
    quantization = EngineArgs(**arguments).create_model_config().quantization
    config = EngineArgs(**arguments | {"quantization": None}).create_engine_config(context)
    lora, graphs = config.lora_config, config.compilation_config
    return {
        "dtype": str(config.model_config.dtype),
        "quantization": quantization,
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "tokens_per_step": config.scheduler_config.max_num_batched_tokens,
        "rows": config.scheduler_config.max_num_seqs,
        "graph_sizes": graphs.cudagraph_capture_sizes,
        "graph_mode": str(graphs.cudagraph_mode),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "world_size": config.parallel_config.world_size,
        "executor": str(config.parallel_config.distributed_executor_backend),
        "lora": lora and {field.name: str(getattr(lora, field.name)) for field in dataclasses.fields(lora)},
        "autotune": config.kernel_config.enable_flashinfer_autotune,
    }


def main(config_json: str, model: str) -> None:
    pretend()
    from vllm.usage.usage_lib import UsageContext

    from unstable_lite.engines.vllm import engine_arguments
    from unstable_lite.transport.worker_main import WorkerSpec

    spec = WorkerSpec(name="engine-0", endpoint="", device="cuda:0", threads=1, config_json=config_json)
    ours = engine_arguments(spec, model, spec.config.engine.max_model_len)
    plain = {key: ours[key] for key in ("model", "max_model_len", "seed")}
    told = {"ours": resolved(ours), "llm": resolved(plain, UsageContext.LLM_CLASS)}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
