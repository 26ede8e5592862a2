"""Learner process: `python -m unstable_lite.transport unstable_lite.learner.worker`.

Owns the loop and the handling of each message. Knows nothing of algorithms, rewards or games. With several
ranks, rank 0 receives the orchestrator's messages, forwards them to the others, replies, and alone writes files.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import transformers

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, NoRoomError, RequestError, UnstableError, is_out_of_memory
from unstable_lite.learner import UPDATED, Learner, UpdateResult, distributed, load_learner, losses
from unstable_lite.learner.answers import AnswerScores
from unstable_lite.learner.batching import check, fit, length
from unstable_lite.learner.frozen_adapters import read_parameters
from unstable_lite.learner.histograms import histograms_of
from unstable_lite.learner.past_adapters import PastAdapters
from unstable_lite.learner.ready_info import ready_info
from unstable_lite.transport.messages import (
    AdapterDigest,
    AnswersScored,
    Done,
    Failed,
    LoadLearner,
    Message,
    Ready,
    SaveLearner,
    Score,
    ScoreAnswers,
    Scored,
    Stop,
    Update,
    Updated,
    WriteAdapter,
)
from unstable_lite.transport.worker_main import WorkerSocket, WorkerSpec
from unstable_lite.types import Histogram, LearnerLogprobs, Logprobs, TrainItem

CHECK_EVERY = 10
"""Number of updates between two checks that all ranks hold the same adapter and critic."""
GROW_EVERY = 20
"""Number of updates between two attempts to double micro-batches that were halved when memory ran out."""
OOM_ADVICE = (
    "lower learner.max_train_len or learner.logits_chunk_tokens, set learner.activation_checkpointing = true, or leave "
    "it more memory"
)

log = logging.getLogger(__name__)

T = TypeVar("T")


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    torch.set_num_threads(spec.threads)
    config = spec.config
    if spec.num_ranks > 1:
        distributed.join_as(spec)
    worker = make_worker(config, spec.device)
    socket.send(Ready(info=ready_info(worker.learner.training.policy, spec)))
    if spec.rank:
        worker.follow()
        return
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                distributed.broadcast(message)
                return
            socket.send(worker.answer(message))


def make_worker(config: Config, device: str) -> _Worker:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if (share := config.learner.gpu_memory_utilization) is not None and device != "cpu":
        torch.cuda.set_per_process_memory_fraction(share, device)
    return _Worker(load_learner(config, device), config)


class _Worker:
    """A learner, and the handling of each message."""

    def __init__(self, learner: Learner, config: Config) -> None:
        self.learner = learner
        self._config = config
        self._oom_retries = 0
        """Number of times that an update restarted because memory had run out."""
        self._state: Path | None = None
        """Newest directory of the learner's state, which is at the version before the next update."""
        self._made: dict[str, float] | None = None
        """Metrics of the newest update."""
        self._policy = learner.training.policy
        self._answers = AnswerScores(self._policy, config)
        self.past_adapters = PastAdapters(self._policy, config.buffer.max_staleness)
        self.past_adapters.hold(learner.training.version)

    def answer(self, message: Message) -> Message:
        assert isinstance(message, (Update, WriteAdapter, Score, ScoreAnswers, SaveLearner, LoadLearner)), message
        started = time.perf_counter()
        try:
            if isinstance(message, Update):
                return self._update(message)
            if isinstance(message, (Score, ScoreAnswers)) and self._policy.is_sharded:
                distributed.broadcast(message)
            if isinstance(message, Score):
                return Scored(request_id=message.request_id, logprobs=tuple(self._score(message)))
            if isinstance(message, ScoreAnswers):
                return AnswersScored(request_id=message.request_id, logprobs=self._score_answers(message))
            if isinstance(message, WriteAdapter):
                distributed.broadcast(message)
                self._begin_at(message.version)
                digest = self._write_adapter(message.path)
                seconds = time.perf_counter() - started
                return AdapterDigest(request_id=message.request_id, seconds=seconds, digest=digest)
            if isinstance(message, SaveLearner):
                self._save(Path(message.path))
                return Done(request_id=message.request_id)
            distributed.broadcast(message)
            self._load(Path(message.path))
            return Done(request_id=message.request_id)
        except RequestError as error:
            is_no_room = isinstance(error, NoRoomError)
            return Failed(request_id=message.request_id, error=str(error), is_no_room=is_no_room)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"{self._policy.device} is out of memory: {OOM_ADVICE} ({error})"
            if self._policy.is_sharded:
                raise UnstableError(reason) from error
        _free_memory()
        return Failed(request_id=message.request_id, error=reason)

    def follow(self) -> None:
        """Carry out the messages that rank 0 forwards, until `Stop`.

        An invalid request fails on every rank, and rank 0 replies.
        """
        while not isinstance(message := distributed.receive(), Stop):
            if isinstance(message, Update):
                with contextlib.suppress(RequestError):
                    if self._policy.is_sharded:
                        self._mismatch(message.items, message.version)
                    self._make(message)
            elif isinstance(message, Score):
                with contextlib.suppress(RequestError):
                    self._score(message)
            elif isinstance(message, ScoreAnswers):
                self._score_answers(message)
            elif isinstance(message, WriteAdapter):
                self._begin_at(message.version)
            else:
                assert isinstance(message, LoadLearner), message
                self._load(None)

    def _begin_at(self, version: int) -> None:
        """Name the adapter that training continues from."""
        self.learner.training.version = version
        self.past_adapters.hold(version)

    def _score(self, message: Score) -> list[LearnerLogprobs]:
        """Score the items. With a sharded base every rank is called. Raises RequestError for an unfit adapter."""
        policy = self._policy
        parameters = None if message.adapter is None else read_parameters(Path(message.adapter), policy)
        return self._within_memory(map(length, message.items), partial(policy.score, message.items, parameters))

    def _score_answers(self, message: ScoreAnswers) -> tuple[Logprobs, ...]:
        sizes = (len(prompt) + max(map(len, texts), default=0) for prompt, texts in message.questions)
        scored = self._within_memory(sizes, partial(self._answers.score, message.questions, message.stop))
        _free_memory()  # engines that sleep on this device wake now
        return tuple(logp.numpy().astype(np.float32) for logp in scored)

    def _within_memory(self, lengths: Iterable[int], score: Callable[[], T]) -> T:
        """Return `score()`, a pass over sequences of at most `lengths`; if memory runs out, in smaller micro-batches.

        Memory may run out, because no update has determined the fitting size yet. Later passes begin with the old size.
        """
        policy, sizes = self._policy, list(lengths)
        longest, limit = max(sizes, default=0), policy.max_tokens_per_micro_batch
        policy.max_tokens_per_micro_batch = min(limit, longest * len(sizes))
        try:
            while True:
                try:
                    return score()
                except (RuntimeError, MemoryError) as error:
                    is_smallest = policy.max_tokens_per_micro_batch <= longest
                    if policy.is_sharded or is_smallest or not is_out_of_memory(error):
                        raise
                _free_memory()
                policy.max_tokens_per_micro_batch = max(longest, policy.max_tokens_per_micro_batch // 2)
        finally:
            policy.max_tokens_per_micro_batch = limit

    def _update(self, message: Update) -> Updated:
        if self._made is not None and message.version == self.learner.training.version:  # its adapter had no room
            digest = self._write_adapter(message.path)
            return Updated(request_id=message.request_id, metrics=self._made, skipped=None, digest=digest)
        is_sharded = self._policy.is_sharded
        if is_sharded:  # all ranks take part in the measurement
            distributed.broadcast(message)
        mismatch = self._mismatch(message.items, message.version)
        if not is_sharded:
            distributed.broadcast(message)
        result = self._make(message)
        result = replace(result, metrics=result.metrics | mismatch)
        digest, histograms = "", tuple[Histogram, ...]()
        if result.skipped is None:
            self._made = result.metrics
            if not message.is_published:
                shutil.rmtree(message.path, ignore_errors=True)  # left behind by a process that died
            digest = self._write_adapter(message.path)
            histograms = histograms_of(message.items, result, self._config.learner.importance_weight_cap)
        return Updated(
            request_id=message.request_id,
            metrics=result.metrics,
            skipped=result.skipped,
            logprobs=result.logprobs if self._config.tracker.keep_tokens else (),
            histograms=histograms,
            digest=digest,
        )

    def _make(self, message: Update) -> UpdateResult:
        """Make the update, or repeat one whose adapter engines hold already."""
        result = self._update_within_memory(message.items, message.version)
        if message.is_published:  # a GPU does not repeat an update bit for bit
            if result.skipped is not None:
                log.warning("update %d, repeated, was skipped (%s): its moments stay", message.version, result.skipped)
            with distributed.broadcast_directory(Path(message.path)) as adapter:
                self._policy.load_adapter(adapter)
            self._begin_at(message.version)
        return result

    def _update_within_memory(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Make the update; if memory runs out, repeat it from its start in micro-batches of half the size.

        With a sharded base this raises UnstableError instead, because the other ranks wait for this one within a pass.
        """
        is_sharded = self._policy.is_sharded
        self._grow_micro_batches(version)
        while True:
            try:
                with contextlib.nullcontext() if is_sharded else distributed.all_ranks_or_none():
                    result = self._update_as_one(items, version)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
                if is_sharded:
                    where = f"{self._policy.device}, which holds a part of the base, is out of memory"
                    advice = f"lower learner.max_tokens_per_micro_batch, or {OOM_ADVICE}"
                    raise UnstableError(f"{where}: {advice} ({reason})") from error
            else:
                if result.skipped is not None:
                    self._undo()
                if self._config.engine.when_shared == "sleep":  # an engine needs the device's memory now
                    _free_memory()
                memory_metrics = {
                    "oom_retries": float(self._oom_retries),
                    "max_tokens_per_micro_batch": float(self._policy.max_tokens_per_micro_batch),
                }
                return replace(result, metrics=result.metrics | memory_metrics)
            _free_memory()
            self._halve_micro_batches(items, reason)
            self._undo()

    def _undo(self) -> None:
        """Restore the state before the update on every rank, so that the saved state is always the learner's."""
        with distributed.broadcast_directory(self._state) as before:
            self.learner.training.load(before)

    def _update_as_one(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Make one update.

        Raises ConfigError for an algorithm that gives each rank a different adapter, or returns no UpdateResult: a
        restart would not help.
        """
        name, num_sums = type(self.learner).__name__, distributed.num_sums()
        self._policy.draw_apart(version)
        result = checked(name, self.learner.update(items, version))
        if distributed.num_ranks() > 1 and result.skipped is None:
            if distributed.num_sums() == num_sums:
                raise ConfigError(
                    f"{name} does not call ranks.sum_gradients before its step, so that learner ranks would learn "
                    "different adapters; use one entry in learner.devices"
                )
            if version % CHECK_EVERY == 1:
                distributed.check_alike(self.learner.training.parameters)
        if result.skipped is None:
            self.past_adapters.hold(version)
        return result

    def _mismatch(self, items: Sequence[TrainItem], version: int) -> dict[str, float]:
        """Measure the mismatch of engines and learner on a sample of the batch, before update `version`.

        Each step is scored with the adapter that sampled it, so that its tokens are on-policy. A step whose adapter is
        not held is left out. Nothing of the learner changes. Raises RequestError as an update of these items would.
        """
        policy = self._policy
        check(items, policy.vocab_size)
        fitted = fit(items, self._config.learner.max_train_len).items
        logp, behaviour_logp = [torch.empty(0)], [torch.empty(0)]
        for past, own in self.past_adapters.sample(fitted, version).items():
            logp += self._within_memory(map(length, own), partial(policy.logprobs_with, self.past_adapters[past], own))
            behaviour_logp += [torch.from_numpy(item.logprobs.copy()) for item in own]
        return losses.mismatch_metrics(torch.cat(logp), torch.cat(behaviour_logp))

    def _grow_micro_batches(self, version: int) -> None:
        """Double halved micro-batches at every GROW_EVERY-th version: one unusual batch may have been the reason."""
        policy, configured = self._policy, self._config.learner.max_tokens_per_micro_batch
        if version % GROW_EVERY == 0 and policy.max_tokens_per_micro_batch < configured:
            policy.max_tokens_per_micro_batch = min(configured, 2 * policy.max_tokens_per_micro_batch)
            log.info("update %d tries max_tokens_per_micro_batch = %d", version, policy.max_tokens_per_micro_batch)

    def _halve_micro_batches(self, items: Sequence[TrainItem], reason: str) -> None:
        """Halve the micro-batches. Raises RequestError if they hold one sequence already."""
        config, policy = self._config.learner, self._policy
        longest = max(map(length, fit(items, config.max_train_len).items or items))
        most_rows = config.mini_batch_size or sys.maxsize
        if self.learner.training.critic is not None:
            most_rows = max(most_rows, config.infer_mini_batch_size)
        most_rows = min(most_rows, len(items))
        largest = min(policy.max_tokens_per_micro_batch, longest * most_rows)
        if largest <= longest:
            raise RequestError(
                f"{policy.device} is out of memory for one sequence of {longest} tokens: {OOM_ADVICE} ({reason})"
            )
        policy.max_tokens_per_micro_batch = max(longest, largest // 2)
        self._oom_retries += 1
        log.warning(
            "out of memory (%s): the update restarts with max_tokens_per_micro_batch = %d",
            reason,
            policy.max_tokens_per_micro_batch,
        )

    def _save(self, path: Path) -> None:
        """Save the whole state or nothing; a process that replaces this one continues from it.

        With a sync schedule it has the past adapters too, so that a resumed run measures the same mismatch.
        """
        shutil.rmtree(path, ignore_errors=True)  # left behind by a process that died
        with peft_files.new_directory(path, 3 * self._policy.adapter_bytes) as unfinished:
            self.learner.training.save(unfinished)
            if self._config.run.schedule == "sync":
                self.past_adapters.save(unfinished)
            (unfinished / UPDATED).write_text(json.dumps(self._made))
        self._state = path

    def _write_adapter(self, path: str) -> str:
        """Write the adapter, unless a predecessor did, and return the digest of the one that this process holds."""
        tensors, config = self._policy.adapter_state()
        if not Path(path).exists():  # a process may have died just after it wrote it
            peft_files.write_adapter(Path(path), tensors, config)
        return peft_files.digest_of(config, peft_files.serialized(tensors))

    def _load(self, directory: Path | None) -> None:
        """Continue from a state, with the result of the update that made it. `directory`: on rank 0."""
        with distributed.broadcast_directory(directory) as state:
            self.learner.training.load(state)
            self.past_adapters.load(state)
            self.past_adapters.hold(self.learner.training.version)
            updated = state / UPDATED
            self._made = json.loads(updated.read_text()) if updated.is_file() else None
        self._state = directory
        if self._made is not None:  # its predecessor found the size that fits this machine's memory
            self._oom_retries = int(self._made["oom_retries"])
            self._policy.max_tokens_per_micro_batch = int(self._made["max_tokens_per_micro_batch"])


def checked(algorithm: str, result: object) -> UpdateResult:
    """Return an algorithm's result with plain numbers as metrics, for messages and files."""
    if not isinstance(result, UpdateResult):
        raise ConfigError(f"{algorithm}.update must return an UpdateResult; it returned {result!r:.99}")
    metrics = {}
    for name, value in result.metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{algorithm}.update: the metric {name!r} is {value!r:.99}, which is not a number"
            ) from error
    return replace(result, metrics=metrics)


def _free_memory() -> None:
    gc.collect()  # a traceback may hold the tensors of the failed update
    torch.cuda.empty_cache()
