"""Run learner ranks in separate processes or in this one: `python -m fakes.two_ranks RANK NUM_RANKS DIRECTORY JOB …`.

A job is a config, the messages for rank 0 and a fault; its outcome is what the rank holds afterwards.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from msgspec import structs
from torch import Tensor

from fakes.learner_fixtures import update_and_save
from fakes.unrolled import double, snapshot
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.learner import UpdateResult, distributed, load_learner, worker
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.transport.codec import decode, encode
from unstable_lite.transport.messages import LoadLearner, Message, Stop, Update, Updated
from unstable_lite.types import TrainItem

TOO_MUCH = 1 << 60
"""Number of bytes beyond any allocator."""


@dataclass(frozen=True, kw_only=True)
class Job:
    config_json: str
    starved: int | None = None
    """A rank without memory for passes over more than `starved_tokens` tokens."""
    starved_tokens: int = 0
    starved_step: int | None = None
    """A rank whose first optimizer step runs out of memory."""
    broken: int | None = None
    """A rank whose forward pass raises."""
    strayed: int | None = None
    """A rank that starts with another adapter."""
    strayed_critic: int | None = None
    """A rank that starts with another critic."""
    has_seeds: bool = False
    """Whether each rank draws its initial values from a different seed."""


@dataclass(frozen=True)
class Outcome:
    tensors: dict[str, Tensor]
    replies: list[Message]
    """Replies of rank 0."""
    error: str
    """Error that ended the rank, or ''."""

    @property
    def updates(self) -> list[Updated]:
        return [reply for reply in self.replies if isinstance(reply, Updated)]


class Alone(REINFORCELearner):
    """A learner that ignores the other ranks."""

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        self.add_gradient(items)
        self.training.optimizer.step()
        return UpdateResult(metrics={}, skipped=None)


def write(directory: Path, name: str, job: Job, messages: Sequence[Message]) -> None:
    (directory / f"{name}.json").write_text(json.dumps(asdict(job)))
    (directory / f"{name}.messages").write_bytes(encode(messages))


def run(directory: Path, names: Sequence[str], num_ranks: int) -> None:
    """Run all jobs, one after the other, on `num_ranks` ranks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "fakes.two_ranks", str(rank), str(num_ranks), directory, *names], env=environment
        )
        for rank in range(num_ranks)
    ]
    assert [process.wait(timeout=280) for process in processes] == [0] * num_ranks


def perform(directory: Path, name: str, rank: int = 0) -> None:
    job = Job(**json.loads((directory / f"{name}.json").read_text()))
    messages = decode((directory / f"{name}.messages").read_bytes())
    torch.manual_seed(3)
    config = Config.model_validate_json(job.config_json)
    if job.has_seeds:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": rank})})
    learner = load_learner(config, "cpu")
    generator = torch.Generator().manual_seed(1)
    critic = learner.training.critic
    for key, parameter in (learner.policy.parameters | (critic.parameters if critic else {})).items():
        if "lora_B" in key or "value_head" in key:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    double(learner)
    _spoil(learner, job, rank)
    tracker = config.tracker.model_copy(update={"keep_tokens": True})
    one = worker._Worker(learner, config.model_copy(update={"tracker": tracker}))
    replies: list[Message] = []
    error = ""
    try:
        if rank:
            worker.follow({"": one})
        else:
            for message in messages:
                placed = _placed(message)
                answer = partial(update_and_save, one) if isinstance(placed, Update) else one.answer
                replies.append(answer(placed))
            distributed.broadcast(Stop())
    except (ConfigError, RuntimeError) as reason:
        error = f"{type(reason).__name__}: {reason}"
    place = directory / f"{name}.{distributed.num_ranks()}.{rank}"
    safetensors.torch.save_file(snapshot(learner), place)
    Path(f"{place}.replies").write_bytes(encode(replies))
    Path(f"{place}.rest").write_text(error)


def _placed(message: Message) -> Message:
    """Give each number of ranks separate files."""
    assert isinstance(message, (Update, LoadLearner))
    return structs.replace(message, path=message.path.replace("RANKS", str(distributed.num_ranks())))


def outcome(directory: Path, name: str, num_ranks: int, rank: int = 0) -> Outcome:
    place = directory / f"{name}.{num_ranks}.{rank}"
    replies = decode(Path(f"{place}.replies").read_bytes())
    return Outcome(safetensors.torch.load_file(place), replies, Path(f"{place}.rest").read_text())


def _spoil(learner: Any, job: Job, rank: int) -> None:
    left = iter([True])

    def in_a_pass(layer: Any, args: Any) -> None:
        if layer.training and args[0].shape[:2].numel() > job.starved_tokens:
            torch.empty(TOO_MUCH)

    def in_a_step(*_: object) -> None:
        if next(left, False):
            torch.empty(TOO_MUCH)

    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    if job.broken == rank:
        learner.policy.base.model.register_forward_pre_hook(fail)
    if job.strayed == rank:
        next(iter(learner.policy.parameters.values())).data += 1e-6
    if job.strayed_critic == rank:
        next(iter(learner.training.critic.parameters.values())).data += 1e-6
    if job.starved == rank:
        learner.policy.base.model.layers[-1].register_forward_pre_hook(in_a_pass)
    if job.starved_step == rank:
        learner.training.optimizer.register_step_post_hook(in_a_step)


if __name__ == "__main__":
    own_rank, size, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    distributed.join(distributed.on_this_machine(place / "meeting", size), own_rank, size, "cpu", timeout_s=60)
    for job_name in sys.argv[4:]:
        perform(place, job_name, own_rank)
    distributed.leave()
