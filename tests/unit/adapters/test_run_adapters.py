"""The best checkpoint of a run, by the evaluations on all of its eval envs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.adapters.run_adapters import find_saved
from unstable_lite.errors import ConfigError
from unstable_lite.tracking.run_directory import to_toml

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "fixed_opponent": "scripted:random"}


def write_run(directory: Path, *eval_envs: dict[str, Any]) -> Path:
    """Write a run whose ckpt-2 is better than ckpt-1 if greedy evaluations count, too."""
    (directory / "config.toml").write_text(to_toml({"eval_envs": list(eval_envs)}))
    lines = [
        {"model": model, "label": "after", "env_id": "Nim-v0-train", "opponent": opponent, "points": points}
        for model, opponent, points in (
            ("ckpt-1", "scripted:random", 0.6), ("ckpt-1", "scripted:random, greedy", 0.1),
            ("ckpt-2", "scripted:random", 0.5), ("ckpt-2", "scripted:random, greedy", 0.9),
        )
    ]  # fmt: skip
    (directory / "eval.jsonl").write_text("".join(json.dumps(line | {"mean_reward": 0.0}) + "\n" for line in lines))
    for number in (1, 2):
        (directory / "checkpoints" / f"ckpt-{number}").mkdir(parents=True)
    return directory


def test_best_checkpoint_is_that_over_all_samplings(tmp_path: Path) -> None:
    run = write_run(tmp_path, NIM, NIM | {"temperature": 0.0, "error_allowance": 1, "key_of_another_version": 1})
    assert find_saved(f"{run}/best").name == "ckpt-2"


@pytest.mark.parametrize("env", [NIM | {"temperature": "x"}, {"env_id": "Nim-v0-train"}, {}, 3])
def test_damaged_config_of_a_run_is_named(tmp_path: Path, env: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml is not the config of a run"):
        find_saved(f"{write_run(tmp_path, env)}/best")
