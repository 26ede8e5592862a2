"""Alarms in whole runs with real causes, and each of the three actions."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from fakes import run_files, runs
from unstable_lite.tracking.run_directory import find_damage

CONSTANT = (
    "engine.kind=scripted",
    'engine.replies=["[0][0][0][0][0] \\\\boxed{[0]}"]',
    "engine.max_generation_len=64",
    "algorithm=grpo",
    "run.group_size=4",
    "rewards.reject_zero_signal=true",
    "learner.ppo_epochs=1",
    "learner.batch_size=8",
    "run.eval_games=0",
    "run.num_eval_workers=0",
    "run.checkpoint_every=1000",
    "learner.canary_tolerance=1e9",
    "alarms.mismatch.action=off",
    'alarms.identical={ action = "warn" }',
    'alarms.repetition={ action = "pause", threshold = 0.3 }',
    'alarms.zero_advantage={ action = "stop" }',
)


def test_policy_that_repeats_itself_warns_pauses_and_stops_the_run(tmp_path: Path) -> None:
    process = runs.start_torchless("run", runs.write_small(tmp_path), *CONSTANT, "run.learning_steps=1000")
    runs.wait_for(lambda: any(tmp_path.glob("outputs/*/*/PAUSED")))
    directory = runs.run_directory(tmp_path)
    assert re.search(r"update 3\b.*repetition", (directory / "PAUSED").read_text())
    assert [line["step"] for line in run_files.updates(directory)] == [1, 2, 3]
    assert find_damage(directory / "checkpoints" / "ckpt-3") is None
    (directory / "PAUSED").unlink()
    code, out, err = runs.finish(process)
    assert code == 1
    assert [line["step"] for line in run_files.updates(directory)] == [1, 2, 3, 4, 5]
    assert re.search(r"update 5: identical: 100\.0% of 8 .*95%", out)
    assert re.search(r"(?i)\bpaused\b.*\bupdate 3\b", out)
    assert re.search(r"zero_advantage: 100\.0% of 8\b", err)
    assert f"{directory / 'checkpoints' / 'ckpt-5'}" in err
    assert find_damage(directory / "checkpoints" / "ckpt-5") is None
    assert out.count("update 1: 8 steps of its batch have results that are all alike") == 1
    last = run_files.updates(directory)[-1]
    assert (last["buffer/filled"], last["buffer/rejected"]) == (8, 5 * 3 * 8), "a batch is chosen from four"
    assert {name: last[f"alarms/{name}"] for name in ("identical", "repetition", "zero_advantage", "skipped")} == {
        "identical": 1,
        "repetition": 1,
        "zero_advantage": 1,
        "skipped": 0,
    }


@pytest.mark.nightly
def test_paused_run_that_cannot_save_reports_it(tmp_path: Path) -> None:
    settings, interrupt = (*CONSTANT, "run.learning_steps=1000"), f"3 {signal.SIGSTOP}"
    process = runs.start_torchless("run", runs.write_small(tmp_path), *settings, INTERRUPT=interrupt)
    runs.wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    directory = runs.run_directory(tmp_path)
    in_the_way = directory / "checkpoints" / "ckpt-3" / "in the way"
    in_the_way.mkdir(parents=True)
    process.send_signal(signal.SIGCONT)
    runs.wait_for((directory / "PAUSED").exists)
    text = (directory / "PAUSED").read_text()
    assert re.search(r"Update 3 could NOT be saved\b.*no checkpoint", text)
    in_the_way.rmdir()
    process.send_signal(signal.SIGINT)
    runs.output_of(runs.finish(process))
    assert find_damage(directory / "checkpoints" / "ckpt-3") is None


@pytest.mark.nightly
def test_run_without_steps_pauses_and_can_be_stopped(tmp_path: Path) -> None:
    process = runs.start_torchless(
        "run",
        runs.write_small(tmp_path),
        "engine.kind=scripted",
        'engine.replies=["\\\\boxed{[0 1]}"]',
        "learner.canary_tolerance=1e9",
        "run.eval_games=0",
        "run.num_eval_workers=0",
        "run.filter_opponent_invalid=true",
        'league.fixed_opponents=["fakes.rude_player:Rude"]',
        "league.opponent_sampling_strategy=fixed",
        'alarms.starved={ threshold = 0.5, action = "pause" }',
    )
    runs.wait_for(lambda: any(tmp_path.glob("outputs/*/*/PAUSED")))
    directory = runs.run_directory(tmp_path)
    text = (directory / "PAUSED").read_text()
    assert re.search(r"update 0\b.*starved", text)
    assert "No checkpoint exists yet." in text
    process.send_signal(signal.SIGINT)
    runs.output_of(runs.finish(process))
    assert not (directory / "PAUSED").exists()
    assert run_files.updates(directory) == []


@pytest.mark.nightly
def test_collapsed_run_reports_the_collapse_and_its_best_policy(tmp_path: Path) -> None:
    out = runs.output_of(
        runs.run_torchless(
            "run",
            runs.write_small(tmp_path),
            "learner.learning_rate=100",  # two such steps destroy the base's abilities
            "learner.canary_tolerance=1e9",
            "run.learning_steps=2",
            "run.eval_games=60",
            "run.num_eval_workers=0",
        )
    )
    assert re.search(r"update 2: collapse: .*Nim-v0-train.*scripted:random.*ckpt-2 ", out)
    (collapsed,) = [line for line in out.splitlines() if line.startswith("collapsed: ")]
    assert "base " in collapsed
