"""The learner process: `python -m unstable_lite.learners.worker`.

Owns the loop and what each message leads to. Knows nothing of algorithms, rewards, games or text.

`Ready.facts`: `adapter_bytes` (of one published version), `lora_parameters`, `base_parameters`, `dtype` (of the
base), `device`, `threads`, `vocab_size`, `max_position_embeddings` (None where the model has no limit), and the
versions of `torch`, `transformers` and `peft`.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.learners import Learner, adapter_files, load_learner
from unstable_lite.transport.child import WorkerSocket, WorkerSpec, run_worker
from unstable_lite.transport.messages import (
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

UPDATED = "updated.json"
"""In a learner's state: the reply to the update that it is of."""


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    torch.set_num_threads(spec.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    worker = _Worker(load_learner(spec.config, spec.device))
    socket.send(Ready(facts=_facts(worker.learner, spec)))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            socket.send(worker.answer(message))


class _Worker:
    """A learner, and what each message leads to."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._made: dict[str, float] | None = None
        """The metrics of the update that was made, and perhaps not told, before this process was started."""

    def answer(self, message: Message) -> Message:
        assert isinstance(message, (Update, Publish, Score, SaveLearner, LoadLearner)), message
        learner, started = self.learner, time.perf_counter()
        try:
            if isinstance(message, Update):
                return self._update(message)
            if isinstance(message, Score):
                adapter, base = learner.policy.score(message.prompt_ids, message.completion_ids)
                return Scored(request_id=message.request_id, adapter_logprobs=adapter, base_logprobs=base)
            if isinstance(message, Publish):
                learner.version = message.version
                if not Path(message.state_path).exists():
                    self._keep(message.state_path, None)
                self._publish(message.path)
            elif isinstance(message, LoadLearner):
                self._load(Path(message.path))
            else:
                return _save(learner, message)
            return Done(request_id=message.request_id, seconds=time.perf_counter() - started)
        except RequestError as error:
            return Failed(request_id=message.request_id, error=str(error))
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            advice = "lower learner.max_tokens_per_micro_batch or learner.logits_chunk_tokens"
            return Failed(
                request_id=message.request_id, error=f"{learner.policy.device} is out of memory: {advice} ({error})"
            )

    def _update(self, message: Update) -> Updated:
        if self._made is not None and message.version == self.learner.version:
            self._publish(message.path)
            return Updated(request_id=message.request_id, metrics=self._made, skipped=None)
        result = self.learner.update(message.items, message.version)
        if result.skipped is None:
            self._keep(message.state_path, result.metrics)
            self._publish(message.path)
        return Updated(request_id=message.request_id, metrics=result.metrics, skipped=result.skipped)

    def _keep(self, path: str, metrics: dict[str, float] | None) -> None:
        """The whole state, or none of it: who takes this process's place goes on from there."""
        partial = Path(f"{path}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self.learner.save(partial)
            (partial / UPDATED).write_text(json.dumps(metrics))
            partial.rename(path)
        except OSError as error:
            raise AdapterError(adapter_files.explain(error, Path(path), 3 * _adapter_bytes(self.learner))) from error

    def _publish(self, path: str) -> None:
        if not Path(path).exists():  # it may have been written just before the process died
            adapter_files.publish(Path(path), *self.learner.policy.adapter_state())

    def _load(self, directory: Path) -> None:
        self.learner.load(directory)
        updated = directory / UPDATED
        self._made = json.loads(updated.read_text()) if updated.is_file() else None


def _save(learner: Learner, message: SaveLearner) -> Message:
    started = time.perf_counter()
    try:
        learner.save(Path(message.path))
    except OSError as error:
        needed = 3 * _adapter_bytes(learner)
        return Failed(request_id=message.request_id, error=adapter_files.explain(error, Path(message.path), needed))
    return Done(request_id=message.request_id, seconds=time.perf_counter() - started)


def _adapter_bytes(learner: Learner) -> int:
    tensors, _ = learner.policy.adapter_state()
    return sum(tensor.nbytes for tensor in tensors.values())


def _facts(learner: Learner, spec: WorkerSpec) -> dict[str, Any]:
    policy = learner.policy
    return {
        "adapter_bytes": _adapter_bytes(learner),
        "lora_parameters": sum(parameter.numel() for parameter in policy.parameters.values()),
        "base_parameters": policy.num_base_parameters,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": spec.device,
        "threads": spec.threads,
        "vocab_size": policy.vocab_size,
        "max_position_embeddings": policy.max_position_embeddings,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


if __name__ == "__main__":
    run_worker(main)
