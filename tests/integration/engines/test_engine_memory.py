"""An engine whose memory runs out within a step serves fewer requests at once and replies to each of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.remote_engine import engine_spec, request
from unstable_lite.engines.embedded import engine as embedded_engine
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.errors import ModelError
from unstable_lite.types import Generation

PROMPTS = [f"{n} is a prompt of its own length" + " and longer" * n for n in range(6)]


def load(path: Path, adapter: Path) -> TransformersEngine:
    settings = {"kind": "transformers", "dtype": "float32", "max_model_len": 300}
    engine = TransformersEngine(engine_spec(model=str(path), **settings))
    engine.load_adapter(1, adapter)
    return engine


def allocate_too_much() -> None:
    torch.empty(1 << 60)


def starve(engine: TransformersEngine, most_tokens: int) -> None:
    """Make a pass over more than `most_tokens` tokens run out of memory half-way through."""

    def allocate(num_tokens: int) -> None:
        if num_tokens > most_tokens:
            allocate_too_much()

    before_last_layer(engine, allocate)


def before_last_layer(engine: TransformersEngine, act: Callable[[int], None]) -> None:
    """Call `act` with the number of tokens before the last layer of each pass attends."""
    attend = engine._attention._attend

    def act_and_attend(module: Any, query_1HND: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx == 1:
            act(query_1HND.shape[2])
        return attend(module, query_1HND, *args, **kwargs)

    engine._attention._attend = act_and_attend  # type: ignore[method-assign]


def serve(engine: TransformersEngine) -> list[Generation]:
    for n, prompt in enumerate(PROMPTS):
        engine.add_request(request(n, n % 2, prompt=prompt, max_tokens=8, temperature=1.0))
    replies: dict[int, Generation] = {}
    while engine.has_unfinished():
        for reply in engine.step():
            assert reply.request_id not in replies
            replies[reply.request_id] = reply.generation
    return [replies[n] for n in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(model_dir: Path, adapter_dirs: list[Path]) -> list[Generation]:
    engine = load(model_dir, adapter_dirs[0])
    return serve(engine)


def check(engine: TransformersEngine, expected: list[Generation]) -> None:
    """Check that the tokens and log-probabilities equal those of an engine with enough memory."""
    for served, wanted in zip(serve(engine), expected, strict=True):
        assert served.completion_ids.tolist() == wanted.completion_ids.tolist()
        np.testing.assert_allclose(served.logprobs, wanted.logprobs, atol=1e-4)
        assert served.adapter_version == wanted.adapter_version


@pytest.mark.parametrize(("most_tokens", "most_at_once"), [pytest.param(100, 3, marks=pytest.mark.nightly), (16, 1)])
def test_starved_engine_serves_fewer_requests_at_a_time_alike(
    model_dir: Path, adapter_dirs: list[Path], expected: list[Generation], most_tokens: int, most_at_once: int
) -> None:
    engine = load(model_dir, adapter_dirs[0])
    starve(engine, most_tokens)
    check(engine, expected)
    assert engine.stats().oom_retries >= 1
    assert engine._max_running <= most_at_once
    retries = engine.stats().oom_retries
    check(engine, expected)
    assert engine.stats().oom_retries == retries, "the engine keeps its reduced limit"


@pytest.mark.parametrize("call", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_oom_while_sampling_loses_no_token(
    model_dir: Path, adapter_dirs: list[Path], expected: list[Generation], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sample = iter(range(1, 1000)), embedded_engine.sample

    def sample_or_fail(*args: Any) -> Any:
        if next(calls) == call:
            allocate_too_much()
        return sample(*args)

    engine = load(model_dir, adapter_dirs[0])
    monkeypatch.setattr(embedded_engine, "sample", sample_or_fail)
    check(engine, expected)
    assert engine.stats().oom_retries == 1


def fail(_: int) -> None:
    raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [(lambda _: allocate_too_much(), ModelError, r"engine\.max_model_len"), (fail, RuntimeError, "shapes do not fit")],
    ids=["out of memory", "another error"],
)
def test_single_request_that_fails_ends_the_engine_with_advice_only_if_memory_ran_out(
    model_dir: Path, adapter_dirs: list[Path], fault: Callable[[int], None], error: type[Exception], says: str
) -> None:
    engine = load(model_dir, adapter_dirs[0])
    before_last_layer(engine, fault)
    with pytest.raises(error, match=says):
        serve(engine)
