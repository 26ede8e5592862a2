"""`run.mode = "sleep"`: engine and learner take turns on one device, and an engine is tried before it plays again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runs


def train(directory: Path, engine: str, *overrides: str) -> tuple[int, str, str]:
    kind = f"engine.kind=sleeping_engines:{engine}"
    return runs.run("run", runs.write_small(directory), "run.mode=sleep", "run.eval_games=0", kind, *overrides)


def diary(directory: Path) -> list[str]:
    return [json.loads(line) for line in (directory / "outputs" / "diary.jsonl").read_text().splitlines()]


def alarms(directory: Path) -> str:
    return (runs.run_directory(directory) / "alarms.jsonl").read_text()


def test_games_wait_while_the_learner_learns_and_an_engine_that_wakes_is_tried_first(tmp_path: Path) -> None:
    code, out, err = train(tmp_path, "KeepsADiary")
    assert code == 0, err
    did = diary(tmp_path)
    assert '"inference/asleep_s"' in (runs.run_directory(tmp_path) / "metrics.jsonl").read_text()
    assert runs.num_updates(tmp_path) == did.count("sleep") == did.count("wake") == 3
    for start in (index for index, what in enumerate(did) if what == "sleep"):
        assert did[start + 1] == "wake"  # nothing is asked of it meanwhile, and nothing loaded
        assert did[:start].count("request") == did[:start].count("answer")  # what was asked before is answered
    assert "void" not in out or "0 void" in out


def test_an_engine_that_forgets_its_adapters_in_its_sleep_ends_the_run(tmp_path: Path) -> None:
    code, _, err = train(tmp_path, "ForgetsInItsSleep", "learner.learning_rate=1e-2")
    assert code == 1
    assert "engine-0 holds another adapter as version 1 than the learner wrote" in err
    assert ", changed since" in err


def test_an_engine_that_dies_in_its_sleep_starts_again_after_the_learners_turn(tmp_path: Path) -> None:
    changes = ("run.restart_backoff_s=0", "algorithm=slow_learners:TakesItsTime", "run.learning_steps=1")
    code, _, err = train(tmp_path, "DiesInItsSleep", *changes)
    assert code == 0, err
    assert runs.num_updates(tmp_path) == 1
    assert [what for what in diary(tmp_path) if what in ("start", "sleep", "learnt")] == [
        "start",
        "sleep",
        "learnt",
        "start",
    ]
    assert "It is started again (1 of 5)" in alarms(tmp_path)


def test_the_learners_turn_is_no_time_of_games(tmp_path: Path) -> None:
    changes = ("algorithm=slow_learners:TakesFourSeconds", "run.game_timeout_s=3", "run.learning_steps=2")
    code, _, err = train(tmp_path, "KeepsADiary", *changes)
    assert code == 0, err
    assert runs.num_updates(tmp_path) == 2
    assert '"void"' not in (runs.run_directory(tmp_path) / "games.jsonl").read_text()


def test_an_engine_that_cannot_sleep_is_refused_before_the_first_game(tmp_path: Path) -> None:
    code, _, err = train(tmp_path, "NeverSleeps")
    assert code == 1
    assert "run.mode = 'sleep': NeverSleeps has no sleep() and wake_up()" in err


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["share", "sleep", "sync"])
@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_one_gpu_is_enough_for_a_run(tmp_path: Path, mode: str, kind: str) -> None:
    on_it = (f"run.mode={mode}", f"engine.kind={kind}", "engine.devices=[0]", "learner.devices=[0]")
    code, out, err = runs.run("run", runs.write_small(tmp_path), *on_it)
    assert code == 0, out + err
    assert runs.num_updates(tmp_path) == 3
