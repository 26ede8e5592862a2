"""Every example that is shipped loads; every script runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unstable_lite.plan import load_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: path.name)
def test_every_example_toml_can_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "not called by a check")
    elsewhere = ('engine.devices=["cpu"]', 'learner.devices=["cpu"]')
    assert load_plan(path, elsewhere if "gpu" in path.stem else ()).describe()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_script_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, path, "2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "adapter: " in done.stdout
