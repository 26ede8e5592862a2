"""Engines that serve wrong weights end the run before a game uses them. Real processes, real training."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes import runs
from unstable_lite.dashboards.run_directory import list_runs


@pytest.mark.parametrize(
    ("run", "engine", "says"),
    [
        (runs.run_torchless, "ServesBase", r"engine-0 .* 0\b.* 1\b"),
        *(
            pytest.param(run, engine, says, marks=pytest.mark.nightly)
            for run, engine, says in [
                (runs.run_torchless, "ServesThePreviousVersion", r"engine-0 .*adapter.* version 2\b"),
                (runs.run, "HotterThanItSays", "engine-0 .*learner.* base"),
                (runs.run, "ServesBaseUnderTheRightName", "base .*scaling"),
                (runs.run, "ScalesTwiceAsMuch", "engine-0 .*learner.* adapter"),
                (runs.run, "ServesThePreviousVersionUnderTheRightName", "engine-0 .*learner.* adapter"),
            ]
        ),
    ],
)
def test_faulty_engine_ends_the_run_and_is_named(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]], engine: str, says: str
) -> None:
    """A wrong version or digest needs no learner's log-probabilities."""
    code, _, err = run(
        "run",
        runs.write_small(tmp_path),
        f"engine.kind=fakes.lying_engines:{engine}",
        "run.learning_steps=6",  # a small difference may need the evidence of several updates
        "run.eval_games=0",
        "learner.learning_rate=1e-2",
        # Rounding in bfloat16 may bring more evidence for another suspicion.
        f"learner.dtype={'float32' if 'scaling' in says else 'auto'}",
    )
    assert code == 1
    assert re.search(says, err), err
    assert [entry.state for entry in list_runs(tmp_path / "outputs")] == ["failed"]


@pytest.mark.nightly
def test_overflowing_weights_are_not_blamed_on_the_engine(tmp_path: Path) -> None:
    code, _, err = runs.run(
        "run", runs.write_small(tmp_path), "run.learning_steps=3", "run.eval_games=0", "learner.learning_rate=1e30"
    )
    assert code == 1
    assert re.search(r"adapter 1\b.*log-probabilities", err), err
