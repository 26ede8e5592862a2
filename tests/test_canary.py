"""Engines that lie end the run before a game is played with the wrong weights. Real processes, real training."""

from __future__ import annotations

from pathlib import Path

import pytest

import runs


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("ServesBase", "engine-0 answered with adapter version 0, asked for 1"),
        ("ServesBaseUnderTheRightName", "as if the base answered or the scaling were too small"),
        ("ScalesTwiceAsMuch", "engine-0 does not compute what the learner does with adapter"),
        ("HotterThanItSays", "engine-0 and the learner disagree about the base model"),
        ("HotterWithAdapters", "engine-0 does not compute what the learner does with adapter"),
        ("ServesThePreviousVersion", "engine-0 holds another adapter as version 2 than the learner wrote"),
        ("ServesThePreviousVersionUnderTheRightName", "engine-0 does not compute what the learner does with adapter"),
        ("ReadsADamagedFile", "engine-0 holds another adapter as version 1 than the learner wrote"),
    ],
)
def test_an_engine_that_lies_ends_the_run_and_is_named(tmp_path: Path, engine: str, says: str) -> None:
    code, _, err = runs.run(
        "run",
        runs.write_small(tmp_path),
        f"engine.kind=lying_engines:{engine}",
        "run.learning_steps=6",  # a small difference may need the evidence of several updates
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
