"""In mode `sync` a run follows from its seed alone, whether it is killed in between or not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import runs

SYNC = (
    'run.mode="sync"',
    "run.learning_steps=6",
    "run.checkpoint_every=3",
    "run.eval_every=2",
    "run.num_collection_workers=6",
    "engine.threads=1",
    "learner.threads=1",
    "league.opponent_sampling_strategy={ mirror = 0.4, lagged = 0.4, fixed = 0.2 }",
    "league.opponent_lag=[1, 2]",
)
CLOCK_AND_MACHINE = ("(s)", "seconds", "_per_s", "inference/", "arena_bytes")
"""Marks of metrics that are of the clock or the machine, not of the run."""


def figures_of(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_of_the_clock(name)} for line in lines]


def is_of_the_clock(name: str) -> bool:
    return name == "time" or name.endswith("_s") or any(mark in name for mark in CLOCK_AND_MACHINE)


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "league.json").read_text())
    del state["tracker"]["seconds"]
    del state["tracker"]["windows"]  # some are of times; metrics.jsonl has the means of the others
    return state


def test_a_run_that_was_killed_equals_one_that_was_not_bit_for_bit(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    code, out, err = runs.run("run", runs.write_small(whole), *SYNC)
    assert code == 0, out + err
    process = runs.start("run", runs.write_small(broken), *SYNC)
    runs.wait_for(lambda: runs.num_updates(broken) >= 4)
    os.kill(process.pid, signal.SIGKILL)
    runs.finish(process)
    one, other = runs.run_directory(whole), runs.run_directory(broken)
    code, out, err = runs.run("run", "--resume", other)
    assert code == 0, out + err
    assert "going on after update 3" in out
    assert figures_of(other) == figures_of(one)
    for update in (3, 6):
        ours, theirs = (directory / "checkpoints" / f"ckpt-{update}" for directory in (other, one))
        for file in ("adapter_model.safetensors", "learner.safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (update, file)
        assert state_of(ours) == state_of(theirs)
    assert (other / "eval.jsonl").read_text() == (one / "eval.jsonl").read_text()
