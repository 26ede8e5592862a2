"""Embedded engine: any stock causal language model of transformers, on the CPU, MPS or CUDA.

Continuous batching: a step is one forward pass over the new tokens of every running request, laid flat and grouped by
adapter version, so that the stock model sees one row without padding. Owns admission, the pass, and the end of a
completion. The randomness of a request is a function of its seed and of the number of tokens that it has drawn. Knows
no sockets.
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
import numpy.typing as npt
import torch
import transformers
from torch import Tensor

from unstable_lite.engines.base import BASE, GREEDY_BELOW, EngineShell
from unstable_lite.engines.embedded import stock_model
from unstable_lite.engines.embedded.attention import CachedAttention
from unstable_lite.engines.embedded.kv_cache import CacheShape, KVCache
from unstable_lite.engines.lora import LoraModel, neighbours
from unstable_lite.errors import ModelError, RequestError, is_out_of_memory
from unstable_lite.models import resolve_model
from unstable_lite.models.layers import longest_sequence
from unstable_lite.models.tokenization import StopWatch, Tokenizer
from unstable_lite.transport.messages import EngineStats, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import FinishReason, TokenIds

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


class TransformersEngine(EngineShell):
    kind = "transformers"

    def __init__(self, spec: WorkerSpec) -> None:
        config = spec.config
        self._device = torch.device(spec.device)
        torch.set_num_threads(spec.threads)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every length; no effect on the CPU
        path = resolve_model(config.model_name)
        self._tokenizer = Tokenizer(path, config.trust_remote_code)
        model = stock_model.load(
            path, config.engine.dtype, self._device, config.engine.max_model_len, config.trust_remote_code
        )
        super().__init__(spec, longest_sequence(config.engine.max_model_len, model.config))
        shape, window_L = stock_model.measure_layers(model, self._max_model_len)
        num_slots = self._num_slots(shape, config.engine.kv_cache_gb, config.engine.gpu_share)
        num_running = min(num_slots, config.engine.max_parallel_seq)
        num_kept = min(num_slots - num_running, KEPT_PER_RUNNING * num_running)
        self._cache = KVCache(shape, self._max_model_len, num_running, num_kept)
        self._attention = CachedAttention(self._cache, window_L)
        self._checksums: dict[int, int] = {}
        """Checksum of the weights of each version when it had been loaded."""
        self._queue: deque[Row] = deque()
        self._running: list[Row] = []
        self._rng = np.random.default_rng(None if spec.is_restart else [config.run.seed, *spec.name.encode()])
        self._prompt_tokens_per_step = PROMPT_TOKENS_PER_STEP[self._device.type]
        self._max_running = num_running
        """Limit of running rows; lower than the number of slots once memory has run out."""
        self._is_exact = config.run.schedule == "sync"
        """Whether no earlier result may be used, because it was rounded differently in another batch."""
        self._model = LoraModel(model)
        stock_model.check_same(model, self._attention.name, self._logits, num_running)
        self._cache.forget(BASE)
        num_rows = model.get_input_embeddings().weight.shape[0]
        more = {"parallel_seq": num_running, "kept_seq": num_kept}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.info = self._describe(spec, str(shape.dtype).removeprefix("torch."), num_rows, **more, **versions)

    def _begin(self, request: Generate, prompt_ids: TokenIds, max_tokens: int) -> None:
        num_rows = self.info["vocab_size"]
        if (beyond := prompt_ids[(prompt_ids < 0) | (prompt_ids >= num_rows)]).size:
            raise RequestError(f"prompt has token id {beyond[0]}; the model's embedding has {num_rows} rows, from 0 on")
        if self._is_exact and not self.has_unfinished():
            self._cache.clear()
        self._queue.append(
            Row(
                request=request,
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                seed=int(self._rng.integers(1 << 63)) if request.seed is None else request.seed % (1 << 64),
                ids=prompt_ids.tolist(),
                stop_watch=self._tokenizer.watch(request.stop),
                stop_ids=self._tokenizer.stop_ids_with(request.stop),
            )
        )

    def has_unfinished(self) -> bool:
        return bool(self._queue or self._running)

    def cancel(self, request_id: int) -> None:
        """Drop a request, unless it is finished."""
        for row in (*self._queue, *self._running):
            if row.request.request_id == request_id:
                self._in_use[row.request.adapter_version] -= 1
                if row in self._queue:
                    self._queue.remove(row)
                else:
                    self._running.remove(row)
                    self._cache.give_back(row.slot, len(row.prompt_ids))
                return

    @torch.inference_mode()
    def step(self) -> list[Generated]:
        self._admit()
        try:
            self._advance()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        else:
            return self._take_finished()
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
        self._oom_retries += 1
        log.warning(
            "out of memory (%s): from now on %d requests at once, %d prompt tokens per step",
            reason,
            self._max_running,
            self._prompt_tokens_per_step,
        )

    def _load(self, version: int, path: Path) -> str:
        digest = self._model.load(version, path, self._max_rank)
        self._checksums[version] = self._model.checksum(version)
        return digest

    def _holds(self, version: int) -> bool:
        return self._model.checksum(version) == self._checksums[version]

    def _unload(self, version: int) -> None:
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
        return self._report(queued=len(self._queue), running=len(self._running))

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
            self._count(prompt=size, cached=shared)
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
        self._count(generated=len(rows))

    def _take_finished(self) -> list[Generated]:
        replies = []
        for row in self._running:
            if row.finish_reason:
                size = len(row.prompt_ids)
                self._cache.give_back(row.slot, size)
                ids = row.ids[size:]
                text = self._tokenizer.text(ids, row.stop_watch)
                replies.append(self._finish(row.request, row.prompt_ids, ids, row.logprobs, text, row.finish_reason))
        if replies:
            self._running = [row for row in self._running if not row.finish_reason]
        return replies

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


def sample(
    logits_BV: Tensor, temperature_B: npt.NDArray[Any], top_p_B: npt.NDArray[Any], uniform_B: npt.NDArray[Any]
) -> tuple[list[int], list[float]]:
    """Return token ids and their log-probabilities after temperature and top_p. Overwrites `logits_BV`."""
    device = logits_BV.device
    is_greedy_B = temperature_B < GREEDY_BELOW
    temperature = torch.from_numpy(np.where(is_greedy_B, 1.0, temperature_B).astype(np.float32)).to(device)
    scaled_BV = logits_BV.float().div_(temperature[:, None])
    top_p_B = np.where(is_greedy_B, 1.0, top_p_B).astype(np.float32)
    if (top_p_B < 1).any():
        scaled_BV = _keep_top_p(scaled_BV, torch.from_numpy(top_p_B).to(device))
    prob_BV = scaled_BV.softmax(-1)
    id_B1 = draw(prob_BV, prob_BV.cumsum(-1), torch.from_numpy(uniform_B).to(device)[:, None])
    if is_greedy_B.any():
        greedy_B1 = torch.from_numpy(is_greedy_B).to(device)[:, None]
        id_B1 = torch.where(greedy_B1, scaled_BV.argmax(-1, keepdim=True), id_B1)
    return id_B1[:, 0].tolist(), prob_BV.gather(-1, id_B1)[:, 0].log().tolist()


def draw(prob_BV: Tensor, cumulative_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u × total, and never one of weight 0."""
    target_B1 = uniform_B1 * cumulative_BV[:, -1:]
    id_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=prob_BV.shape[-1] - 1)
    if (prob_BV.gather(-1, id_B1) > 0).all():
        return id_B1
    # A GPU adds in parallel, so a sum may differ from the previous one although 0 was added.
    at_V = torch.arange(prob_BV.shape[-1], device=prob_BV.device)
    return torch.where((prob_BV > 0) & (at_V <= id_B1), at_V, 0).amax(-1, keepdim=True)


def _keep_top_p(scaled_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Set all but the smallest set of most probable tokens whose probabilities reach `top_p` to -inf."""
    ascending_BV, order_BV = scaled_BV.sort(-1)
    is_cut_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p_B[:, None]
    is_cut_BV[:, -1] = False
    return scaled_BV.masked_fill(torch.zeros_like(is_cut_BV).scatter_(-1, order_BV, is_cut_BV), -torch.inf)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed_B: npt.NDArray[np.uint64], count_B: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return one number in [0, 1) for the `count`-th draw of each stream, exact in float32."""
    bits = _mix(_mix(seed_B) + count_B * _GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash with SplitMix64, so that neighbouring numbers give unrelated bits."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
