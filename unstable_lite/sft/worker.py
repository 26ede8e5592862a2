"""Fine-tuning process: `python -m unstable_lite.transport unstable_lite.sft.worker`.

Owns the loop and the files. `Ready.info`: `device`, `dtype`, `lora_parameters`.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers

from unstable_lite.adapters import peft_files
from unstable_lite.errors import RequestError, is_out_of_memory
from unstable_lite.sft.fine_tuning import FineTuner
from unstable_lite.sft.pairs import read_pairs
from unstable_lite.transport.messages import (
    Failed,
    FineTune,
    FineTuned,
    FineTuning,
    Message,
    Ready,
    Stop,
)
from unstable_lite.transport.worker_main import WorkerSocket, WorkerSpec
from unstable_lite.types import TrainItem

REPORT_EVERY_S = 0.2


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    torch.set_num_threads(spec.threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tuner = FineTuner(spec.config, spec.device)
    num_parameters = sum(parameter.numel() for parameter in tuner.policy.parameters.values())
    dtype = str(tuner.policy.dtype).removeprefix("torch.")
    socket.send(Ready(info={"device": spec.device, "dtype": dtype, "lora_parameters": num_parameters}))
    while True:
        for message in socket.receive(wait_s=1.0):
            if isinstance(message, Stop):
                return
            assert isinstance(message, FineTune), message
            try:
                socket.send(_fine_tune(tuner, message, spec, socket))
            except _Stopped:
                return


class _Stopped(Exception):
    """The orchestrator has stopped the training."""


def _fine_tune(tuner: FineTuner, message: FineTune, spec: WorkerSpec, socket: WorkerSocket) -> Message:
    reported_at = 0.0

    def after_update(update: int, total: int, loss: float) -> None:
        nonlocal reported_at
        if any(isinstance(other, Stop) for other in socket.receive(wait_s=0)):
            raise _Stopped
        if update == total or time.monotonic() - reported_at > REPORT_EVERY_S:
            reported_at = time.monotonic()
            socket.send(FineTuning(update=update, total=total, loss=loss))

    try:
        tokenised = tuner.tokenise(read_pairs(Path(message.pairs)))
        if not tokenised.items:
            reasons = ", ".join(f"{count} {reason}" for reason, count in tokenised.left_out.items())
            raise RequestError(f"none of the pairs in {message.pairs} can be trained on: {reasons}")
        train, held_out = tuner.split(tokenised.items)
        metrics = {"num_trained": float(len(train)), "num_held_out": float(len(held_out))}
        if held_out:
            metrics |= _metrics(tuner, held_out, "before")
        losses = tuner.train(train, after_update)
        metrics |= {"train_loss_first_epoch": losses[0], "train_loss_last_epoch": losses[-1]}
        if held_out:
            metrics |= _metrics(tuner, held_out, "after")
        peft_files.write_files(Path(message.output), *tuner.policy.adapter_state())
    except RequestError as error:
        return Failed(request_id=message.request_id, error=str(error))
    except OSError as error:
        return Failed(request_id=message.request_id, error=f"cannot write the adapter to {message.output}: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        advice = "lower sft.batch_size, learner.max_tokens_per_micro_batch or learner.logits_chunk_tokens"
        return Failed(request_id=message.request_id, error=f"{spec.device} is out of memory: {advice} ({error})")
    return FineTuned(request_id=message.request_id, metrics=metrics, left_out=dict(tokenised.left_out))


def _metrics(tuner: FineTuner, held_out: list[TrainItem], when: str) -> dict[str, float]:
    agreement = tuner.agreement(held_out)
    return {
        f"loss_{when}": agreement.loss,
        f"token_accuracy_{when}": agreement.token_accuracy,
        f"accuracy_{when}": agreement.accuracy,
    }
