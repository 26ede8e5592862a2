"""Ranks that each hold a part of the base model, one of which runs out of memory. Real processes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from fakes import runs

pytestmark = pytest.mark.nightly


def test_rank_out_of_memory_ends_run_with_advice_and_no_orphans(
    tmp_path: Path,
) -> None:
    process = runs.start(
        "run",
        runs.write_small(tmp_path),
        "algorithm=fakes.starved_learners:OneRankStarved",
        'learner.devices=["cpu", "cpu"]',
        "learner.shard_base=true",
        "learner.canary_tolerance=1e9",
        "engine.kind=scripted",
        "run.eval_games=0",
    )
    runs.wait_for(lambda: list(tmp_path.glob("outputs/*/*/live.json")))
    children = runs.children_of(process)
    code, out, err = runs.finish(process)
    assert code == 1, out + err
    assert "learner-1: UnstableError: cpu" in err, err
    assert "learner.max_tokens_per_micro_batch" in err and "learner.max_train_len" in err
    assert "Traceback" not in err
    directory = runs.run_directory(tmp_path)
    assert runs.num_updates(tmp_path) == 0

    live = json.loads((directory / "live.json").read_text())
    reported = {worker["name"]: worker["pid"] for worker in live["workers"]}
    assert list(reported) == ["engine-0", "learner", "learner-1"]
    assert set(reported.values()) == {child.pid for child in children}, "each rank is listed with its own process"
    assert runs.are_gone(children)
    assert not any(psutil.pid_exists(pid) for pid in reported.values())
    assert not runs.arenas_named(directory.name)
