"""The engine process as the orchestrator sees it: a real child, a real socket, an engine without a model."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.remote_engine import RemoteEngine
from unstable_lite.transport.messages import (
    AdapterDigest,
    Crashed,
    Done,
    EngineStats,
    Generated,
    LoadAdapter,
    Ready,
    Sleep,
)

Start = Callable[..., RemoteEngine]


@pytest.fixture(scope="module")
def scripted() -> Iterator[RemoteEngine]:
    engine = RemoteEngine(kind="scripted", replies=["\\boxed{[4]}", "naïve 🎲"], max_model_len=64, max_loras=2)
    info = engine.wait_for_type(Ready, 60).info
    assert (info["kind"], info["max_model_len"]) == ("scripted", 64)
    yield engine
    engine.close()


def test_worker_returns_its_engines_replies_cut_at_the_length_and_repeated_by_seed(scripted: RemoteEngine) -> None:
    prompt = "où? 🎲"
    generations = scripted.generate(*[scripted.request(prompt, max_tokens=50, seed=seed) for seed in range(20)])
    assert {generation.text for generation in generations} == {"\\boxed{[4]}", "naïve 🎲"}
    for generation in generations:
        assert generation.prompt_ids.tolist() == list(prompt.encode())
        assert generation.completion_ids.tolist() == [*generation.text.encode(), 256]
        assert generation.logprobs.tolist() == [-1.0] * len(generation.completion_ids)
        assert (generation.finish_reason, generation.adapter_version) == ("stop", 0)
    first, second = (scripted.generate(*[scripted.request("p", max_tokens=3, seed=i) for i in range(8)]) for _ in "ab")
    assert [generation.text for generation in first] == [generation.text for generation in second]
    assert all(g.finish_reason == "length" and len(g.completion_ids) == 3 for g in first)


def test_scripted_worker_does_not_load_torch_and_uses_almost_no_cpu_when_idle(scripted: RemoteEngine) -> None:
    assert "libtorch" not in Path(f"/proc/{scripted.process.pid}/maps").read_text()
    time.sleep(0.3)
    ticks = (int(Path(f"/proc/{scripted.process.pid}/stat").read_text().split()[13]) for _ in range(2))
    before = next(ticks)
    time.sleep(1.0)
    assert next(ticks) - before <= 10


def test_model_that_cannot_be_loaded_is_the_last_message(start_engine: Start, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    engine = start_engine(kind="transformers", model=str(tmp_path))
    crash = engine.wait_for_type(Crashed, 120)
    assert "ModelError" in crash.error and str(tmp_path) in crash.error
    assert engine.process.wait(20) == 1


def test_requests_wait_for_at_most_one_load_at_a_time(start_engine: Start, tmp_path: Path) -> None:
    """The engine makes a step between two loads, no matter how many adapters arrive at once."""
    (tmp_path / "adapter_config.json").write_text("{}")
    engine = start_engine(kind="fakes.stuck_engines:OneAStep", replies=["yes"], max_loras=4)
    engine.wait_for_type(Ready, 60)
    asked = [engine.request("p") for _ in range(4)]
    loads = [LoadAdapter(request_id=100 + version, version=version, path=str(tmp_path)) for version in (1, 2, 3)]
    engine.send(*asked, *loads)
    order = [
        engine.wait_for(lambda message: isinstance(message, (Generated, AdapterDigest))).request_id for _ in range(7)
    ]  # type: ignore[attr-defined]
    first, second, third, fourth = (request.request_id for request in asked)
    assert order == [101, first, 102, second, 103, third, fourth]


def test_engine_reports_stats_while_it_finishes_before_sleep(start_engine: Start) -> None:
    """Otherwise a supervisor would take an engine with long answers for stuck."""
    engine = start_engine(kind="fakes.stuck_engines:Unhurried", replies=["yes"])
    engine.wait_for_type(Ready, 60)
    asked = [engine.request("p") for _ in range(15)]
    engine.send(*asked, Sleep(request_id=100))
    engine.wait_for_type(Done)
    kinds = [type(message) for message in engine.inbox]
    assert kinds.count(Generated) == 15
    assert EngineStats in kinds
