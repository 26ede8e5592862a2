"""Alarms that go on in whole runs, for real causes; each of the three actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import runs
from unstable_lite.checkpoints import find_damage

CONSTANT = (
    "engine.kind=scripted",
    'engine.replies=["[0][0][0][0][0] \\\\boxed{[0]}"]',
    "engine.max_generation_len=64",
    "algorithm=grpo",
    "run.group_size=4",
    "learner.ppo_epochs=1",
    "learner.batch_size=8",
    "run.eval_games=0",
    "run.num_eval_workers=0",
    "run.checkpoint_every=1000",
    "learner.canary_tolerance=1e9",
    "alarms.mismatch.action=off",
    "alarms.high_entropy.action=off",
    'alarms.identical={ updates = 1, action = "warn" }',
    'alarms.repetition={ updates = 2, action = "pause", threshold = 0.3 }',
    'alarms.zero_advantage={ updates = 4, action = "stop" }',
)


def updates_of(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "learner/loss" in line]


def test_a_policy_that_always_says_the_same_warns_pauses_and_stops_the_run(tmp_path: Path) -> None:
    process = runs.start("run", runs.write_small(tmp_path), *CONSTANT, "run.learning_steps=1000")
    runs.wait_for(lambda: any(tmp_path.glob("outputs/*/*/PAUSED")))
    directory = runs.run_directory(tmp_path)
    assert "after update 2: repetition: " in (directory / "PAUSED").read_text()
    assert [line["step"] for line in updates_of(directory)] == [1, 2]
    assert find_damage(directory / "checkpoints" / "ckpt-2") is None
    (directory / "PAUSED").unlink()
    code, out, err = runs.finish(process)
    assert code == 1
    assert [line["step"] for line in updates_of(directory)] == [1, 2, 3, 4]
    assert "alarm after update 1: identical: 100.0% of 8 completions are one and the same (over 95%)" in out
    assert "paused after update 2" in out
    assert "going on" in out
    assert "stopped by alarm zero_advantage: 100.0% of 8 steps have an advantage of 0" in err
    assert f"newest checkpoint: {directory / 'checkpoints' / 'ckpt-4'}" in err
    assert find_damage(directory / "checkpoints" / "ckpt-4") is None
    last = updates_of(directory)[-1]
    assert {name: last[f"alarms/{name}"] for name in ("identical", "repetition", "zero_advantage", "skipped")} == {
        "identical": 1,
        "repetition": 1,
        "zero_advantage": 1,
        "skipped": 0,
    }
    code, out, err = runs.run("run", "--resume", directory, "run.learning_steps=5")
    assert code == 0, out + err
    last = updates_of(directory)[-1]
    assert (last["step"], last["alarms/zero_advantage"], last["alarms/repetition"]) == (5, 1, 1)
    assert "alarm update 4: zero_advantage" in out


def test_a_run_that_collapses_says_so_and_which_policy_was_the_best(tmp_path: Path) -> None:
    code, out, err = runs.run(
        "run",
        runs.write_small(tmp_path),
        "learner.learning_rate=1.0",
        "run.learning_steps=5",
        "run.eval_games=60",
        "run.num_eval_workers=0",
    )
    assert code == 0, out + err
    assert "after update 5: collapse: evaluation of Nim-v0-train against scripted:random: ckpt-5 " in out
    (collapsed,) = [line for line in out.splitlines() if line.startswith("collapsed: ")]
    assert "the last policy is worse than the best one" in collapsed
    assert "but base " in collapsed
    assert collapsed.endswith("That is what training started from.")
