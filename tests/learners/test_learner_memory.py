"""Memory that runs out in the middle of an update: it is done again in smaller micro-batches, as if never begun."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unrolled import is_equal, snapshot
from unstable_lite.config import Config
from unstable_lite.learners import worker
from unstable_lite.learners.batching import length
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import Failed, LoadLearner, Update, Updated
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.sockets import Peer, Router

MakeLearner = Callable[..., Any]
MakeItems = Callable[..., Any]

ALGORITHMS = ["reinforce", "a2c", "ppo", "grpo"]
TOO_MUCH = 1 << 60
"""Bytes that no allocator has."""


def starve(learner: Any, is_too_large: Callable[[int], bool]) -> None:
    """Ask the allocator for too much in the middle of a training pass over too many tokens: dropout has drawn."""

    def allocate(layer: Any, args: Any) -> None:
        if layer.training and is_too_large(args[0].shape[:2].numel()):
            torch.empty(TOO_MUCH)

    learner.policy._base.model.layers[-1].register_forward_pre_hook(allocate)


def once(condition: Callable[[int], bool]) -> Callable[[int], bool]:
    """True the first time that `condition` is, and never again."""
    left = iter([True])
    return lambda size: condition(size) and next(left, False)


def update(tmp_path: Path, items: Any, version: int = 1) -> Update:
    paths = {"path": str(tmp_path / f"v{version}"), "state_path": str(tmp_path / f"learner-{version}")}
    return Update(request_id=version, items=tuple(items), version=version, **paths)


@pytest.mark.parametrize(("algorithm", "num_before"), [("ppo", 0), *((algorithm, 1) for algorithm in ALGORITHMS)])
def test_an_update_that_ran_out_of_memory_is_the_one_of_smaller_micro_batches(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path, algorithm: str, num_before: int
) -> None:
    """Bit for bit, whatever had been made of it: dropout and shuffling draw the same numbers again."""
    items = make_items(8, turns=2)
    longest = max(map(length, items))
    settings: dict[str, Any] = {"lora": {"lora_dropout": 0.2}}
    steps = {"ppo_epochs": 2}
    starved = make_learner(algorithm, learner=steps, **settings)
    modest = make_learner(algorithm, learner=steps | {"max_tokens_per_micro_batch": 4 * longest}, **settings)
    replies = []
    for learner, place in ((starved, tmp_path / "starved"), (modest, tmp_path / "modest")):
        place.mkdir()
        one = worker._Worker(learner, learner._config)
        torch.manual_seed(7)
        for version in range(1, num_before + 1):
            learner.policy.max_tokens_per_micro_batch = 4 * longest
            one.answer(update(place, items, version))
        if learner is starved:
            learner.policy.max_tokens_per_micro_batch = 16384
            starve(learner, lambda size: size > 4 * longest)
        replies.append(one.answer(update(place, items, num_before + 1)))
    told, expected = replies
    assert isinstance(told, Updated)
    assert isinstance(expected, Updated)
    assert is_equal(snapshot(starved), snapshot(modest))
    assert (told.metrics["oom_retries"], expected.metrics["oom_retries"]) == (1, 0)
    assert told.metrics["max_tokens_per_micro_batch"] == 4 * longest
    apart = ("oom_retries", "seconds", "tokens_per_s")
    assert {k: v for k, v in told.metrics.items() if k not in apart} == {
        k: v for k, v in expected.metrics.items() if k not in apart
    }
    assert not list((tmp_path / "starved").glob("*.before"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_optimiser_step_that_runs_out_of_memory_half_way_is_taken_back(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path, algorithm: str
) -> None:
    items = make_items(8, turns=2)
    starved, modest = (make_learner(algorithm) for _ in range(2))
    is_too_much = once(lambda _: True)

    def allocate(*_: object) -> None:
        if is_too_much(0):
            torch.empty(TOO_MUCH)

    starved._optimizer.register_step_post_hook(allocate)  # when parameters and moments have moved
    for learner, place in ((starved, tmp_path / "starved"), (modest, tmp_path / "modest")):
        place.mkdir()
        torch.manual_seed(7)
        reply = worker._Worker(learner, learner._config).answer(update(place, items))
        assert isinstance(reply, Updated)
        modest.policy.max_tokens_per_micro_batch = starved.policy.max_tokens_per_micro_batch
    assert is_equal(snapshot(starved), snapshot(modest))


def test_a_critic_that_is_asked_about_many_prompts_at_once_is_asked_about_fewer(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    """However small the micro-batches are that it trains in."""
    learner, items = make_learner("a2c", learner={"mini_batch_size": 1}), make_items(8, turns=2)
    most = 3 * max(map(length, items))

    def allocate(layer: Any, args: Any) -> None:
        if not layer.training and args[0].shape[:2].numel() > most:
            torch.empty(TOO_MUCH)

    learner.policy._base.model.layers[-1].register_forward_pre_hook(allocate)
    reply = worker._Worker(learner, learner._config).answer(update(tmp_path, items))
    assert isinstance(reply, Updated), reply
    assert reply.metrics["oom_retries"] >= 1


def test_what_was_learned_about_memory_is_kept_for_later_updates_and_by_a_successor(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    learner, successor = (make_learner() for _ in range(2))
    items = make_items(8)
    starve(learner, lambda size: size > 60)
    one = worker._Worker(learner, learner._config)
    first, second = (one.answer(update(tmp_path, items, version)) for version in (1, 2))
    assert isinstance(first, Updated)
    assert isinstance(second, Updated)
    tokens = first.metrics["max_tokens_per_micro_batch"]
    assert first.metrics["oom_retries"] >= 1
    assert second.metrics["oom_retries"] == first.metrics["oom_retries"], "it did not run out again"
    another = worker._Worker(successor, successor._config)
    another.answer(LoadLearner(request_id=9, path=str(tmp_path / "learner-2")))
    third = another.answer(update(tmp_path, items, 3))
    assert isinstance(third, Updated)
    assert third.metrics["max_tokens_per_micro_batch"] == tokens
    assert third.metrics["oom_retries"] == first.metrics["oom_retries"]


def test_one_sequence_that_does_not_fit_fails_the_update_with_what_to_do(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    learner, items = make_learner(), make_items(8)
    starve(learner, lambda size: True)
    before = snapshot(learner)
    reply = worker._Worker(learner, learner._config).answer(update(tmp_path, items))
    assert isinstance(reply, Failed)
    assert f"cpu is out of memory for one sequence of {max(map(length, items))} tokens" in reply.error
    assert "lower learner.max_train_len" in reply.error
    assert is_equal(before, snapshot(learner))


def test_an_error_of_another_kind_is_not_taken_for_want_of_memory(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    learner = make_learner()

    def fail(*_: object) -> None:
        raise RuntimeError("shapes do not fit")

    learner.policy._base.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        worker._Worker(learner, learner._config).answer(update(tmp_path, make_items(2)))


@pytest.fixture
async def starved_process(tmp_path: Path, make_config: Callable[..., Config]) -> AsyncIterator[WorkerProcess]:
    (tmp_path / "bus").mkdir()
    router = Router(tmp_path / "bus")
    flags = {"gradient_checkpointing": False, "activation_checkpointing": False, "max_tokens_per_micro_batch": 10**6}
    config = make_config("starved_learners:Starved", learner=flags)
    spec = WorkerSpec(
        name="learner", endpoint=router.endpoint, device="cpu", threads=1, config_json=config.model_dump_json()
    )
    process = WorkerProcess(Peer(router, "learner"), tmp_path / "log", "unstable_lite.learners.worker", spec, {})
    await process.start()
    await process.ready(120)
    yield process
    await process.stop()
    router.close()


async def test_a_learner_within_a_limit_of_the_system_finds_the_size_that_fits(
    starved_process: WorkerProcess, make_items: MakeItems, tmp_path: Path
) -> None:
    """RLIMIT_AS leaves the process so many MB; the whole batch at once would take several times as much."""
    items = [replace(item, prompt_ids=np.resize(item.prompt_ids, 200)) for item in make_items(256)]
    message = update(tmp_path, items)
    fields = {"items": message.items, "version": 1, "path": message.path, "state_path": message.state_path}
    updated: Updated = await starved_process.peer.ask(Update, 120, **fields)
    assert updated.skipped is None
    assert updated.metrics["oom_retries"] >= 1
    assert updated.metrics["max_tokens_per_micro_batch"] < sum(map(length, items))
    assert (tmp_path / "v1").is_dir()
    assert "out of memory" in (tmp_path / "log").read_text()
