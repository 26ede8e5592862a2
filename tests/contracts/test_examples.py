"""Every shipped example loads, and every script runs."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import gpus, random_models, runs
from fakes.handmade_adapters import fitting, write_adapter
from unstable_lite.cli.runs import EXAMPLES as NEW
from unstable_lite.cli.runs import write
from unstable_lite.files import read_records
from unstable_lite.planning.plan import load_plan
from unstable_lite.tracking.run_directory import to_toml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OTHERS = ("branching", "export_csv", "make_tiny_model", "minimal_loop", "verifiers_env", "verifiers_guess")
SCRIPTS = sorted({*EXAMPLES.glob("*.py")} - {EXAMPLES / f"{name}.py" for name in OTHERS})
"""Scripts that start a run; the others have tests of their own."""
WITH_TORCH = ("build", "custom_algorithm", "eligibility_mask")
"""Scripts that run with the real learner; the others change nothing in it."""
TORCHLESS = """
import runpy, sys
from pathlib import Path
from fakes import numpy_learner

numpy_learner.use()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Program that runs the script named by its first argument, as Python does, with the learner without torch."""
STUDIES = sorted((EXAMPLES / "studies").glob("*.toml"))
"""Studies, which tests/integration/bench/test_study.py reads."""
NAMES = {files[0]: name for name, files in NEW.items()}
"""Name by which `new` writes a config."""
CONFIGS = sorted({*EXAMPLES.rglob("*.toml")} - {*STUDIES, EXAMPLES / "verifiers.toml"})
"""Configs of runs; tests/integration/games/test_verifiers_env.py runs the other one, with the extra `verifiers`."""
GPUS = {"selfplay_gpu": (3, 48), "selfplay_24gb": (1, 24), "exploitability_of_a_model": (1, 24)}
"""Number of GPUs that an example is for, and the memory of each in GiB."""


@pytest.mark.nightly
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_toml_can_run(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "not called by a check")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if path.name in NAMES:
        path = write(NAMES[path.name], Path())[0]
    write_victim(tmp_path / "victim")  # of one example
    monkeypatch.setattr("unstable_lite.games.players.blind.best_preferences", lambda *_: ())  # a long search
    if path.stem == "smollm2":
        random_models.replace_smollm2(tmp_path, monkeypatch)
    if path.stem in GPUS:
        gpus.install(monkeypatch, tmp_path, *GPUS[path.stem])
    rows = load_plan(path).describe()
    assert rows
    if path.stem in GPUS:
        assert not [text for name, text in rows if name == "warning" and "engine.max_loras" in text]


def write_victim(directory: Path) -> None:
    """Write the run with one evaluated checkpoint that the exploiter plays against."""
    write_adapter(directory / "checkpoints" / "ckpt-5", fitting("builtin:tiny"), base="builtin:tiny")
    env = {"env_id": "Nim-v0-train", "num_players": 2, "fixed_opponent": "base"}
    (directory / "config.toml").write_text(to_toml({"eval_envs": [env]}))
    line = {"label": "after", "model": "ckpt-5", "env_id": env["env_id"], "opponent": "base", "points": 0.5}
    (directory / "eval.jsonl").write_text(json.dumps(line | {"mean_reward": 0.0}) + "\n")


@pytest.mark.nightly
def test_exploiter_plays_its_victim_alone(tmp_path):
    write_victim(tmp_path / "victim")
    few = ("run.learning_steps=2", "run.eval_games=4", "run.num_collection_workers=12", "learner.batch_size=24")
    command = runs.command("run", EXAMPLES / "exploiter.toml", *few, module=runs.TORCHLESS)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=runs.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    (games,) = (tmp_path / "outputs").glob("*/*/games.jsonl")
    trained = [game for game in read_records(games) if game["kind"] == "train"]
    assert {agent.get("opponent") for game in trained for agent in game["agents"]} == {None, "run:victim/best"}


@pytest.mark.nightly
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_example_script_runs(path, tmp_path):
    start = [sys.executable] if path.stem in WITH_TORCH else [sys.executable, "-c", TORCHLESS]
    done = subprocess.run([*start, path, "2"], cwd=tmp_path, capture_output=True, text=True, env=runs.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "adapter: " in done.stdout


def test_minimal_loop_plays_learns_and_evaluates(monkeypatch, capsys):
    small = ("--updates", "2", "--games", "6", "--batch-size", "20", "--eval-games", "4")
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / "minimal_loop.py"), *small])
    runpy.run_path(sys.argv[0], run_name="__main__")
    out = capsys.readouterr().out
    before, first, second, after = out.splitlines()
    assert before.startswith("before: ") and after.startswith("after: ")
    assert first.startswith("update 1: ") and second.startswith("update 2: ")
    assert "gradient norm 0.00" not in out
