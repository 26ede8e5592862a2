"""The learner process: `python -m unstable_lite.transport unstable_lite.learners.worker`.

Owns the loop and what each message leads to. Knows nothing of algorithms, rewards, games or text. Where there are
several ranks, rank 0 hears the orchestrator, tells the others what concerns them, answers, and alone writes files.

`Ready.facts`: `adapter_bytes` (of one published version), `lora_parameters`, `base_parameters`, `base_bytes` (of the
base, as far as this rank holds it), `dtype` (of the base), `device`, `threads`, `vocab_size`, `position_limit` (of
sequences, in tokens), and the versions of `torch`, `transformers` and `peft`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import transformers
from torch import Tensor

from unstable_lite.config import Config, LearnerConfig
from unstable_lite.errors import AdapterError, ConfigError, RequestError, UnstableError, is_out_of_memory
from unstable_lite.learners import Learner, UpdateResult, adapter_files, load_learner, losses, ranks
from unstable_lite.learners.batching import check, fit, length
from unstable_lite.learners.client import UPDATED
from unstable_lite.learners.histograms import histograms_of
from unstable_lite.transport.adapters import NO_ROOM
from unstable_lite.transport.child import WorkerSocket, WorkerSpec
from unstable_lite.transport.messages import (
    AdapterDigest,
    Done,
    Failed,
    LoadLearner,
    Message,
    Publish,
    Ready,
    SaveLearner,
    Score,
    Scored,
    Stop,
    Update,
    Updated,
)
from unstable_lite.types import LearnerLogprobs, TrainItem

CHECK_EVERY = 10
"""Updates from one look at whether all ranks hold the same adapter, and critic, to the next."""
MISMATCH_STEPS = 64
"""Number of steps of each update, at most, on which the disagreement between engines and learner is measured."""
PAST_ADAPTERS = "past_adapters.safetensors"
"""File of the past adapters in a saved state, in mode `sync`."""
OOM_ADVICE = (
    "lower learner.max_train_len or learner.logits_chunk_tokens, set learner.activation_checkpointing = true, or leave "
    "it more memory"
)

log = logging.getLogger(__name__)


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    torch.set_num_threads(spec.threads)
    config = spec.config
    if spec.num_ranks > 1:
        _join(spec)
    worker = make_worker(config, spec.device)
    socket.send(Ready(facts=_facts(worker.learner, spec)))
    if spec.rank:
        worker.follow()
        return
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                ranks.tell(message)
                return
            socket.send(worker.answer(message))


def _join(spec: WorkerSpec) -> None:
    config = spec.config.learner
    if config.rendezvous is None:
        store = ranks.on_this_machine(Path(spec.rendezvous), spec.num_ranks)
    else:
        store = ranks.across_machines(config.rendezvous, config.start_timeout_s, is_first=spec.rank == 0)
        if spec.rank == 0:
            store.set(ranks.WELCOME, spec.to_line())
    ranks.join(store, spec.rank, spec.num_ranks, spec.device, config.update_timeout_s)


def make_worker(config: Config, device: str) -> _Worker:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if (share := config.learner.gpu_memory_utilization) is not None and device != "cpu":
        torch.cuda.set_per_process_memory_fraction(share, device)
    takes_turns = config.run.mode == "sleep"
    return _Worker(
        load_learner(config, device),
        config.learner,
        config.tracker.keep_tokens,
        takes_turns,
        max_staleness=config.buffer.max_staleness,
        saves_past=config.run.mode == "sync",
    )


class _Worker:
    """A learner, and what each message leads to."""

    def __init__(
        self,
        learner: Learner,
        config: LearnerConfig,
        keeps_tokens: bool = False,
        takes_turns: bool = False,
        *,
        max_staleness: int = 8,
        saves_past: bool = False,
    ) -> None:
        """`takes_turns`: an engine needs the device's memory after each update.

        saves_past: write the past adapters with the state, so that a resumed run measures the same mismatch.
        """
        self.learner = learner
        self._config = config
        self._keeps_tokens = keeps_tokens
        self._takes_turns = takes_turns
        self._oom_retries = 0
        """Updates that were begun anew because memory had run out."""
        self._state: Path | None = None
        """The learner as it was after the last update."""
        self._made: dict[str, float] | None = None
        """The metrics of the newest update, by this process or the one before it, which may not have been told."""
        self._max_staleness = max_staleness
        self._saves_past = saves_past
        self._past: dict[int, dict[str, Tensor]] = {}
        """Parameters of the newest max_staleness + 1 adapters by version, in the CPU's memory."""
        self._hold(learner.version)

    def answer(self, message: Message) -> Message:
        assert isinstance(message, (Update, Publish, Score, SaveLearner, LoadLearner)), message
        learner, started = self.learner, time.perf_counter()
        try:
            if isinstance(message, Update):
                return self._update(message)
            if isinstance(message, Score):
                if learner.policy.is_sharded:
                    ranks.tell(message)
                return Scored(request_id=message.request_id, logprobs=tuple(self._score(message.items)))
            if isinstance(message, Publish):
                ranks.tell(message)
                learner.version = message.version
                self._hold(message.version)
                if not Path(message.state_path).exists():
                    self._keep(message.state_path, None)
                digest = self._publish(message.path)
                seconds = time.perf_counter() - started
                return AdapterDigest(request_id=message.request_id, seconds=seconds, digest=digest)
            if isinstance(message, LoadLearner):
                self._load(Path(message.path), message)
            else:
                return self._save(message)
            return Done(request_id=message.request_id, seconds=time.perf_counter() - started)
        except RequestError as error:
            return Failed(request_id=message.request_id, error=str(error))
        except AdapterError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM):
                raise
            return Failed(request_id=message.request_id, error=str(error), is_no_room=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"{learner.policy.device} is out of memory: {OOM_ADVICE} ({error})"
            if learner.policy.is_sharded:
                raise UnstableError(reason) from error
        _free_memory()
        return Failed(request_id=message.request_id, error=reason)

    def follow(self) -> None:
        """Do what rank 0 tells, until it says to stop.

        What is wrong with a request is wrong with it on every rank, and rank 0 answers.
        """
        while not isinstance(message := ranks.hear(), Stop):
            if isinstance(message, Update):
                with contextlib.suppress(RequestError):
                    if self.learner.policy.is_sharded:
                        self._mismatch(message.items, message.version)
                    self._update_within_memory(message.items, message.version)
            elif isinstance(message, Score):
                with contextlib.suppress(RequestError):
                    self._score(message.items)
            elif isinstance(message, Publish):
                self.learner.version = message.version
                self._hold(message.version)
            else:
                assert isinstance(message, LoadLearner), message
                with ranks.spread(None) as copy:
                    assert copy is not None
                    self.learner.load(copy)
                    self._recall(copy)

    def _score(self, items: Sequence[TrainItem]) -> list[LearnerLogprobs]:
        scored: list[LearnerLogprobs] = self._pass(items, self.learner.policy.score)
        return scored

    def _pass(self, items: Sequence[TrainItem], score: Callable[[Sequence[TrainItem], int], Any]) -> Any:
        """Call `score` with the items and the tokens of a micro-batch; with fewer of them if memory runs out.

        It may run out, because no update has found yet what fits.
        """
        policy, longest = self.learner.policy, max(map(length, items), default=0)
        max_tokens = min(policy.max_tokens_per_micro_batch, longest * len(items))
        while True:
            try:
                return score(items, max_tokens)
            except (RuntimeError, MemoryError) as error:
                if policy.is_sharded or max_tokens <= longest or not is_out_of_memory(error):
                    raise
            _free_memory()
            max_tokens = max(longest, max_tokens // 2)

    def _update(self, message: Update) -> Updated:
        if self._made is not None and message.version == self.learner.version:
            if not Path(message.state_path).exists():
                self._keep(message.state_path, self._made)
            digest = self._publish(message.path)
            return Updated(request_id=message.request_id, metrics=self._made, skipped=None, digest=digest)
        if self._state is None:
            self._keep(f"{message.state_path}.before", None)
        is_sharded = self.learner.policy.is_sharded
        if is_sharded:  # all ranks take part in measuring
            ranks.tell(message)
        mismatch = self._mismatch(message.items, message.version)
        if not is_sharded:
            ranks.tell(message)
        result = self._update_within_memory(message.items, message.version)
        result = replace(result, metrics=result.metrics | mismatch)
        digest = ""
        if result.skipped is None:
            self._made = result.metrics
            self._keep(message.state_path, result.metrics)
            digest = self._publish(message.path)
        return Updated(
            request_id=message.request_id,
            metrics=result.metrics,
            skipped=result.skipped,
            logprobs=result.logprobs if self._keeps_tokens else (),
            histograms=histograms_of(message.items, result, self._config.importance_weight_cap)
            if result.skipped is None
            else (),
            digest=digest,
        )

    def _update_within_memory(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Where memory runs out the update is done again, from where it began, in micro-batches of half the size.

        Raises UnstableError instead where the base is sharded: the others wait in the middle of a pass for this rank.
        """
        is_sharded = self.learner.policy.is_sharded
        while True:
            try:
                with contextlib.nullcontext() if is_sharded else ranks.together():
                    result = self._update_as_one(items, version)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
                if is_sharded:
                    where = f"{self.learner.policy.device}, which holds a part of the base, is out of memory"
                    advice = f"lower learner.max_tokens_per_micro_batch, or {OOM_ADVICE}"
                    raise UnstableError(f"{where}: {advice} ({reason})") from error
            else:
                if self._takes_turns:
                    _free_memory()
                figures = {
                    "oom_retries": float(self._oom_retries),
                    "max_tokens_per_micro_batch": float(self.learner.policy.max_tokens_per_micro_batch),
                }
                return replace(result, metrics=result.metrics | figures)
            _free_memory()
            self._halve_micro_batches(items, reason)
            with ranks.spread(self._state) as copy:
                before = copy or self._state
                assert before is not None
                self.learner.load(before)

    def _update_as_one(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Raises ConfigError for an algorithm that leaves each rank with an adapter of its own, or does not say what it
        did: another process would do the same.
        """
        num_sums = ranks.num_sums()
        self.learner.policy.draw_apart(version)
        result = _checked(type(self.learner).__name__, self.learner.update(items, version))
        if ranks.num_ranks() > 1 and result.skipped is None:
            if ranks.num_sums() == num_sums:
                raise ConfigError(
                    f"{type(self.learner).__name__} does not call ranks.sum_gradients before its step, so that several "
                    "learner ranks would each learn something else; give it one entry in learner.devices"
                )
            if version % CHECK_EVERY == 1:
                critic = self._critic
                ranks.check_alike(self.learner.policy.parameters | (critic.parameters if critic is not None else {}))
        if result.skipped is None:
            self._hold(version)
        return result

    def _hold(self, version: int) -> None:
        """Keep the policy's parameters as adapter `version`, and forget what is too old to be trained on."""
        policy = self.learner.policy
        if ranks.rank() and not policy.is_sharded:
            return
        self._past[version] = {name: value.detach().to("cpu", copy=True) for name, value in policy.parameters.items()}
        self._past = {past: kept for past, kept in self._past.items() if past >= version - self._max_staleness}

    def _mismatch(self, items: Sequence[TrainItem], version: int) -> dict[str, float]:
        """Measure how far engines and learner disagree about a sample of the batch, before update `version`.

        Each step is scored with the adapter that sampled it, so that its tokens are on-policy. A step whose adapter is
        not held is left out. Nothing of the learner changes. Raises RequestError as an update of these items would.
        """
        policy = self.learner.policy
        check(items, policy.vocab_size)
        fitted = fit(items, self._config.max_train_len).items
        known = [item for item in fitted if item.adapter_version in self._past]
        sample = random.Random(version).sample(known, min(MISMATCH_STEPS, len(known)))
        logp, behaviour_logp = [torch.empty(0)], [torch.empty(0)]
        for past in sorted({item.adapter_version for item in sample}):
            own = [item for item in sample if item.adapter_version == past]
            logp += self._pass(own, partial(policy.logprobs_with, self._past[past]))
            behaviour_logp += [torch.from_numpy(item.logprobs.copy()) for item in own]
        return losses.mismatch_figures(torch.cat(logp), torch.cat(behaviour_logp))

    @property
    def _critic(self) -> Any:
        """None where the algorithm has none."""
        return getattr(self.learner, "critic", None)

    def _halve_micro_batches(self, items: Sequence[TrainItem], reason: str) -> None:
        """Raises RequestError if they are of one sequence already."""
        config, policy = self._config, self.learner.policy
        longest = max(map(length, fit(items, config.max_train_len).items or items))
        most_rows = config.mini_batch_size or sys.maxsize
        if self._critic is not None:
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
            "out of memory (%s): the update is done again with max_tokens_per_micro_batch = %d",
            reason,
            policy.max_tokens_per_micro_batch,
        )

    def _keep(self, path: str, metrics: dict[str, float] | None) -> None:
        """The whole state, or none of it: who takes this process's place goes on from there."""
        unfinished = Path(f"{path}.partial")
        try:
            for left_behind in (unfinished, path):  # by a process that died
                shutil.rmtree(left_behind, ignore_errors=True)
            unfinished.mkdir()
            self._write_state(unfinished)
            (unfinished / UPDATED).write_text(json.dumps(metrics))
            unfinished.rename(path)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise AdapterError(adapter_files.explain(error, Path(path), 3 * _adapter_bytes(self.learner))) from error

        if self._state is not None and self._state.suffix == ".before":  # the others are the orchestrator's to remove
            shutil.rmtree(self._state, ignore_errors=True)
        self._state = Path(path)

    def _write_state(self, directory: Path) -> None:
        """Write the learner's state, and in mode `sync` the past adapters, into a directory that exists."""
        self.learner.save(directory)
        if self._saves_past:
            past = {f"{v} {name}": value for v, kept in self._past.items() for name, value in kept.items()}
            adapter_files.write_file(directory / PAST_ADAPTERS, safetensors.torch.save(past))

    def _save(self, message: SaveLearner) -> Message:
        started = time.perf_counter()
        try:
            self._write_state(Path(message.path))
        except OSError as error:
            needed = 3 * _adapter_bytes(self.learner)
            return Failed(request_id=message.request_id, error=adapter_files.explain(error, Path(message.path), needed))
        return Done(request_id=message.request_id, seconds=time.perf_counter() - started)

    def _publish(self, path: str) -> str:
        """Write the adapter, and return the digest of what this process holds, whoever wrote the file."""
        state = self.learner.policy.adapter_state()
        if not Path(path).exists():  # it may have been written just before the process died
            adapter_files.publish(Path(path), *state)
        return adapter_files.digest(*state)

    def _load(self, directory: Path, message: LoadLearner) -> None:
        self.learner.load(directory)
        ranks.tell(message)
        with ranks.spread(directory):
            self._state = directory
            self._made = self._recall(directory)

    def _recall(self, directory: Path) -> dict[str, float] | None:
        """Return the metrics of the update that made this state, if one did, and read the past adapters."""
        self._past = {}
        if (directory / PAST_ADAPTERS).is_file():
            for name, value in adapter_files.read_tensors(directory / PAST_ADAPTERS).items():
                version, _, parameter = name.partition(" ")
                self._past.setdefault(int(version), {})[parameter] = value
        self._hold(self.learner.version)
        updated = directory / UPDATED
        made: dict[str, float] | None = json.loads(updated.read_text()) if updated.is_file() else None
        if made is not None:  # what its predecessor learned about this machine's memory
            self._oom_retries = int(made["oom_retries"])
            self.learner.policy.max_tokens_per_micro_batch = int(made["max_tokens_per_micro_batch"])
        return made


def _checked(algorithm: str, result: object) -> UpdateResult:
    """With plain numbers for metrics, as messages and files take them."""
    if not isinstance(result, UpdateResult):
        raise ConfigError(f"{algorithm}.update must return an UpdateResult; it returned {result!r:.99}")
    metrics = {}
    for name, value in result.metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{algorithm}.update: the metric {name!r} is {value!r:.99}, which is no number"
            ) from error
    return replace(result, metrics=metrics)


def _free_memory() -> None:
    gc.collect()  # a failed update's tensors may hang on its traceback
    torch.cuda.empty_cache()


def _adapter_bytes(learner: Learner) -> int:
    tensors, _ = learner.policy.adapter_state()
    return sum(tensor.nbytes for tensor in tensors.values())


def _facts(learner: Learner, spec: WorkerSpec) -> dict[str, Any]:
    policy = learner.policy
    return {
        "adapter_bytes": _adapter_bytes(learner),
        "lora_parameters": sum(parameter.numel() for parameter in policy.parameters.values()),
        "base_parameters": policy.num_base_parameters,
        "base_bytes": policy.base_bytes,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": spec.device,
        "threads": spec.threads,
        "vocab_size": policy.vocab_size,
        "position_limit": policy.position_limit,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }
