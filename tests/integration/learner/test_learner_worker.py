"""A real learner process over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fakes.worker_processes import opened_router, worker_process
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ConfigError, RequestError
from unstable_lite.learner import UpdateResult, load_learner, worker
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.transport.messages import Failed, SaveLearner, Score, Scored, Update
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.rpc import WorkerChannel

Start = Callable[[Config], Any]

TIMEOUT_S = 120.0
NON_NUMERIC: Any = {"mine": "three"}


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    started: list[WorkerProcess] = []
    with opened_router() as router:

        async def start_worker(config: Config) -> WorkerProcess:
            channel, log_path = WorkerChannel(router, "learner"), tmp_path / "learner.log"
            process = worker_process(channel, router.endpoint, config, "unstable_lite.learner.worker", log_path)
            await process.start()
            started.append(process)
            return process

        yield start_worker
        for process in started:
            await process.stop()


def unfinished(directory: Path) -> list[Path]:
    return list(directory.glob(".*unfinished"))


async def test_learner_updates_writes_scores_saves_and_stops(start, make_config, make_items, tmp_path):
    process = await start(make_config())
    channel = process.channel
    info = await asyncio.wait_for(asyncio.shield(channel.ready), TIMEOUT_S)
    assert info["vocab_size"] == 300
    assert info["position_limit"] == 256
    assert info["lora_parameters"] * 4 == info["adapter_bytes"]
    assert (info["dtype"], info["device"], info["threads"]) == ("float32", "cpu", 1)

    for version in (1, 2):
        path = tmp_path / f"v{version}"
        items = tuple(make_items(seed=version))
        await channel.ask(SaveLearner, TIMEOUT_S, path=str(tmp_path / f"state-{version - 1}"))
        updated = await channel.ask(Update, TIMEOUT_S, items=items, version=version, path=str(path))
        assert updated.skipped is None
        assert updated.metrics["step"] == version
        size = sum(tensor.nbytes for tensor in safetensors.torch.load_file(path / "adapter_model.safetensors").values())
        assert size == info["adapter_bytes"]
        assert not unfinished(tmp_path)

    await channel.ask(SaveLearner, TIMEOUT_S, path=str(tmp_path / "state-2"))
    poisoned = tuple(make_items())
    object.__setattr__(poisoned[0], "reward", float("nan"))
    skipped = await channel.ask(Update, TIMEOUT_S, items=poisoned, version=3, path=str(tmp_path / "v3"))
    assert "not finite" in skipped.skipped
    assert not (tmp_path / "v3").exists()

    asked = tuple(make_items(3))
    scored = await channel.ask(Score, TIMEOUT_S, items=asked)
    with pytest.raises(RequestError, match=r"item 0: token id \d+"):
        await channel.ask(Score, TIMEOUT_S, items=(replace(asked[0], prompt_ids=asked[0].prompt_ids + 300),))
    await process.stop()
    assert process._process.returncode == 0

    here = REINFORCELearner(make_config(), "cpu")
    here.training.load(tmp_path / "state-2")
    assert (here.training.step, here.training.version, here.training.samples_seen) == (2, 2, 14)
    for ours, theirs in zip(here.policy.score(asked), scored.logprobs, strict=True):
        assert ours.adapter == pytest.approx(theirs.adapter, abs=1e-5)
        assert ours.base == pytest.approx(theirs.base, abs=1e-5)


class WithOptions(REINFORCELearner):
    def __init__(self, config: Config, device: str, clip_high: float, name: str = "plain") -> None:
        super().__init__(config, device)
        self.made_with = clip_high, name


def test_custom_algorithm_is_made_with_its_options(make_config):
    own = f"{__name__}:WithOptions"

    def made_with(**options: object) -> object:
        config = make_config().model_copy(update={"algorithm": own})
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"options": options})})
        return vars(load_learner(config, "cpu"))["made_with"]

    assert made_with(clip_high=0.28) == (0.28, "plain")
    assert made_with(clip_high=1, name="dapo") == (1, "dapo")
    for options, problem in (
        ({}, "clip_high"),
        ({"clip_high": "high"}, "float"),
        ({"clip_high": 0.28, "clip_hihg": 0.3}, "clip_hihg"),
    ):
        with pytest.raises(ConfigError, match=f"algorithm '{own}': .*{problem}"):
            made_with(**options)


def answer_with(learner: Any, result: Any, path: Path) -> Any:
    learner.update = lambda _items, _version: result
    return worker._Worker(learner, learner.config).answer(Update(request_id=1, items=(), version=1, path=str(path)))


def test_metrics_of_a_custom_algorithm_become_plain_numbers(make_learner, tmp_path):
    result = UpdateResult(metrics={"mine": torch.tensor(3.0), "n": 2}, skipped=None)
    metrics = answer_with(make_learner(), result, tmp_path / "v1").metrics
    assert (metrics["mine"], metrics["n"]) == (3.0, 2.0)
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "REINFORCELearner.update .*UpdateResult.* None"),
        (UpdateResult(metrics=NON_NUMERIC, skipped=None), "'mine' is 'three'"),
    ],
)
def test_invalid_update_result_is_reported_with_the_algorithm(make_learner, tmp_path, result, says):
    with pytest.raises(ConfigError, match=says):
        answer_with(make_learner(), result, tmp_path / "v1")


@pytest.mark.parametrize("most_tokens", [60, 0])
def test_oversized_score_request_is_scored_in_parts_or_fails_with_advice(make_learner, make_items, most_tokens):
    learner, items = make_learner(), tuple(make_items(8))
    expected = learner.policy.score(items)
    sizes: list[int] = []

    def allocate(_: object, args: Any) -> None:
        sizes.append(args[0].shape[:2].numel())
        if sizes[-1] > most_tokens:
            torch.empty(1 << 60)

    learner.policy.base.model.layers[0].register_forward_pre_hook(allocate)
    reply = worker._Worker(learner, learner.config).answer(Score(request_id=5, items=items))
    assert max(sizes) > 60
    if not most_tokens:
        assert isinstance(reply, Failed)
        assert reply.request_id == 5
        assert "learner.max_train_len" in reply.error
        return
    assert isinstance(reply, Scored)
    assert sizes[-1] <= 60
    for answered, scored in zip(reply.logprobs, expected, strict=True):
        assert answered.adapter == pytest.approx(scored.adapter, abs=1e-5)


def test_unwritable_adapter_ends_the_learner_with_the_reason(make_learner, make_items, tmp_path):
    learner = make_learner()
    (tmp_path / "file").write_text("in the way")
    update = Update(request_id=1, items=tuple(make_items(2)), version=1, path=str(tmp_path / "file" / "v1"))
    with pytest.raises(AdapterError, match=r"file/v1: Not a directory"):
        worker._Worker(learner, learner.config).answer(update)
