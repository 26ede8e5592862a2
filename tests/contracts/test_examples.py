"""Every shipped example loads, and every script runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakes import gpus
from unstable_lite.planning.plan import load_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted({*EXAMPLES.glob("*.py")} - {EXAMPLES / "make_tiny_model.py", EXAMPLES / "minimal_loop.py"})
"""Scripts that start a run; making the model takes 20 minutes and has its own tests in models/test_tiny_model.py."""
GPUS = {"selfplay_gpu": (3, 48), "selfplay_24gb": (1, 24)}
"""Number of GPUs that an example is for, and the memory of each in GiB."""


@pytest.mark.nightly
@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: path.name)
def test_every_example_toml_can_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "not called by a check")
    if path.stem in GPUS:
        gpus.install(monkeypatch, tmp_path, *GPUS[path.stem])
    assert not [text for name, text in load_plan(path).describe() if name == "warning"]


@pytest.mark.nightly
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_example_script_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, path, "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "adapter: " in done.stdout


def test_minimal_loop_plays_learns_and_evaluates() -> None:
    small = ("--updates", "2", "--games", "6", "--batch-size", "20", "--eval-games", "4")
    done = subprocess.run([sys.executable, EXAMPLES / "minimal_loop.py", *small], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    before, first, second, after = done.stdout.splitlines()
    assert before.startswith("before: ") and after.startswith("after: ")
    assert first.startswith("update 1: ") and second.startswith("update 2: ")
    assert "gradient norm 0.00" not in done.stdout
