"""Check that a run with a sync schedule depends on its seed alone, even if it is killed and resumed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from fakes import runs

SYNC = (
    'run.schedule="sync"',
    "run.learning_steps=6",
    "run.checkpoint_every=3",
    "run.eval_every=2",
    "run.eval_games=24",
    "run.num_collection_workers=6",
    "engine.threads=1",
    "learner.threads=1",
    "league.opponent_sampling_strategy={ mirror = 0.4, lagged = 0.4, fixed = 0.2 }",
    "league.opponent_lag=[1, 2]",
)
CLOCK_AND_MACHINE = ("(s)", "seconds", "_per_s", "inference/", "arena_bytes")
"""Name parts of metrics that depend on the clock or the machine."""


def deterministic_metrics(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_of_the_clock(name)} for line in lines]


def is_of_the_clock(name: str) -> bool:
    return name == "time" or name.endswith("_s") or any(mark in name for mark in CLOCK_AND_MACHINE)


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "league.json").read_text())
    del state["tracker"]["seconds"]
    # Some windows hold times; metrics.jsonl has the means of the others.
    del state["tracker"]["windows"]
    return state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an uninterrupted run."""
    tmp_path = tmp_path_factory.mktemp("whole")
    code, out, err = runs.run("run", runs.write_small(tmp_path), *SYNC)
    assert code == 0, out + err
    return runs.run_directory(tmp_path)


@pytest.mark.parametrize(
    ("checkpoint_every", "reached", "signum", "resumed_from"),
    [
        pytest.param(3, "update 4", signal.SIGKILL, 3, id="killed between two checkpoints"),
        pytest.param(
            *(2, "update 5", signal.SIGKILL, 4),
            id="killed after an evaluation that a checkpoint was beside",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(3, "update 2", signal.SIGINT, 2), id="stopped in an evaluation without one", marks=pytest.mark.nightly
        ),
        pytest.param(*(3, "ckpt-6", signal.SIGKILL, 6), id="killed in the last evaluation", marks=pytest.mark.nightly),
    ],
)
def test_interrupted_sync_run_equals_uninterrupted_one_bit_for_bit(
    whole: Path, tmp_path: Path, checkpoint_every: int, reached: str, signum: signal.Signals, resumed_from: int
) -> None:
    process = runs.start("run", runs.write_small(tmp_path), *SYNC, f"run.checkpoint_every={checkpoint_every}")
    if reached.startswith("ckpt"):
        runs.wait_for(lambda: any(tmp_path.glob(f"outputs/*/*/checkpoints/{reached}")))
    else:
        runs.wait_for(lambda: runs.num_updates(tmp_path) >= int(reached.removeprefix("update ")))
    process.send_signal(signum)
    _, out, _ = runs.finish(process)
    assert ("broken off" in out) == (signum == signal.SIGINT)
    broken = runs.run_directory(tmp_path)
    code, out, err = runs.run("run", "--resume", broken)
    assert code == 0, out + err
    assert re.search(rf"\bafter update {resumed_from}\b", out)
    assert deterministic_metrics(broken) == deterministic_metrics(whole)
    for update in {3, 6} if checkpoint_every == 3 else {6}:
        ours, theirs = (directory / "checkpoints" / f"ckpt-{update}" for directory in (broken, whole))
        for file in ("adapter_model.safetensors", "learner.safetensors"):
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (update, file)
        assert state_of(ours) == state_of(theirs)
    assert (broken / "eval.jsonl").read_text() == (whole / "eval.jsonl").read_text()


@pytest.mark.nightly
def test_sleeping_engines_change_nothing_in_a_sync_run(whole: Path, tmp_path: Path) -> None:
    code, out, err = runs.run("run", runs.write_small(tmp_path), *SYNC, "engine.when_shared=sleep")
    assert code == 0, out + err
    sleeper = runs.run_directory(tmp_path)
    assert '"inference/asleep_s"' in (sleeper / "metrics.jsonl").read_text()
    ours, theirs = (directory / "checkpoints" / "ckpt-6" for directory in (sleeper, whole))
    for file in ("adapter_model.safetensors", "learner.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    assert (sleeper / "eval.jsonl").read_text() == (whole / "eval.jsonl").read_text()


def test_finished_run_is_not_resumed(whole: Path) -> None:
    code, _, err = runs.run("run", "--resume", whole)
    assert (code, "6 updates" in err) == (1, True)
