"""Engines that lie end the run before a game is played with the wrong weights. Real processes, real training."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import runs

TESTS = str(Path(__file__).parent)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("ServesBase", "engine-0 answered with adapter version 0, asked for 1"),
        ("ServesBaseUnderTheRightName", "answers as the base model where adapter 1 is asked for"),
        ("HotterThanItSays", "engine-0 and the learner disagree about the base model"),
    ],
)
def test_an_engine_that_lies_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, says: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]))
    code, _, err = runs.run(
        "run",
        runs.write_small(tmp_path),
        f"engine.kind=lying_engines:{engine}",
        "run.learning_steps=3",
        "run.eval_games=0",
        "learner.learning_rate=1e-2",
    )
    assert code == 1
    assert says in err


def test_weights_that_overflow_are_not_blamed_on_the_engine(tmp_path: Path) -> None:
    code, _, err = runs.run(
        "run", runs.write_small(tmp_path), "run.learning_steps=3", "run.eval_games=0", "learner.learning_rate=1e30"
    )
    assert code == 1
    assert "with adapter 1 log-probabilities are no numbers any more" in err
