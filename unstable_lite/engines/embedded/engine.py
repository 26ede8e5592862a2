"""Embedded engine: any stock causal language model of transformers, on the CPU, MPS or CUDA.

Continuous batching: a step is one forward pass over the new tokens of every running request, laid flat and grouped by
adapter version, so that the stock model sees one row without padding. Owns admission, the pass, and the end of a
completion. Knows no sockets.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from unstable_lite.engines.adapter_slots import BASE, AdapterVersions
from unstable_lite.engines.embedded import stock_model
from unstable_lite.engines.embedded.attention import CachedAttention
from unstable_lite.engines.embedded.kv_cache import CacheShape, KVCache
from unstable_lite.engines.lora import LoraModel, neighbours
from unstable_lite.engines.request_checks import Throughput, check_length
from unstable_lite.engines.sampling import sample, uniforms
from unstable_lite.errors import ModelError, is_out_of_memory
from unstable_lite.games.templates import chats_in_use
from unstable_lite.models import resolve_model
from unstable_lite.models.positions import longest_sequence
from unstable_lite.models.tokenization import StopWatch, Tokenizer
from unstable_lite.transport.messages import EngineStats, Generate, Generated, Progress
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import FinishReason, Generation, TokenIds

log = logging.getLogger(__name__)

PROMPT_TOKENS_PER_STEP = {"cpu": 512, "mps": 2048, "cuda": 8192}
WORTH_WAITING = 16
"""Fewest tokens that a request must save to wait for another one's prefix to be computed."""
KEPT_PER_RUNNING = 8
"""Most finished sequences kept for their prefixes, per running sequence."""
FEWEST_PROMPT_TOKENS = 16
"""Prompt tokens per step if memory allows no more."""
ACTIVATION_BYTES = 1 << 30
"""Memory of a pass on a GPU."""


@dataclass(slots=True, eq=False)
class Row:
    """Request in progress."""

    request: Generate
    prompt_ids: TokenIds
    max_tokens: int
    seed: int
    ids: list[int]
    """Prompt and completion."""
    stop_watch: StopWatch | None
    stop_ids: frozenset[int]
    slot: int = -1
    num_computed: int = 0
    """Number of `ids` that have keys and values."""
    num_fed: int = 0
    """Number of `ids` that have them after the current pass."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token of the completion."""
    finish_reason: FinishReason | None = None


