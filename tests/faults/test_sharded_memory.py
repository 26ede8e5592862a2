"""Ranks that each hold a part of the base, one of which runs out of memory: nobody can begin anew. Real processes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

import runs


def test_a_rank_that_runs_out_of_memory_ends_the_run_with_what_to_lower_and_leaves_nobody_behind(
    tmp_path: Path,
) -> None:
    process = runs.start(
        "run",
        runs.write_small(tmp_path),
        "algorithm=starved_learners:OneRankStarved",
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
    assert "learner-1: UnstableError: cpu, which holds a part of the base, is out of memory" in err, err
    assert "lower learner.max_tokens_per_micro_batch, or lower learner.max_train_len" in err
    assert "Traceback" not in err
    directory = runs.run_directory(tmp_path)
    assert runs.num_updates(tmp_path) == 0

    live = json.loads((directory / "live.json").read_text())
    told = {worker["name"]: worker["pid"] for worker in live["workers"]}
    assert list(told) == ["engine-0", "learner", "learner-1"]
    assert set(told.values()) == {child.pid for child in children}, "each rank is shown as the process that it is"
    assert runs.are_gone(children)
    assert not any(psutil.pid_exists(pid) for pid in told.values())
    assert not runs.arenas_named(directory.name)
