"""Opponents of an evaluation that its config names: each is read once, and all that cannot be found are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.handmade_adapters import fitting, small, write_adapter
from unstable_lite.adapters.frozen import FrozenAdapter, find_adapter
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation import models
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.tracking.run_directory import to_toml

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "prompt_template": "tiny"}
TICTACTOE = NIM | {"env_id": "TicTacToe-v0-train"}
TINY = "builtin:tiny"


def write_config(directory: Path, *opponents: str) -> Path:
    """Write a config that evaluates against these opponents, each in two envs."""
    envs = [env | {"fixed_opponent": name} for name in opponents for env in (NIM, TICTACTOE)]
    league = {"opponent_sampling_strategy": "mirror"}
    config = Config.model_validate({"train_envs": [NIM | {"num_actors": 1}], "eval_envs": envs, "league": league})
    path = directory / "config.toml"
    path.write_text(to_toml(config.model_dump(mode="json")))
    return path


def test_opponent_of_several_envs_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rival = f"adapter:{write_adapter(tmp_path / 'rival', fitting(TINY, 1), base=TINY)}"
    trained = [str(write_adapter(tmp_path / str(n), fitting(TINY, n + 2), base=TINY)) for n in range(2)]
    read: list[str] = []

    def find_and_count(name: str, *copies: Path | None) -> FrozenAdapter:
        read.append(name)
        return find_adapter(name, *copies)

    monkeypatch.setattr(models, "find_adapter", find_and_count)
    config = write_config(tmp_path, rival, "scripted:random")
    plan = plan_evaluation(trained, output=tmp_path / "out", config=config)
    assert sum(cell.opponent.name == rival for cell in plan.cells) == 4
    assert read == [rival]


def test_arguments_of_the_trained_env_are_not_those_of_another(tmp_path: Path) -> None:
    env = NIM | {"num_actors": 1, "env_kwargs": {"piles": [2, 3]}, "error_allowance": 2}
    path = tmp_path / "config.toml"
    path.write_text(to_toml(Config.model_validate({"train_envs": [env]}).model_dump(mode="json")))
    of_env = {}
    for env_id in ("Nim-v0-train", "TicTacToe-v0-train"):
        plan = plan_evaluation(
            ["base"], output=tmp_path, config=path, envs=[f"{env_id}:2"], opponents=["scripted:random"]
        )
        (of_env[env_id],) = ((cell.env.env_kwargs, cell.env.error_allowance) for cell in plan.cells)
    assert of_env == {"Nim-v0-train": ((("piles", (2, 3)),), 2), "TicTacToe-v0-train": ((), 0)}


def test_prompts_are_those_of_the_run_of_the_models_or_of_the_config(tmp_path: Path) -> None:
    trained = str(write_adapter(tmp_path / "run" / "checkpoints" / "ckpt-1", fitting(TINY), base=TINY))
    config = write_config(tmp_path / "run", "scripted:random")
    other = write_config(tmp_path, "scripted:random")
    assert plan_evaluation([trained], output=tmp_path / "out").run == tmp_path / "run"
    assert plan_evaluation([trained], output=tmp_path / "out", config=other).run == tmp_path / "run"
    assert plan_evaluation(["base"], output=tmp_path / "out", config=config).run == tmp_path / "run"
    assert plan_evaluation(["base"], output=tmp_path / "out", config=other).run is None


def test_settings_of_earlier_results_are_those_of_templates_without_new_keys(tmp_path: Path) -> None:
    path = write_config(tmp_path, "scripted:random")
    path.write_text(path.read_text() + '[templates.mine]\nuser = "{observation}"\n')
    made = plan_evaluation(["base"], output=tmp_path / "out", config=path).settings["templates"]["mine"]
    assert set(made) == {"user", "system", "assistant", "chat", "thinking", "stop", "zero_sum"}


def test_every_opponent_that_is_not_found_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, f"adapter:{tmp_path}/nowhere", f"run:{tmp_path}/none/best", "scripted:random")
    trained = str(write_adapter(tmp_path / "trained", small()))
    with pytest.raises(ConfigError) as caught:
        plan_evaluation([trained], output=tmp_path / "out", config=config)
    absent, no_run = caught.value.problems
    assert "nowhere" in absent and "not a run directory" in no_run
