"""Engines that lie end the run before a game is played with the wrong weights. Real processes, real training."""

from __future__ import annotations

from pathlib import Path

import pytest

import runs
from unstable_lite.publisher import Canary


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("ServesBase", "engine-0 answered with adapter version 0, asked for 1"),
        ("ServesBaseUnderTheRightName", "answers as the base model where adapter 1 is asked for"),
        ("HotterThanItSays", "engine-0 and the learner disagree about the base model"),
    ],
)
def test_an_engine_that_lies_ends_the_run_and_is_named(tmp_path: Path, engine: str, says: str) -> None:
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


@pytest.mark.parametrize(
    ("mismatch", "base_gap", "engine_to_base", "is_of_the_base"),
    [
        (0.0010, 0.0500, 0.0502, False),
        (0.0500, 0.0500, 0.0010, True),
        (0.0073, 0.0081, 0.0063, False),  # seen in a run: few tokens, and rounding as large as what was learnt
        (0.0060, 0.0070, 0.0015, True),
        (0.0020, 0.0030, 0.0005, False),  # too near to the base for the noise
    ],
)
def test_what_is_nearer_to_the_base_by_rounding_alone_is_not_taken_for_the_base(
    mismatch: float, base_gap: float, engine_to_base: float, is_of_the_base: bool
) -> None:
    canary = Canary(engine="engine-0", n=6, mismatch=mismatch, base_gap=base_gap, engine_to_base=engine_to_base)
    assert canary.is_of_the_base(noise=0.001) is is_of_the_base


def test_weights_that_overflow_are_not_blamed_on_the_engine(tmp_path: Path) -> None:
    code, _, err = runs.run(
        "run", runs.write_small(tmp_path), "run.learning_steps=3", "run.eval_games=0", "learner.learning_rate=1e30"
    )
    assert code == 1
    assert "with adapter 1 log-probabilities are no numbers any more" in err