class TransformersEngine:
    def __init__(self, spec: WorkerSpec) -> None:
        config = spec.config
        self._device = torch.device(spec.device)
        torch.set_num_threads(spec.threads)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every length; no effect on the CPU
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        path = resolve_model(config.model_name)
        self._tokenizer = Tokenizer(path, config.trust_remote_code)
        model = stock_model.load(
            path, config.engine.dtype, self._device, config.engine.max_model_len, config.trust_remote_code
        )
        self._max_model_len = longest_sequence(config.engine.max_model_len, model.config)
        self._max_rank = config.lora.lora_rank
        shape, window_L = stock_model.measure_layers(model, self._max_model_len)
        num_slots = self._num_slots(shape, config.engine.kv_cache_gb, config.engine.gpu_share)
        num_running = min(num_slots, config.engine.max_parallel_seq)
        num_kept = min(num_slots - num_running, KEPT_PER_RUNNING * num_running)
        self._cache = KVCache(shape, self._max_model_len, num_running, num_kept)
        self._attention = CachedAttention(self._cache, window_L)
        self._adapters = AdapterVersions(config.engine.max_loras)
        self._checksums: dict[int, int] = {}
        """Checksum of the weights of each version when it had been loaded."""
        self._queue: deque[Row] = deque()
        self._running: list[Row] = []
        self._rng = np.random.default_rng(None if spec.is_restart else [config.run.seed, *spec.name.encode()])
        self._prompt_tokens_per_step = PROMPT_TOKENS_PER_STEP[self._device.type]
        self._max_running = num_running
        """Limit of running rows; lower than the number of slots once memory has run out."""
        self._throughput = Throughput()
        self._is_exact = config.run.schedule == "sync"
        """Whether no earlier result may be used, because it was rounded differently in another batch."""
        self._model = LoraModel(model)
        stock_model.check_same(model, self._attention.name, self._logits, num_running)
        self._cache.forget(BASE)
        self.info: dict[str, Any] = {
            "kind": "transformers",
            "model": config.model_name,
            "device": spec.device,
            "dtype": str(shape.dtype).removeprefix("torch."),
            "threads": spec.threads,
            "max_model_len": self._max_model_len,
            "vocab_size": model.get_input_embeddings().weight.shape[0],
            "prompts": self._tokenizer.prompts(chats_in_use(config)),
            "parallel_seq": num_running,
            "kept_seq": num_kept,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def add_request(self, request: Generate) -> None:
        version = request.adapter_version
        self._adapters.check_loaded(version)
        prompt_ids = self._tokenizer.prompt_ids(request)
        max_tokens = check_length(len(prompt_ids), request.max_tokens, self._max_model_len)
        self._adapters.acquire(version)
        if self._is_exact and not self.has_unfinished():
            self._cache.clear()
        self._queue.append(
            Row(
                request=request,
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                seed=int(self._rng.integers(1 << 63)) if request.seed is None else request.seed % (1 << 64),
                ids=prompt_ids.tolist(),
                stop_watch=self._tokenizer.watch(request.stop, request.is_streamed),
                stop_ids=self._tokenizer.stop_ids_with(request.stop),
            )
        )

    def has_unfinished(self) -> bool:
        return bool(self._queue or self._running)

    def cancel(self, request_id: int) -> None:
        """Drop a request, unless it is finished."""
        for row in (*self._queue, *self._running):
            if row.request.request_id == request_id:
                self._adapters.release(row.request.adapter_version)
                if row in self._queue:
                    self._queue.remove(row)
                else:
                    self._running.remove(row)
                    self._cache.give_back(row.slot, len(row.prompt_ids))
                return

    @torch.inference_mode()
    def step(self) -> list[Generated | Progress]:
        self._admit()
        try:
            self._advance()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        else:
            return [*self._progress(), *self._take_finished()]
        self._make_do_with_less(reason)
        return []

    def _advance(self) -> None:
        """Run one pass, and sample a token for each row that it completes. A failure changes no row."""
        rows = self._feed()
        is_whole = [row.num_fed == len(row.ids) for row in rows]
        logits_BV = self._logits(
            [row.slot for row in rows],
            [row.ids[row.num_computed : row.num_fed] for row in rows],
            [row.request.adapter_version for row in rows],
            is_whole,
        )
        whole = list(itertools.compress(rows, is_whole))
        sampled = self._sample(whole, logits_BV) if whole else ([], [])
        for row in rows:
            row.num_computed = row.num_fed
        self._append(whole, *sampled)

    def _make_do_with_less(self, reason: str) -> None:
        """Run half as many rows and prompt tokens per step from now on, because memory ran out.

        The younger half returns to the queue, keeps its sampled tokens, and restarts where its cached prefix ends.
        Raises ModelError if one row alone does not fit.
        """
        gc.collect()  # a traceback may hold the tensors of the failed pass
        torch.cuda.empty_cache()
        rows = sorted(self._running, key=lambda row: row.request.request_id)
        if len(rows) == 1 and self._prompt_tokens_per_step == FEWEST_PROMPT_TOKENS:
            raise ModelError(
                f"{self._device} is out of memory for one request: lower engine.max_model_len, engine.kv_cache_gb or "
                f"engine.gpu_memory_utilization, or leave it more memory ({reason})"
            )
        self._max_running = max(1, len(rows) // 2)
        self._prompt_tokens_per_step = max(FEWEST_PROMPT_TOKENS, self._prompt_tokens_per_step // 2)
        for row in rows:
            self._cache.length_S[row.slot] = row.num_computed
        for row in reversed(rows[self._max_running :]):
            self._cache.give_back(row.slot, len(row.prompt_ids))
            row.num_computed = 0
            self._queue.appendleft(row)
        self._running = sorted(rows[: self._max_running], key=lambda row: row.request.adapter_version)
        self._throughput.oom_retries += 1
        log.warning(
            "out of memory (%s): from now on %d requests at once, %d prompt tokens per step",
            reason,
            self._max_running,
            self._prompt_tokens_per_step,
        )

    def load_adapter(self, version: int, path: Path) -> str:
        self._adapters.check_new(version)
        digest = self._model.load(version, path, self._max_rank)
        self._checksums[version] = self._model.checksum(version)
        return self._adapters.add(version, digest)

    def confirm_adapter(self, version: int) -> str:
        digest = self._adapters.digest(version)
        return digest if self._model.checksum(version) == self._checksums[version] else f"{digest}, changed since"

    def unload_adapter(self, version: int) -> None:
        self._adapters.remove(version)
        self._model.unload(version)
        del self._checksums[version]
        self._cache.forget(version)

    def sleep(self) -> None:
        self._cache.release()
        if self._device.type != "cpu":
            self._model.move(torch.device("cpu"))
            gc.collect()
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        self._model.move(self._device)
        self._cache.allocate()

    def stats(self) -> EngineStats:
        return self._throughput.report(queued=len(self._queue), running=len(self._running))

    def _admit(self) -> None:
        """Give slots to queued requests while there are slots and this step has room for their prompts."""
        if not self._queue:
            return
        room = self._prompt_tokens_per_step - sum(len(row.ids) - row.num_computed for row in self._running)
        waiting: list[Row] = []
        most = min(self._cache.num_free, self._max_running - len(self._running))
        while self._queue and room > 0 and len(waiting) < most:
            row = self._queue.popleft()
            version, size = row.request.adapter_version, len(row.ids)
            ids = np.array(row.ids, np.int32)  # including sampled tokens, if memory ran out before
            prefix = self._cache.find(ids, version)
            shared = min(prefix.length, size - 1)  # the last token's logits are needed
            if min(prefix.promised, size - 1) >= shared + WORTH_WAITING:
                waiting.append(row)
                continue
            row.slot = self._cache.take(ids, version, prefix.slot, shared)
            row.num_computed = shared
            most -= 1
            room -= size - shared
            self._running.append(row)
            self._throughput.count(prompt=size, cached=shared)
        self._queue.extendleft(reversed(waiting))
        self._running.sort(key=lambda row: row.request.adapter_version)

    def _feed(self) -> list[Row]:
        """Feed every decoding row's last token, and the prompt tokens of this step; return the rows that get any."""
        fed = []
        room = self._prompt_tokens_per_step
        for row in self._running:
            count = len(row.ids) - row.num_computed
            if count > 1:
                count = min(count, room)
                room -= count
            if count:
                row.num_fed = row.num_computed + count
                fed.append(row)
        return fed

    def _logits(
        self, slots: Sequence[int], new_ids: Sequence[list[int]], versions: Sequence[int], wanted: Sequence[bool]
    ) -> Tensor:
        """Run new tokens of some slots through the model; return the logits after the last one of the wanted slots.

        Rows of one version must be adjacent.
        """
        slot_R, count_R = np.array(slots), np.array([len(ids) for ids in new_ids])
        stop_R = count_R.cumsum()
        id_N = np.array([token for ids in new_ids for token in ids], np.int64)
        position_N = np.arange(len(id_N)) + np.repeat(self._cache.length_S[slot_R] - (stop_R - count_R), count_R)
        is_wanted_R = np.array(wanted)
        self._attention.plan(slot_R, count_R, position_N)
        id_, position, last = (
            torch.from_numpy(array).to(self._device) for array in (id_N, position_N, stop_R[is_wanted_R] - 1)
        )
        logits_BV = self._model(id_, position, neighbours(versions, stop_R), last)
        self._cache.extend(slot_R, count_R, position_N, id_N)
        return logits_BV

    def _sample(self, rows: Sequence[Row], logits_BV: Tensor) -> tuple[list[int], list[float]]:
        requests = [row.request for row in rows]
        return sample(
            logits_BV,
            np.array([request.temperature for request in requests]),
            np.array([request.top_p for request in requests]),
            uniforms(
                np.array([row.seed for row in rows], np.uint64),
                np.array([len(row.logprobs) for row in rows], np.uint64),
            ),
        )

    def _append(self, rows: Sequence[Row], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        for row, token_id, logprob in zip(rows, ids, logprobs, strict=True):
            row.ids.append(token_id)
            row.logprobs.append(logprob)
            is_stop = token_id in row.stop_ids
            if is_stop or (row.stop_watch is not None and row.stop_watch.is_stopped_by(token_id)):
                row.finish_reason = "stop"
            elif len(row.logprobs) == row.max_tokens:
                row.finish_reason = "length"
        self._throughput.count(generated=len(rows))

    def _progress(self) -> list[Progress]:
        streamed = [row for row in self._running if row.request.is_streamed and not row.finish_reason]
        new = [(row.request.request_id, row.stop_watch.new_text()) for row in streamed if row.stop_watch is not None]
        return [Progress(request_id=request_id, text=text) for request_id, text in new if text]

    def _take_finished(self) -> list[Generated]:
        finished = [row for row in self._running if row.finish_reason]
        if finished:
            self._running = [row for row in self._running if not row.finish_reason]
        return [self._finish(row) for row in finished]

    def _finish(self, row: Row) -> Generated:
        version, size = row.request.adapter_version, len(row.prompt_ids)
        self._cache.give_back(row.slot, size)
        self._adapters.release(version)
        completion_ids = row.ids[size:]
        generation = Generation(
            prompt_ids=row.prompt_ids,
            completion_ids=np.array(completion_ids, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            text=self._tokenizer.text(completion_ids, row.stop_watch),
            finish_reason=row.finish_reason or "length",
            adapter_version=version,
        )
        return Generated(request_id=row.request.request_id, generation=generation)

    def _num_slots(self, shape: CacheShape, kv_cache_gb: float, gpu_memory_utilization: float) -> int:
        """Return the number of sequences of full length that fit the memory."""
        knob, num_bytes = f"engine.kv_cache_gb = {kv_cache_gb:g}", kv_cache_gb * 2**30
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            knob = f"engine.gpu_memory_utilization = {gpu_memory_utilization:g}"
            mine = gpu_memory_utilization * total - torch.cuda.memory_reserved(self._device)
            num_bytes = min(free, mine) - ACTIVATION_BYTES
        num_slots = int(num_bytes / (shape.bytes_per_token * self._max_model_len))
        if num_slots < 1:
            needed = shape.bytes_per_token * self._max_model_len / 2**30
            raise ModelError(
                f"{knob} leaves {max(num_bytes, 0) / 2**30:.2f} GiB for keys and values, and one sequence of "
                f"{self._max_model_len} tokens needs {needed:.2f}; lower engine.max_model_len or raise this key"
            )
        return num_slots
