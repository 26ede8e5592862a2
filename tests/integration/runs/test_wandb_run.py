"""Weights & Biases: whole runs whose records are read from W&B's own files, without a network."""

import json
import os
import shutil
import signal
import tomllib
from pathlib import Path

import pytest
import yaml

from fakes import runs
from fakes.wandb_runs import agent_command, offline_runs
from unstable_lite.tracking.wandb import IDENTITY, WandbSink

PAGE = Path(__file__).parents[3] / "docs" / "sweeps.md"
FAULTY = 'rewards.final_reward_transformation=["fakes.failing_transform:Transform"]'
"""Override that ends a run after its first evaluation."""
TO_WANDB = "tracker.wandb_project=tests"
POINTS = "points_Nim_v0_train_scripted_random"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.nightly
def test_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    settings = (*runs.SCRIPTED, TO_WANDB, "run.learning_steps=10000", "run.eval_games=0")
    process = runs.start_torchless("run", runs.write_small(tmp_path), *settings)
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 20 and any(tmp_path.glob("outputs/*/*/checkpoints/ckpt-*")))
    os.kill(process.pid, signal.SIGKILL)
    runs.finish(process)
    first = runs.run_directory(tmp_path)
    identity = json.loads((first / IDENTITY).read_text())
    moved = Path(shutil.move(first, tmp_path / "moved"))
    newest = max(int(path.name.removeprefix("ckpt-")) for path in moved.glob("checkpoints/ckpt-*"))
    runs.output_of(runs.run_torchless("run", "--resume", moved, f"run.learning_steps={newest + 2}", "run.eval_games=4"))
    before, after = offline_runs(moved)
    assert identity == {"entity": None, "project": "tests", "id": before.id}
    assert json.loads((moved / IDENTITY).read_text()) == identity
    assert (after.id, after.project) == (before.id, "tests")
    assert (before.exit_code, after.exit_code) == (None, 0)
    trained = [[line["learner/step"] for line in run.history if "learner/loss" in line] for run in (before, after)]
    assert trained[0] == list(range(1, len(trained[0]) + 1))  # the newest ones may die with the process
    assert trained[0]
    assert trained[1] == [newest + 1, newest + 2]
    assert after.values(POINTS) == after.values("evaluation-Nim-v0-train (scripted:random)/checkpoint Points")
    assert len(after.values(POINTS)) == 1


@pytest.mark.nightly
def test_run_of_a_sweep_agent_has_its_values_its_id_and_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start a run by the sweep of docs/sweeps.md, with the command and environment that `wandb agent` gives it."""
    sweep = yaml.safe_load(PAGE.read_text().partition("```yaml\n")[2].partition("```")[0])
    values = {name: allowed["values"][-1] for name, allowed in sweep["parameters"].items()}
    chosen = tmp_path / "config.yaml"
    chosen.write_text(yaml.safe_dump({"wandb_version": 1, **{name: {"value": each} for name, each in values.items()}}))
    environment = {"PROJECT": "of-the-sweep", "SWEEP_ID": "sweep1", "RUN_ID": "run1", "SWEEP_PARAM_PATH": str(chosen)}
    for name, value in environment.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    python, _, _, command, config, *rest = agent_command(sweep, values)
    assert (python, command, config) == ("python", "run", "examples/quickstart.toml")
    code, out, err = runs.run_torchless("run", runs.write_small(tmp_path), *runs.SCRIPTED, *rest, FAULTY)
    assert code == 1 and "failing_transform" in err, out + err
    (run,) = offline_runs(runs.run_directory(tmp_path))
    assert (run.id, run.project, run.exit_code) == ("run1", "of-the-sweep", 1)
    own = tomllib.loads((runs.run_directory(tmp_path) / "config.toml").read_text())
    for name, value in values.items():
        section, _, key = name.partition(".")
        assert own[section][key] == run.config[section][key] == run.config[name] == value
    assert sweep["metric"] == {"name": POINTS, "goal": "maximize"}
    assert 0 <= run.values(POINTS)[-1] <= 1


def test_wandb_prints_no_metrics_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sink = WandbSink("tests", tmp_path, {})
    sink.log(1, {"run/alarms": 2.0})
    sink.close()
    printed = "".join(capfd.readouterr())
    assert "wandb sync" in printed and "alarms" not in printed
    # W&B's own process may write its file a moment later.
    runs.wait_for(lambda: [run.values("run/alarms") for run in offline_runs(tmp_path)] == [[2.0]])


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        pytest.param({"HOME": "/nonexistent"}, "No API key configured", id="not logged in"),
        pytest.param(
            {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"},
            "127.0.0.1:9",
            id="no network",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_wandb_that_cannot_be_used_is_one_message(
    environment: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WANDB_MODE": "online", "WANDB_CONFIG_DIR": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    code, _, err = runs.run("run", runs.write_small(tmp_path), TO_WANDB)
    (message,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and "Traceback" not in err
    assert reason in message
    assert all(remedy in message for remedy in ("wandb login", "WANDB_MODE=offline", 'tracker.wandb_project=""'))


@pytest.mark.nightly
def test_damaged_identity_is_one_message_and_names_the_file(finished_run: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(finished_run, tmp_path / "run", symlinks=True)
    (directory / IDENTITY).write_text('{"project": 7}')
    code, _, err = runs.run("run", "--resume", directory, TO_WANDB, "run.learning_steps=4")
    assert code == 1 and "Traceback" not in err
    assert f"delete {directory / IDENTITY}" in err
