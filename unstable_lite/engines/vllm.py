"""Engine on vLLM, unpatched: `LLMEngine.add_request` and `step`, adapters by `LoRARequest`.

Owns vLLM's settings and the translation of requests: token ids go in and come out.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from unstable_lite.config.training import EngineConfig
from unstable_lite.engines.base import BASE, GREEDY_BELOW, EngineShell
from unstable_lite.engines.devices import gpu_memory_bytes
from unstable_lite.engines.lora import check_fits, read_adapter
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.models import resolve_model
from unstable_lite.models.layers import longest_sequence
from unstable_lite.models.loading import bare_model, compare
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.transport.messages import Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import TokenIds

if TYPE_CHECKING:
    from vllm import RequestOutput

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates memory for; an adapter of another rank takes the next larger one."""

LARGE_GPU_BYTES = 70 << 30
"""Size of a GPU from which on vLLM's `LLM` reads more prompt tokens per step."""

GRAPH_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 1024, 64), *range(1024, 2049, 256)]
"""Numbers of tokens in a step for which CUDA graphs are captured. vLLM stops at twice `max_num_seqs`, so a step that
holds a new prompt would launch every LoRA kernel from Python."""


_REFUSALS = (ValueError, TypeError, RuntimeError, OSError, NotImplementedError, KeyError, ImportError)
"""Not AssertionError: vLLM raises it if others release GPU memory while it starts, so that the next start may work."""
_REMEDIES = (
    "(if the model is the reason, use another one or engine.kind = 'transformers'; if memory is, lower "
    "engine.max_model_len, engine.max_parallel_seq or engine.max_loras; if engine.options are, change them)"
)


class VLLMShell(EngineShell):
    """Part that engines on vLLM share, whether it runs in this process or on a server."""

    def __init__(self, spec: WorkerSpec) -> None:
        config, path = spec.config, resolve_model(spec.config.model_name)
        self._tokenizer = Tokenizer(path, config.trust_remote_code)
        self._bare_model = bare_model(path, config.trust_remote_code)
        if Path(path).is_dir() and not hasattr(self._bare_model.config, "quantization_config"):
            compare(path, config.trust_remote_code)  # a run's learner compares too, but an evaluation has none
        super().__init__(spec, longest_sequence(config.engine.max_model_len, self._bare_model.config))

    def _sampling(self, request: Generate, max_tokens: int) -> dict[str, Any]:
        return {
            "max_tokens": max_tokens,
            # vLLM raises temperatures between 0 and 0.01 to 0.01, and then samples.
            "temperature": 0.0 if request.temperature < GREEDY_BELOW else request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop": self._tokenizer.stop_strings(request.stop),
            "stop_token_ids": sorted(self._tokenizer.stop_ids_with(request.stop)),
            "logprobs": 0,
            "skip_special_tokens": not self._tokenizer.has_special_tags,
        }

    def _check_fits(self, path: Path) -> str:
        """Return the digest of an adapter. Raises AdapterError if it is damaged or for another base.

        vLLM also accepts adapters that it computes wrongly, with unknown modules or for another base.
        """
        pairs, _, digest = read_adapter(path, self._max_rank)
        check_fits(self._bare_model, pairs, path)
        return digest


