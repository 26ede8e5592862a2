"""Merged copies and low-rank terms are two ways to compute one adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import unstable_lite.engines.transformers
from remote_engine import engine_spec, generate
from unstable_lite.engines.transformers import TransformersEngine


@pytest.fixture(params=["float32", "bfloat16"])
def engines(
    request: pytest.FixtureRequest, model_dir: Path, adapter_dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, TransformersEngine]]:
    engines = {}
    for how, limit in (("merged copies", 1 << 30), ("low-rank terms", 0)):
        monkeypatch.setattr(unstable_lite.engines.transformers, "MERGED_BYTES", limit)
        spec = engine_spec(model=str(model_dir), kind="transformers", max_model_len=128, dtype=request.param)
        engine = engines[how] = TransformersEngine(spec)
        assert engine.facts["adapters"] == how
        for version, path in enumerate(adapter_dirs, start=1):
            engine.load_adapter(version, path)
    yield engines


def test_both_ways_sample_from_one_distribution(engines: dict[str, TransformersEngine]) -> None:
    merged, low_rank = (generate(engine, 0, 1, 2, 1, 2, 0, 2) for engine in engines.values())
    is_exact = engines["merged copies"].facts["dtype"] == "float32"
    for first, second in zip(merged, low_rank, strict=True):
        same = first.completion_ids[: len(second.completion_ids)] == second.completion_ids[: len(first.completion_ids)]
        shared = len(same) if same.all() else int(same.argmin())
        assert shared == len(first.completion_ids) or not is_exact
        np.testing.assert_allclose(first.logprobs[:shared], second.logprobs[:shared], atol=1e-4 if is_exact else 0.3)


def test_an_unloaded_version_leaves_nothing_behind(engines: dict[str, TransformersEngine]) -> None:
    for engine in engines.values():
        engine.unload_adapter(1)
        held = {version for layer in engine._lora._layers.values() for version in (*layer.merged, *layer.low_rank)}
        assert held - {0} == {2}
