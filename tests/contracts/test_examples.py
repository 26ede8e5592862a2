"""Every example that is shipped loads; every script runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from unstable_lite.plan import load_plan

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()


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


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_the_readmes_first_screen_has_both_commands() -> None:
    first_screen = README.splitlines()[:25]
    assert any(
        "pip install -e '.[cpu]' && python -m unstable_lite run examples/quickstart.toml" in x for x in first_screen
    )
    assert any("pip install -e '.[cpu,test]' && pytest" in x for x in first_screen)


def test_the_readmes_python_blocks_run(tmp_path: Path) -> None:
    blocks = _blocks("python")
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, block + done.stderr


def test_the_readmes_toml_blocks_can_run(tmp_path: Path) -> None:
    for index, block in enumerate(_blocks("toml")):
        path = tmp_path / f"{index}.toml"
        path.write_text(block)
        load_plan(path)


def test_the_readmes_commands_name_files_and_commands_that_exist(tmp_path: Path) -> None:
    commands = [line for block in _blocks("bash") for line in block.splitlines() if "unstable_lite " in line]
    assert commands
    for line in commands:
        words = shlex.split(line.partition("#")[0].split("&&")[-1])
        words = words[words.index("unstable_lite") + 1 :]
        listed = subprocess.run(
            [sys.executable, "-m", "unstable_lite", "--help"], capture_output=True, text=True
        ).stdout
        assert words[0] in listed, line
        for word in words:
            if word.startswith("examples/"):
                assert (ROOT / word).is_file(), line
