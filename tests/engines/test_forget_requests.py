"""What an engine forgets of a link that was cut: requests, and what they held. All else it is as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_engine import engine_spec, generate, request
from unstable_lite.engines.engine import ReturningEngine, load_engine

IMPORTS_VLLM = pytest.mark.filterwarnings("ignore")
"""Its and its dependencies' own deprecations; other tests have it in a worker's process."""
KINDS = [
    pytest.param(("scripted", "cpu"), id="scripted"),
    pytest.param(("transformers", "cpu"), id="transformers"),
    pytest.param(("vllm", "cpu"), id="vllm", marks=[pytest.mark.vllm, pytest.mark.slow, IMPORTS_VLLM]),
    pytest.param(("transformers", "cuda:0"), id="transformers-cuda", marks=pytest.mark.gpu),
    pytest.param(("vllm", "cuda:0"), id="vllm-cuda", marks=[pytest.mark.gpu, pytest.mark.vllm, IMPORTS_VLLM]),
]


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Any]:
    kind, device = request.param
    spec = engine_spec(
        "",
        device,
        str(model_dir),
        kind=kind,
        replies=["one", "two"],
        max_model_len=256,
        max_parallel_seq=4,
        max_loras=1,
        kv_cache_gb=1,
        gpu_memory_utilization=0.2,
    )
    return load_engine(spec)


def ask(engine: Any, version: int, count: int) -> None:
    for number in range(count):
        prompt = f"of the link that was cut, {number}"
        engine.add_request(request(number, version, prompt=prompt, max_tokens=50, temperature=1.0))


@pytest.mark.parametrize("num_steps", [0, 3])
def test_what_was_asked_before_is_never_answered_and_holds_neither_slot_nor_adapter(
    engine: Any, adapter_dirs: list[Path], num_steps: int
) -> None:
    assert isinstance(engine, ReturningEngine)
    before = generate(engine, 0, 0)
    version = 1 + num_steps
    engine.load_adapter(version, adapter_dirs[0])
    ask(engine, version, count=10)
    answered = [done for _ in range(num_steps) for done in engine.step()]
    assert engine.has_unfinished() or answered
    engine.forget_requests()
    assert not engine.has_unfinished()
    engine.unload_adapter(version)
    assert engine.stats().running == 0
    # The same ids, and more of them than run at once.
    after = generate(engine, *[0] * 10)
    for one, same in zip(before, after, strict=False):
        assert one.prompt_ids.tolist() == same.prompt_ids.tolist()
        assert one.completion_ids.tolist() == same.completion_ids.tolist()