class VLLMEngine(VLLMShell):
    kind = "vllm"

    def __init__(self, spec: WorkerSpec) -> None:
        _prepare_environment(spec.config.engine, spec)
        # vLLM reads the environment when it is imported.
        import vllm
        from vllm.lora.request import LoRARequest

        super().__init__(spec)
        self._sampling_params, self._lora_request = vllm.SamplingParams, LoRARequest
        self._only_final = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        model_name = spec.config.model_name
        arguments = engine_arguments(spec, resolve_model(model_name), self._max_model_len)
        try:
            self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        except _REFUSALS as error:
            subject = f"vLLM {vllm.__version__} cannot serve {model_name} with LoRA on {spec.device}"
            raise ModelError(f"{subject}: {error}\n{_REMEDIES}") from error
        self._adapters: dict[int, Any] = {BASE: None}
        """Name, id and path of each version, which no other ever uses: they are keys of the prefix cache."""
        self._requests: dict[str, tuple[Generate, TokenIds]] = {}
        self._early: list[Generated] = []
        """Replies from the time when an adapter was read."""
        self._reader = ThreadPoolExecutor(1, "adapter-reader")
        model = self._engine.model_config
        versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        dtype = str(model.dtype).removeprefix("torch.")
        self.info = self._describe(spec, dtype, model.get_vocab_size(), **versions)

    def _begin(self, request: Generate, prompt_ids: TokenIds, max_tokens: int) -> None:
        sampling = self._sampling(request, max_tokens)
        params = self._sampling_params(
            **sampling,
            # Otherwise vLLM makes a dict and an object for each token.
            flat_logprobs=True,
            detokenize=bool(sampling["stop"]),
            output_kind=self._only_final,
        )
        name, adapter = str(request.request_id), self._adapters[request.adapter_version]
        try:
            self._engine.add_request(name, {"prompt_token_ids": prompt_ids.tolist()}, params, lora_request=adapter)
        except ValueError as error:
            raise RequestError(f"vLLM refused the request: {error}") from error
        self._requests[name] = (request, prompt_ids)

    def cancel(self, request_id: int) -> None:
        """Drop a request, unless it is finished."""
        if (found := self._requests.pop(str(request_id), None)) is not None:
            self._engine.abort_request([str(request_id)])
            self._in_use[found[0].adapter_version] -= 1

    def step(self) -> list[Generated]:
        early, self._early = self._early, []
        return early + self._advance()

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._early)

    def _load(self, version: int, path: Path) -> str:
        reading = self._reader.submit(self._check_fits, path)
        while self._requests and not reading.done():  # requests in flight continue
            self._early += self._advance()
        digest = reading.result()
        adapter = self._lora_request(lora_name=f"v{version}", lora_int_id=version, lora_path=str(path))
        try:
            is_loaded = self._engine.add_lora(adapter)
        except (ValueError, RuntimeError, OSError, KeyError, AssertionError) as error:
            raise AdapterError(f"adapter version {version}: vLLM cannot load {path}: {error}") from error
        if not is_loaded or not self._holds(version):
            raise AdapterError(f"adapter version {version}: vLLM did not load {path} and gave no reason")
        self._adapters[version] = adapter
        return digest

    def _holds(self, version: int) -> bool:
        return version in self._engine.list_loras()

    def _unload(self, version: int) -> None:
        self._engine.remove_lora(version)
        del self._adapters[version]

    def sleep(self) -> None:
        """Move weights and adapters to host memory and drop keys and values (level 1)."""
        # Some versions do not themselves drop prefixes whose keys are gone.
        if not self._engine.reset_prefix_cache():
            raise ModelError("vLLM did not drop its prefix cache, because it holds blocks of an unfinished request")
        self._engine.sleep(1)

    def wake_up(self) -> None:
        self._engine.wake_up()

    def _advance(self) -> list[Generated]:
        return [self._take(output) for output in self._engine.step()] if self._requests else []

    def _take(self, output: RequestOutput) -> Generated:
        """Return the reply to a request that is finished."""
        request, prompt_ids = self._requests.pop(output.request_id)
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        self._count(len(ids), len(prompt_ids), output.num_cached_tokens or 0)
        return self._finish(
            request,
            prompt_ids,
            ids,
            completion.logprobs.logprobs,  # one entry per position: `logprobs=0` requests the sampled token's only
            completion.text if isinstance(completion.stop_reason, str) else self._tokenizer.text(ids),
            completion.finish_reason,
            output.lora_request.lora_int_id if output.lora_request else BASE,
        )


def engine_arguments(spec: WorkerSpec, path: str, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of `vllm.EngineArgs` for the model in `path` on the device of `spec`."""
    config = spec.config
    engine, is_cpu = config.engine, spec.device == "cpu"
    of_device: dict[str, Any]
    if is_cpu:
        # vLLM 0.32 crashes here if it reads a seeded request's prompt in parts ("CPU Generator does not use offset").
        of_device = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, max_model_len)}
    else:
        # `from_engine_args` alone uses 2,048, an eighth of the value of `LLM` on a large GPU.
        tokens_per_step = 16_384 if (gpu_memory_bytes(0) or 0) >= LARGE_GPU_BYTES else 8_192
        of_device = {
            "max_num_batched_tokens": max(tokens_per_step, max_model_len),
            "enable_flashinfer_autotune": False,  # it tunes kernels that the usual models do not have, for minutes
        }
    is_eager = engine.options.get("enforce_eager", is_cpu)
    if not is_eager and not is_cpu:
        of_device["cudagraph_capture_sizes"] = GRAPH_SIZES
    return {
        "model": path,
        "trust_remote_code": config.trust_remote_code,
        "load_format": "safetensors",
        "dtype": engine.dtype,
        "seed": _seed(config.run.seed, spec),
        "max_model_len": max_model_len,
        "max_num_seqs": engine.max_parallel_seq,
        "enable_lora": True,
        # On the CPU vLLM 0.32 computes rows without an adapter with slot -1, the last one, so that one must stay empty.
        "max_loras": engine.max_loras + is_cpu,
        # One more than can be loaded, so that vLLM never evicts a version that is in use.
        "max_cpu_loras": engine.max_loras + 1,
        "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= config.lora.lora_rank),
        # Otherwise vLLM computes LoRA on every supported module, the output layer included.
        "lora_target_modules": list(config.lora.target_modules),
        "enforce_eager": is_eager,
        "gpu_memory_utilization": engine.gpu_share,
        "enable_sleep_mode": engine.when_shared == "sleep",
        "enable_prefix_caching": config.run.schedule != "sync",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "tensor_parallel_size": engine.tensor_parallel,
        "quantization": engine.quantization,
        **of_device,
        **engine.options,
    }


def _prepare_environment(config: EngineConfig, spec: WorkerSpec) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # this worker is the engine's process already
    # This sampler never returns processed log-probabilities, and its check may compile kernels for minutes.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if spec.device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(config.kv_cache_gb))
        # vLLM would bind itself to every core, also the learner's, and it forbids to set the threads later.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        torch.set_num_threads(spec.threads)


def _seed(run_seed: int, spec: WorkerSpec) -> int:
    """Return a seed of this worker, because the workers of a run must not draw the same samples."""
    sequence = np.random.SeedSequence(None if spec.is_restart else [run_seed, *spec.name.encode()])
    return int(sequence.generate_state(1)[0] >> 1)
