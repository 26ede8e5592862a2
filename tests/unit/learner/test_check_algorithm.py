"""`check` finds the mistakes of a custom algorithm, which a run finds only in the learner's process."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unstable_lite.cli.app import app

ROOT = Path(__file__).parents[3]
MODULE = """
class Whole:
    def __init__(self, config, device, weight: float = 1.0): ...
    def update(self, items, version): ...

class Empty:
    def __init__(self, config, device): ...
"""


@pytest.mark.parametrize(
    ("learner", "options", "said"),
    [
        ("Whole", "learner.options={ weight = 0.5 }", "quickstart.toml can run"),
        ("Whole", "learner.options={ wieght = 0.5 }", "unknown keyword 'wieght'; did you mean 'weight'?"),
        ("Empty", "learner.options={}", "the class Empty has no update"),
        ("Missing", "learner.options={}", "has no 'Missing'"),
    ],
)
def test_custom_algorithm_is_checked(tmp_path, monkeypatch, learner, options, said):
    name = f"algorithm_{uuid.uuid4().hex}"  # another module for each case, because Python keeps the first
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = str(ROOT / "examples" / "quickstart.toml")
    result = CliRunner().invoke(app, ["check", config, f"algorithm={name}:{learner}", options])
    assert said in " ".join(result.output.split())
    assert (result.exit_code == 0) == ("can run" in said)
    assert "learning_rate" not in result.output
