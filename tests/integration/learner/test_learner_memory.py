"""An update that runs out of memory is repeated in smaller micro-batches, as if it had never begun."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner_worker import start  # noqa: F401

from fakes.learner_fixtures import update_and_save
from fakes.unrolled import is_equal, snapshot
from unstable_lite.learner import worker
from unstable_lite.learner.batching import length
from unstable_lite.orchestrator.workers import KEEP_MEMORY
from unstable_lite.transport.messages import Failed, LoadLearner, SaveLearner, Update, Updated

ALGORITHMS = ["reinforce", "ppo"]
"""Both functions that make an update, one without a critic and one with it."""
TOO_MUCH = 1 << 60
"""Number of bytes beyond any allocator."""
NEW_SHAPES = """
import torch

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6

torch.set_num_threads(1)
weight = torch.zeros(256, 256).to_mkldnn()
for num_rows in range(1, 310):
    torch.nn.functional.linear(torch.zeros(num_rows, 256).to_mkldnn(), weight)
    if num_rows == 9:
        before_mb = resident_mb()
print(resident_mb() - before_mb)
"""
"""Program that multiplies by one matrix in 300 shapes, and prints the growth of its memory."""


def starve(learner: Any, is_too_large: Callable[[int], bool]) -> None:
    """Run out of memory within a training pass over too many tokens, after dropout has drawn random numbers."""

    def allocate(layer: Any, args: Any) -> None:
        if layer.training and is_too_large(args[0].shape[:2].numel()):
            torch.empty(TOO_MUCH)

    learner.policy.base.model.layers[-1].register_forward_pre_hook(allocate)


def update(tmp_path: Path, items: Any, version: int = 1) -> Update:
    return Update(request_id=version, items=tuple(items), version=version, path=str(tmp_path / f"v{version}"))


def updated(one: worker._Worker, message: Update) -> Updated:
    reply = update_and_save(one, message)
    assert isinstance(reply, Updated), reply
    return reply


def worker_of(learner: Any, place: Path) -> worker._Worker:
    """Return a worker for updates in its own directory, with a fixed random state."""
    place.mkdir(exist_ok=True)
    torch.manual_seed(7)
    return worker._Worker(learner, learner.config)


@pytest.mark.parametrize(
    ("algorithm", "num_before", "is_in_a_step"),
    [("ppo", 0, False), ("reinforce", 1, False), ("ppo", 1, False), ("reinforce", 0, True), ("ppo", 0, True)],
)
def test_update_after_oom_equals_one_with_smaller_micro_batches(
    make_learner, make_items, tmp_path, algorithm, num_before, is_in_a_step
):
    """Dropout and shuffling draw the same numbers again, so that the result is equal bit for bit."""
    items = make_items(8, turns=2)
    longest, left = max(map(length, items)), iter([True])
    settings: dict[str, Any] = {"lora": {"lora_dropout": 0.2}, "learner": {"ppo_epochs": 2}}
    starved, modest = (make_learner(algorithm, **settings) for _ in range(2))

    def allocate(*_: object) -> None:
        if next(left, False):
            torch.empty(TOO_MUCH)

    replies = []
    for learner, place in ((starved, tmp_path / "starved"), (modest, tmp_path / "modest")):
        one = worker_of(learner, place)
        learner.policy.max_tokens_per_micro_batch = 4 * longest
        for version in range(1, num_before + 1):
            updated(one, update(place, items, version))
        if learner is modest:
            learner.policy.max_tokens_per_micro_batch = starved.policy.max_tokens_per_micro_batch
        elif is_in_a_step:
            learner.training.optimizer.register_step_post_hook(allocate)  # parameters and moments have changed
        else:
            learner.policy.max_tokens_per_micro_batch = 16384
            starve(learner, lambda size: size > 4 * longest)
        replies.append(updated(one, update(place, items, num_before + 1)))
    starved_reply, expected = replies
    assert is_equal(snapshot(starved), snapshot(modest))
    assert (starved_reply.metrics["oom_retries"], expected.metrics["oom_retries"]) == (1, 0)
    assert is_in_a_step or starved_reply.metrics["max_tokens_per_micro_batch"] == 4 * longest
    # The mismatch is measured before memory runs out, in larger forests, which round otherwise.
    apart = dict.fromkeys(("oom_retries", "seconds", "tokens_per_s", "mismatch_mean", "mismatch_max"), 0)
    assert starved_reply.metrics | apart == expected.metrics | apart


def test_critic_out_of_memory_evaluates_fewer_prompts_at_once(make_learner, make_items, tmp_path):
    """The size of its training micro-batches does not matter."""
    learner, items = make_learner("a2c", learner={"mini_batch_size": 1}), make_items(8, turns=2)
    most = 3 * max(map(length, items))

    def allocate(layer: Any, args: Any) -> None:
        if not layer.training and args[0].shape[:2].numel() > most:
            torch.empty(TOO_MUCH)

    learner.policy.base.model.layers[-1].register_forward_pre_hook(allocate)
    assert updated(worker_of(learner, tmp_path), update(tmp_path, items)).metrics["oom_retries"] >= 1


def test_halved_micro_batches_are_kept_after_a_restart_grow_again_and_halve_again(
    make_learner, make_items, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker, "GROW_EVERY", 3)
    learner, successor = (make_learner(learner={"max_tokens_per_micro_batch": 200}) for _ in range(2))
    items, most = make_items(8), 60
    for each in (learner, successor):
        starve(each, lambda size: size > most)
    one, metrics = worker_of(learner, tmp_path), []
    for version in range(1, 13):
        if version == 3:
            one = worker_of(successor, tmp_path)
            one.answer(LoadLearner(request_id=9, path=str(tmp_path / "v2.state")))
        if version == 7:
            most = 200  # there is more memory
        reply = updated(one, update(tmp_path, items, version)).metrics
        metrics.append((reply["oom_retries"], reply["max_tokens_per_micro_batch"]))
    (retries, tokens), *_ = metrics
    assert retries >= 1
    assert metrics[:6] == [(retries, tokens)] * 2 + [(retries + 1, tokens)] * 3 + [(retries + 2, tokens)]
    assert metrics[6:8] == [(retries + 2, tokens)] * 2
    assert metrics[8:] == [(retries + 2, 2 * tokens)] * 3 + [(retries + 2, min(200, 4 * tokens))]


@pytest.mark.parametrize(("algorithm", "is_after_a_step"), [("reinforce", False), ("ppo", True)])
def test_single_sequence_that_does_not_fit_fails_with_advice_and_changes_nothing(
    make_learner, make_items, tmp_path, algorithm, is_after_a_step
):
    learner, items = make_learner(algorithm), make_items(8)
    steps: list[None] = []
    learner.training.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    starve(learner, lambda size: not is_after_a_step or bool(steps))
    before = snapshot(learner)
    reply = update_and_save(worker._Worker(learner, learner.config), update(tmp_path, items))
    assert isinstance(reply, Failed) and bool(steps) == is_after_a_step
    assert f"{max(map(length, items))} tokens" in reply.error
    assert "learner.max_train_len" in reply.error
    assert is_equal(before, snapshot(learner))


def test_other_errors_are_not_taken_for_oom(make_learner, make_items, tmp_path):
    learner = make_learner()

    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    learner.policy.base.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        update_and_save(worker._Worker(learner, learner.config), update(tmp_path, make_items(2)))


@pytest.mark.nightly
async def test_learner_within_a_system_limit_finds_a_fitting_size(start, make_config, make_items, tmp_path):  # noqa: F811
    """RLIMIT_AS leaves the process less than the whole batch at once would take."""
    flags = {"activation_checkpointing": False, "max_tokens_per_micro_batch": 10**6}
    process = await start(make_config("fakes.starved_learners:Starved", learner=flags))
    await process.ready(120)
    items = [replace(item, prompt_ids=np.resize(item.prompt_ids, 200)) for item in make_items(256)]
    message = update(tmp_path, items)
    await process.channel.ask(SaveLearner, 120, path=str(tmp_path / "before"))
    fields = {"items": message.items, "version": 1, "path": message.path}
    updated: Updated = await process.channel.ask(Update, 120, **fields)
    assert updated.skipped is None
    assert updated.metrics["oom_retries"] >= 1
    assert updated.metrics["max_tokens_per_micro_batch"] < sum(map(length, items))
    assert (tmp_path / "v1").is_dir()
    assert "out of memory" in (tmp_path / "learner.log").read_text()


def test_matrix_products_of_new_shapes_do_not_fill_the_learners_memory():
    """oneDNN keeps the code of each shape; 300 of them take 190 MB, and 36 in the learner's environment."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch is built without oneDNN")
    limited = {**os.environ, **KEEP_MEMORY}
    grown_mb = float(subprocess.check_output([sys.executable, "-c", NEW_SHAPES], env=limited, text=True))
    assert grown_mb < 65
