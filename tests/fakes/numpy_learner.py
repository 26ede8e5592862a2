"""Learner process without torch, for claims about the orchestrator: the real protocol, an adapter of two matrices.

`python -m fakes.numpy_learner ARGUMENTS` is the command `unstable-lite ARGUMENTS` with this learner. Equal steps make
equal adapters. Its log-probabilities are the engine's own, so the canary passes. With INTERRUPT="4 9" as a variable of
its environment it sends the run signal 9 when its fourth update begins: one moment on machines of any speed.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from unstable_lite.adapters import peft_files
from unstable_lite.errors import NoRoomError, RequestError
from unstable_lite.learner import UPDATED
from unstable_lite.transport.messages import (
    AdapterDigest,
    Done,
    Failed,
    LearnerRequest,
    LoadLearner,
    Message,
    Ready,
    SaveLearner,
    Score,
    Scored,
    Stop,
    Update,
    Updated,
    WriteAdapter,
)
from unstable_lite.transport.worker_main import WorkerSocket, WorkerSpec
from unstable_lite.types import LearnerLogprobs, TrainItem

NAMES = {"unstable_lite.learner.worker": "fakes.numpy_learner"}
STATE = "learner.safetensors"
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora"
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}


def use(patch: Any = None) -> None:
    """Let the runs of this process start this learner instead of the real one. patch: MonkeyPatch that undoes it."""
    from unstable_lite.orchestrator.workers import Workers

    make = Workers.make

    def make_this(workers: Any, module: str, *arguments: Any, **keywords: Any) -> Any:
        return make(workers, NAMES.get(module, module), *arguments, **keywords)

    (patch.setattr if patch else setattr)(Workers, "make", make_this)


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    learners = {name: learner_of(spec, name) for name in spec.config.shares}
    assert gc.isenabled()
    due, signum = map(int, os.environ.get("INTERRUPT", "0 0").split())
    socket.send(Ready(info={"adapter_bytes": 4096, "device": spec.device, "threads": spec.threads}))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            assert isinstance(message, LearnerRequest)
            if isinstance(message, Update):
                due -= 1
                if due == 0:
                    os.kill(os.getppid(), signum)
            socket.send(learners[message.policy].answer(message))


def learner_of(spec: WorkerSpec, policy: str) -> NumpyLearner:
    own = spec.config.of_policy(policy)
    return class_of(own.algorithm)(replace(spec, config_json=own.model_dump_json()))


def class_of(algorithm: str) -> type[NumpyLearner]:
    """Return the class of an algorithm named `fakes.slow_learners:Class`, and NumpyLearner for any other."""
    module, _, name = algorithm.partition(":")
    return getattr(importlib.import_module(module), name) if module.startswith("fakes.") else NumpyLearner  # type: ignore[no-any-return]


class NumpyLearner:
    def __init__(self, spec: WorkerSpec) -> None:
        self.learning_rate = spec.config.learner.learning_rate
        self._begin(spec.config.run.seed)

    def _begin(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        a_RI, b_OR = rng.normal(size=(2, 128)), np.zeros((128, 2))
        self.tensors = {f"{PREFIX}_A.weight": a_RI.astype(np.float32), f"{PREFIX}_B.weight": b_OR.astype(np.float32)}
        self.version = self.step = self.samples_seen = 0
        self.made: dict[str, float] = {}

    def answer(self, message: Any) -> Message:
        number = message.request_id
        try:
            match message:
                case Update():
                    digest = self._update(message)
                    return Updated(request_id=number, metrics=self.made, skipped=None, digest=digest)
                case WriteAdapter():
                    if message.seed is not None:
                        self._begin(message.seed)
                        if message.adapter is not None:
                            self.tensors = load_file(Path(message.adapter) / peft_files.WEIGHTS)
                    self.version = message.version
                    return AdapterDigest(request_id=number, seconds=0.0, digest=self._write_adapter(message.path))
                case Score():
                    scored = (LearnerLogprobs(adapter=item.logprobs, base=item.logprobs) for item in message.items)
                    return Scored(request_id=number, logprobs=tuple(scored))
                case SaveLearner():
                    self._save(Path(message.path))
                case LoadLearner():
                    self._load(Path(message.path))
        except RequestError as error:
            return Failed(request_id=number, error=str(error), is_no_room=isinstance(error, NoRoomError))
        return Done(request_id=number)

    def _update(self, message: Update) -> str:
        """Make the update, unless it was made and its adapter had no room; return the adapter's digest."""
        if message.version != self.version:
            self.learn(message.items, message.version)
        if message.is_published:
            self.tensors = load_file(Path(message.path) / peft_files.WEIGHTS)
        return self._write_adapter(message.path)

    def learn(self, items: Sequence[TrainItem], version: int) -> None:
        steps = hashlib.sha256()
        for item in items:
            steps.update(item.prompt_ids.tobytes() + item.completion_ids.tobytes() + repr(item.reward).encode())
        rng = np.random.default_rng(list(steps.digest()))
        for tensor in self.tensors.values():
            tensor += rng.normal(scale=self.learning_rate, size=tensor.shape)
        self.version, self.step = version, self.step + 1
        self.samples_seen += len(items)
        self.made = {
            "loss": rng.normal(),
            "policy_grad_norm": 1.0,
            "num_items": float(len(items)),
            "zero_advantage": float(np.mean([item.reward == 0 for item in items])),
            "num_tokens": float(sum(len(item.completion_ids) for item in items)),
            "step": float(self.step),
            "samples_seen": float(self.samples_seen),
            "staleness_max": float(max(version - 1 - item.adapter_version for item in items)),
            "oom_retries": 0.0,
            "max_tokens_per_micro_batch": 1024.0,
        }

    def _write_adapter(self, path: str) -> str:
        if not Path(path).exists():
            with peft_files.new_directory(Path(path), 4096) as unfinished:
                self._write_files(unfinished)
        return peft_files.digest_of(PEFT, save(self.tensors))

    def _write_files(self, directory: Path) -> None:
        peft_files.write_file(directory / peft_files.WEIGHTS, save(self.tensors))
        peft_files.write_file(directory / peft_files.CONFIG, json.dumps(PEFT).encode())

    def _save(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        counts = np.array([self.version, self.step, self.samples_seen])
        with peft_files.new_directory(path, 4096) as unfinished:
            self._write_files(unfinished)
            peft_files.write_file(unfinished / STATE, save({"counts": counts}))
            (unfinished / UPDATED).write_text(json.dumps(self.made))

    def _load(self, path: Path) -> None:
        self.tensors = load_file(path / peft_files.WEIGHTS)
        self.version, self.step, self.samples_seen = load_file(path / STATE)["counts"].tolist()
        self.made = json.loads((path / UPDATED).read_text()) if (path / UPDATED).is_file() else {}


if __name__ == "__main__":
    from unstable_lite.__main__ import main as command

    use()
    command()
