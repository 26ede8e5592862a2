"""Engine on vLLM, unpatched: `LLMEngine.add_request` and `step`, adapters by `LoRARequest`.

Owns vLLM's settings and the translation of requests. Tokenises with the code that all engines share: token ids go in
and come out.
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
from unstable_lite.engines.adapter_slots import BASE, AdapterVersions
from unstable_lite.engines.devices import gpu_memory_bytes
from unstable_lite.engines.lora import bare_model, check_fits, read_adapter
from unstable_lite.engines.request_checks import Throughput, check_length
from unstable_lite.engines.sampling import GREEDY_BELOW
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.games.templates import chats_in_use
from unstable_lite.models import resolve_model
from unstable_lite.models.positions import longest_sequence
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.transport.messages import EngineStats, Generate, Generated, Progress
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation, TokenIds

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


class VLLMEngine:
    def __init__(self, spec: WorkerSpec) -> None:
        config = spec.config
        _prepare_environment(config.engine, spec)
        # vLLM reads the environment when it is imported.
        import vllm
        from vllm.lora.request import LoRARequest

        self._sampling_params, self._lora_request = vllm.SamplingParams, LoRARequest
        kinds = vllm.sampling_params.RequestOutputKind
        self._output_kinds = {False: kinds.FINAL_ONLY, True: kinds.CUMULATIVE}
        """Kind of outputs by whether the request is streamed."""
        self._num_sent: dict[str, int] = {}
        """Number of characters that were sent of each streamed request."""
        path = resolve_model(config.model_name)
        self._tokenizer = Tokenizer(path, config.trust_remote_code)
        self._bare_model = bare_model(path, config.trust_remote_code)
        self._max_model_len = longest_sequence(config.engine.max_model_len, self._bare_model.config)
        self._max_rank = config.lora.lora_rank
        self._max_parallel_seq = config.engine.max_parallel_seq
        arguments = engine_arguments(spec, path, self._max_model_len)
        try:
            self._engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
        except _REFUSALS as error:
            subject = f"vLLM {vllm.__version__} cannot serve {config.model_name} with LoRA on {spec.device}"
            raise ModelError(f"{subject}: {error}\n{_REMEDIES}") from error
        self._adapters = AdapterVersions(config.engine.max_loras)
        self._paths: dict[int, str] = {}
        self._requests: dict[str, tuple[Generate, TokenIds]] = {}
        self._early: list[Generated | Progress] = []
        """Replies and progress from the time when an adapter was read."""
        self._reader = ThreadPoolExecutor(1, "adapter-reader")
        self._throughput = Throughput()
        model_config = self._engine.model_config
        self.info: dict[str, Any] = {
            "kind": "vllm",
            "model": config.model_name,
            "device": spec.device,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "threads": spec.threads,
            "max_model_len": self._max_model_len,
            "vocab_size": model_config.get_vocab_size(),
            "prompts": self._tokenizer.prompts(chats_in_use(config)),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def add_request(self, request: Generate) -> None:
        version = request.adapter_version
        self._adapters.check_loaded(version)
        prompt_ids = self._tokenizer.prompt_ids(request)
        max_tokens = check_length(len(prompt_ids), request.max_tokens, self._max_model_len)
        stop = self._tokenizer.stop_strings(request.stop)
        params = self._sampling_params(
            max_tokens=max_tokens,
            # vLLM raises temperatures between 0 and 0.01 to 0.01, and then samples.
            temperature=0.0 if request.temperature < GREEDY_BELOW else request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop=stop,
            stop_token_ids=sorted(self._tokenizer.stop_ids_with(request.stop)),
            logprobs=0,
            # Otherwise vLLM makes a dict and an object for each token.
            flat_logprobs=True,
            detokenize=bool(stop) or request.is_streamed,
            output_kind=self._output_kinds[request.is_streamed],
        )
        name = str(request.request_id)
        try:
            self._engine.add_request(
                name, {"prompt_token_ids": prompt_ids.tolist()}, params, lora_request=self._adapter(version)
            )
        except ValueError as error:
            raise RequestError(f"vLLM refused the request: {error}") from error
        self._adapters.acquire(version)
        self._requests[name] = (request, prompt_ids)

    def cancel(self, request_id: int) -> None:
        """Drop a request, unless it is finished."""
        if (found := self._requests.pop(str(request_id), None)) is not None:
            self._engine.abort_request([str(request_id)])
            self._adapters.release(found[0].adapter_version)
            self._num_sent.pop(str(request_id), None)

    def step(self) -> list[Generated | Progress]:
        early, self._early = self._early, []
        return early + self._advance()

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._early)

    def load_adapter(self, version: int, path: Path) -> str:
        self._adapters.check_new(version)
        reading = self._reader.submit(self._read, path)
        while self._requests and not reading.done():  # requests in flight continue
            self._early += self._advance()
        digest = reading.result()
        self._paths[version] = str(path)
        try:
            is_loaded = self._engine.add_lora(self._adapter(version))
        except (ValueError, RuntimeError, OSError, KeyError, AssertionError) as error:
            raise AdapterError(f"adapter version {version}: vLLM cannot load {path}: {error}") from error
        if not is_loaded or version not in self._engine.list_loras():
            raise AdapterError(f"adapter version {version}: vLLM did not load {path} and gave no reason")
        return self._adapters.add(version, digest)

    def confirm_adapter(self, version: int) -> str:
        digest = self._adapters.digest(version)
        return digest if version in self._engine.list_loras() else f"{digest}, which vLLM no longer lists"

    def unload_adapter(self, version: int) -> None:
        self._adapters.remove(version)
        self._engine.remove_lora(version)
        del self._paths[version]

    def sleep(self) -> None:
        """Move weights and adapters to host memory and drop keys and values (level 1)."""
        # Some versions do not themselves drop prefixes whose keys are gone.
        if not self._engine.reset_prefix_cache():
            raise ModelError("vLLM did not drop its prefix cache, because it holds blocks of an unfinished request")
        self._engine.sleep(1)

    def wake_up(self) -> None:
        self._engine.wake_up()

    def stats(self) -> EngineStats:
        unfinished = len(self._requests)
        running = min(unfinished, self._max_parallel_seq)
        return self._throughput.report(queued=unfinished - running, running=running)

    def _advance(self) -> list[Generated | Progress]:
        outputs = self._engine.step() if self._requests else []
        return [self._finish(output) if output.finished else self._progress(output) for output in outputs]

    def _progress(self, output: RequestOutput) -> Progress:
        text, start = output.outputs[0].text, self._num_sent.get(output.request_id, 0)
        self._num_sent[output.request_id] = len(text)
        return Progress(request_id=int(output.request_id), text=text[start:])

    def _read(self, path: Path) -> str:
        """Return the digest of an adapter. Raises AdapterError if it is damaged or for another base.

        vLLM also accepts adapters that it computes wrongly, with unknown modules or for another base.
        """
        pairs, _, digest = read_adapter(path, self._max_rank)
        check_fits(self._bare_model, pairs, path)
        return digest

    def _adapter(self, version: int) -> Any:
        """Return name, id and path, none of which another version ever uses: they are the prefix cache's key."""
        if version == BASE:
            return None
        return self._lora_request(lora_name=f"v{version}", lora_int_id=version, lora_path=self._paths[version])

    def _finish(self, output: RequestOutput) -> Generated:
        request, prompt_ids = self._requests.pop(output.request_id)
        self._num_sent.pop(output.request_id, None)
        self._adapters.release(request.adapter_version)
        completion = output.outputs[0]
        completion_ids = list(completion.token_ids)
        is_stop_string = isinstance(completion.stop_reason, str)
        self._throughput.count(len(completion_ids), len(prompt_ids), output.num_cached_tokens or 0)
        generation = Generation(
            prompt_ids=prompt_ids,
            completion_ids=np.array(completion_ids, np.int32),
            # One entry per position, because `logprobs=0` requests the sampled token's only.
            logprobs=np.array(completion.logprobs.logprobs, np.float32),
            text=completion.text if is_stop_string else self._tokenizer.text(completion_ids),
            finish_reason=completion.finish_reason,
            adapter_version=output.lora_request.lora_int_id if output.lora_request else BASE,
        )
        return Generated(request_id=request.request_id, generation=generation)


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
    is_eager = is_cpu if engine.enforce_eager is None else engine.enforce_eager
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
