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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ConfigError, ModelError, NoRoomError, RequestError, is_out_of_memory
from unstable_lite.learner import UPDATED, Learner, UpdateResult, distributed, load_learner, losses
from unstable_lite.learner.answers import AnswerScores
from unstable_lite.learner.batching import check, fit, length
from unstable_lite.learner.critic import ROWS_WITHOUT_GRADIENT
from unstable_lite.learner.model import Policy
from unstable_lite.learner.other_adapters import PastAdapters, read_parameters
from unstable_lite.learner.training import ready_info
from unstable_lite.learner.training_stats import histograms_of
from unstable_lite.transport.messages import (
    AdapterDigest,
    AnswersScored,
    Done,
    Failed,
    LearnerRequest,
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
from unstable_lite.types import Histogram, TrainItem

CHECK_EVERY = 10
"""Number of updates between two checks that all ranks hold the same adapter and critic."""
GROW_EVERY = 20
"""Number of updates between two attempts to double micro-batches that were halved when memory ran out."""
OOM_ADVICE = "lower learner.max_train_len, set learner.activation_checkpointing = true, or leave it more memory"

log = logging.getLogger(__name__)

T = TypeVar("T")


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    torch.set_num_threads(spec.threads)
    config = spec.config
    if spec.num_ranks > 1:
        distributed.join_as(spec)
    workers = make_workers(config, spec.device)
    socket.send(Ready(info=ready_info(next(iter(workers.values())).policy, spec)))
    if spec.rank:
        follow(workers)
        return
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                distributed.broadcast(message)
                return
            assert isinstance(message, LearnerRequest), message
            socket.send(workers[message.policy].answer(message))


def make_workers(config: Config, device: str) -> dict[str, _Worker]:
    """Return the worker of each policy, by its name; their policies share one base."""
    if (share := config.learner.gpu_memory_utilization) is not None and device != "cpu":
        torch.cuda.set_per_process_memory_fraction(share, device)
    workers: dict[str, _Worker] = {}
    try:
        for name, share in config.shares.items():
            own = config.of_policy(name)
            workers[name] = _Worker(load_learner(own, device), own, share)
            Policy.shared = Policy.shared or workers[name].policy
    finally:
        Policy.shared = None
    return workers


def follow(workers: Mapping[str, _Worker]) -> None:
    """Carry out the messages that rank 0 forwards, until `Stop`; rank 0 alone replies and writes files."""
    while not isinstance(message := distributed.receive(), Stop):
        assert isinstance(message, LearnerRequest), message
        with contextlib.suppress(RequestError):  # it fails on every rank
            workers[message.policy].perform(message)


class _Worker:
    """The learner of one policy, and the handling of each message about it."""

    def __init__(self, learner: Learner, config: Config, share: float = 1.0) -> None:
        self.learner = learner
        self._config = config
        self._oom_retries = 0
        """Number of times that an update restarted because memory had run out."""
        self._state: Path | None = None
        """Newest directory of the learner's state, which is at the version before the next update."""
        self._made: dict[str, float] | None = None
        """Metrics of the newest update."""
        self.policy: Policy = learner.training.policy
        self._answers = AnswerScores(self.policy, config)
        num_versions = config.buffer.max_staleness + 1
        # With a smaller share of the updates, fewer of the policy's adapters have steps in a batch.
        self.past_adapters = PastAdapters(self.policy, min(num_versions, max(3, round(share * num_versions))))
        self.past_adapters.hold(learner.training.version)
        self._requests: dict[type[Message], Callable[[Any], Message]] = {
            Update: self._update,
            WriteAdapter: self._begin,
            Score: self._score,
            ScoreAnswers: self._score_answers,
            SaveLearner: self._save,
            LoadLearner: self._load,
        }

    def answer(self, message: LearnerRequest[Any]) -> Message:
        """Carry out a request, with the other ranks if necessary, and return the reply."""
        try:
            return self.perform(message)
        except RequestError as error:
            return Failed(request_id=message.request_id, error=str(error), is_no_room=isinstance(error, NoRoomError))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"{self.policy.device} is out of memory: {OOM_ADVICE} ({error})"
        _free_memory()
        return Failed(request_id=message.request_id, error=reason)

    def perform(self, message: LearnerRequest[Any]) -> Message:
        """Carry out a request and return the reply. Raises RequestError."""
        self.policy.activate()
        return self._requests[type(message)](message)

    def _begin(self, message: WriteAdapter) -> AdapterDigest:
        """Write the adapter that training starts from. Raises RequestError for one that does not fit."""
        started = time.perf_counter()
        distributed.broadcast(message)
        if message.seed is not None:
            given = message.adapter
            with distributed.broadcast_directory(Path(given)) if given else contextlib.nullcontext() as adapter:
                try:
                    self.learner.training.begin_again(message.seed, adapter)
                except (AdapterError, ModelError) as error:
                    raise RequestError(str(error)) from error
            self._made = None
            self.past_adapters.clear()
        self._continue_from(message.version)
        digest = self._write_adapter(message.path)
        return AdapterDigest(request_id=message.request_id, seconds=time.perf_counter() - started, digest=digest)

    def _continue_from(self, version: int) -> None:
        """Name the adapter that training continues from."""
        self.learner.training.version = version
        self.past_adapters.hold(version)

    def _score(self, message: Score) -> Scored:
        """Score the items. Raises RequestError for an unfit adapter."""
        policy = self.policy
        parameters = None if message.adapter is None else read_parameters(Path(message.adapter), policy)
        scored = self._pass(map(length, message.items), partial(policy.score, message.items, parameters))
        return Scored(request_id=message.request_id, logprobs=tuple(scored))

    def _score_answers(self, message: ScoreAnswers) -> AnswersScored:
        sizes = (len(prompt) + max(map(len, texts), default=0) for prompt, texts in message.questions)
        scored = self._pass(sizes, partial(self._answers.score, message.questions, message.stop))
        _free_memory()  # engines that sleep on this device wake now
        logprobs = tuple(logp.numpy().astype(np.float32) for logp in scored)
        return AnswersScored(request_id=message.request_id, logprobs=logprobs)

    def _pass(self, lengths: Iterable[int], score: Callable[[], T]) -> T:
        """Return `score()`, a pass over sequences of at most `lengths`. Later passes begin with the old size."""
        policy, sizes = self.policy, list(lengths)
        limit, longest = policy.max_tokens_per_micro_batch, max(sizes, default=0)
        policy.max_tokens_per_micro_batch = min(limit, max(1, longest * len(sizes)))
        try:
            return self._within_memory(longest, len(sizes), score)
        finally:
            policy.max_tokens_per_micro_batch = limit

    def _within_memory(
        self, longest: int, num_rows: int, attempt: Callable[[], T], undo: Callable[[], None] | None = None
    ) -> T:
        """Return `attempt()`; if memory runs out, `undo` it and repeat it in micro-batches of half the size.

        longest: most tokens of a sequence. num_rows: most sequences of a micro-batch. Raises RequestError if
        micro-batches of one sequence do not fit.
        """
        policy = self.policy
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            _free_memory()
            if undo is not None:
                undo()
            largest = min(policy.max_tokens_per_micro_batch, longest * num_rows)
            if largest <= longest:
                raise RequestError(
                    f"{policy.device} is out of memory for one sequence of {longest} tokens: {OOM_ADVICE} ({reason})"
                )
            policy.max_tokens_per_micro_batch = max(longest, largest // 2)
            log.warning(
                "out of memory (%s): trying max_tokens_per_micro_batch = %d", reason, policy.max_tokens_per_micro_batch
            )

    def _update(self, message: Update) -> Updated:
        if self._made is not None and message.version == self.learner.training.version:  # its adapter had no room
            digest = self._write_adapter(message.path)
            return Updated(request_id=message.request_id, metrics=self._made, skipped=None, digest=digest)
        mismatch = self._mismatch(message.items, message.version)
        distributed.broadcast(message)
        result = self._make(message)
        result = replace(result, metrics=result.metrics | mismatch)
        digest, histograms = "", tuple[Histogram, ...]()
        if result.skipped is None:
            self._made = result.metrics
            digest = self._write_adapter(message.path, is_new=not message.is_published)
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
        """Make the update, again if memory runs out, or repeat one whose adapter engines hold already."""
        policy, config, items, version = self.policy, self._config.learner, message.items, message.version
        if version % GROW_EVERY == 0:  # one unusual batch may have been the reason for halving them
            policy.max_tokens_per_micro_batch = min(
                config.max_tokens_per_micro_batch, 2 * policy.max_tokens_per_micro_batch
            )
        most_rows = config.mini_batch_size or sys.maxsize
        if self.learner.training.critic is not None:
            most_rows = max(most_rows, ROWS_WITHOUT_GRADIENT)
        longest = max(map(length, fit(items, config.max_train_len).items or items), default=0)
        update = partial(self._update_as_one, items, version)
        result = self._within_memory(longest, min(most_rows, len(items)), update, self._undo)
        if result.skipped is not None:
            self._undo(is_repeated=False)
        if self._config.engine.when_shared == "sleep":  # an engine needs the device's memory now
            _free_memory()
        if message.is_published:  # a GPU does not repeat an update bit for bit
            if result.skipped is not None:
                log.warning("update %d, repeated, was skipped (%s): its moments stay", version, result.skipped)
            with distributed.broadcast_directory(Path(message.path)) as adapter:
                policy.load_adapter(adapter)
            self._continue_from(version)
        memory_metrics = {
            "oom_retries": float(self._oom_retries),
            "max_tokens_per_micro_batch": float(policy.max_tokens_per_micro_batch),
        }
        return replace(result, metrics=result.metrics | memory_metrics)

    def _undo(self, is_repeated: bool = True) -> None:
        """Restore the state before the update on every rank, so that the saved state is always the learner's."""
        self._oom_retries += is_repeated
        with distributed.broadcast_directory(self._state) as before:
            self.learner.training.load(before)

    def _update_as_one(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Make one update, on all ranks or none.

        Raises ConfigError for an algorithm that gives each rank a different adapter, or returns no UpdateResult: a
        restart would not help.
        """
        name, num_sums = type(self.learner).__name__, distributed.num_sums
        with distributed.all_ranks_or_none():
            self.policy.draw_apart(version)
            result = checked(name, self.learner.update(items, version))
            if distributed.num_ranks() > 1 and result.skipped is None:
                if distributed.num_sums == num_sums:
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
        policy = self.policy
        check(items, policy.vocab_size)
        fitted = fit(items, self._config.learner.max_train_len).items
        logp, behaviour_logp = [torch.empty(0)], [torch.empty(0)]
        for past, own in self.past_adapters.sample(fitted, version).items():
            logp += self._pass(map(length, own), partial(policy.logprobs_with, self.past_adapters[past], own))
            behaviour_logp += [torch.from_numpy(item.logprobs.copy()) for item in own]
        return losses.mismatch_metrics(torch.cat(logp), torch.cat(behaviour_logp))

    def _save(self, message: SaveLearner) -> Done:
        """Save the whole state or nothing; a process that replaces this one continues from it.

        With a sync schedule it has the past adapters too, so that a resumed run measures the same mismatch.
        """
        path = Path(message.path)
        shutil.rmtree(path, ignore_errors=True)  # left behind by a process that died
        with peft_files.new_directory(path, 3 * self.policy.adapter_bytes) as unfinished:
            self.learner.training.save(unfinished)
            if self._config.run.schedule == "sync":
                self.past_adapters.save(unfinished)
            (unfinished / UPDATED).write_text(json.dumps(self._made))
        self._state = path
        return Done(request_id=message.request_id)

    def _write_adapter(self, path: str, is_new: bool = False) -> str:
        """Write the adapter, unless a predecessor did, and return the digest of the one that this process holds.

        is_new: whether a directory at `path` was left behind by a process that died. Only rank 0 writes.
        """
        if distributed.rank():
            return ""
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        tensors, config = self.policy.adapter_state()
        if not Path(path).exists():  # a process may have died just after it wrote it
            peft_files.write_adapter(Path(path), tensors, config)
        return peft_files.digest_of(config, peft_files.serialized(tensors))

    def _load(self, message: LoadLearner) -> Done:
        """Continue from a state, with the result of the update that made it. Only rank 0 reads its files."""
        distributed.broadcast(message)
        directory = None if distributed.rank() else Path(message.path)
        with distributed.broadcast_directory(directory) as state:
            self.learner.training.load(state)
            self.past_adapters.load(state)
            self.past_adapters.hold(self.learner.training.version)
            updated = state / UPDATED
            self._made = json.loads(updated.read_text()) if updated.is_file() else None
        self._state = directory
        if self._made is not None:  # its predecessor found the size that fits this machine's memory
            self._oom_retries = int(self._made["oom_retries"])
            self.policy.max_tokens_per_micro_batch = int(self._made["max_tokens_per_micro_batch"])
        return Done(request_id=message.request_id)


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
