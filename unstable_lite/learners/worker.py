"""The learner process: `python -m unstable_lite.learners.worker`.

Owns the loop and what each message leads to. Knows nothing of algorithms, rewards, games or text.

`Ready.facts`: `adapter_bytes` (of one published version), `lora_parameters`, `base_parameters`, `dtype` (of the
base), `device`, `threads`, `vocab_size`, `max_position_embeddings` (None where the model has no limit), and the
versions of `torch`, `transformers` and `peft`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from unstable_lite.errors import RequestError
from unstable_lite.learners import Learner, adapter_files, load_learner
from unstable_lite.transport.child import WorkerSocket, WorkerSpec, run_worker
from unstable_lite.transport.messages import (
    Done,
    Failed,
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


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    torch.set_num_threads(spec.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    learner = load_learner(spec.config, spec.device)
    socket.send(Ready(facts=_facts(learner, spec)))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            socket.send(_answer(learner, message))


def _answer(learner: Learner, message: Message) -> Message:
    assert isinstance(message, (Update, Publish, Score, SaveLearner)), message
    try:
        if isinstance(message, Update):
            return _update(learner, message)
        if isinstance(message, Publish):
            return _publish(learner, message)
        if isinstance(message, Score):
            adapter, base = learner.policy.score(message.prompt_ids, message.completion_ids)
            return Scored(request_id=message.request_id, adapter_logprobs=adapter, base_logprobs=base)
        return _save(learner, message)
    except RequestError as error:
        return Failed(request_id=message.request_id, error=str(error))
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        advice = "lower learner.max_tokens_per_micro_batch or learner.logits_chunk_tokens"
        return Failed(
            request_id=message.request_id, error=f"{learner.policy.device} is out of memory: {advice} ({error})"
        )


def _update(learner: Learner, message: Update) -> Updated:
    result = learner.update(message.items, message.version)
    if result.skipped is None:
        # An AdapterError ends the worker: its weights have moved on, but no version tells of it. The last saved
        # state is where to restart from.
        adapter_files.publish(Path(message.path), *learner.policy.adapter_state())
    return Updated(request_id=message.request_id, metrics=result.metrics, skipped=result.skipped)


def _publish(learner: Learner, message: Publish) -> Done:
    started = time.perf_counter()
    adapter_files.publish(Path(message.path), *learner.policy.adapter_state())
    learner.version = message.version
    return Done(request_id=message.request_id, seconds=time.perf_counter() - started)


def _save(learner: Learner, message: SaveLearner) -> Message:
    started = time.perf_counter()
    try:
        learner.save(Path(message.path))
    except OSError as error:
        adapter_bytes = _adapter_bytes(learner)
        return Failed(
            request_id=message.request_id,
            error=adapter_files.explain(error, Path(message.path), needed_bytes=3 * adapter_bytes),
        )
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
