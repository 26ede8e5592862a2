"""`check` names what this machine lacks for a config, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import gpus, runs
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.planning import machine
from unstable_lite.planning.plan import make_plan

ENV = '[[train_envs]]\nenv_id = "TicTacToe-v0-train"\nnum_players = 2\nnum_actors = 2\nprompt_template = "tiny"\n'


def check(directory: Path, cuda: str) -> tuple[int, str]:
    """Run `check` where torch is built for this version of CUDA; return exit status and output."""
    torch = directory / "packages" / "torch"
    torch.mkdir(parents=True, exist_ok=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text(f"from typing import Optional\ncuda: Optional[str] = {cuda!r}\n")
    (directory / "run.toml").write_text(f'[engine]\nkind = "transformers"\n{ENV}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(torch.parent))
        code, out, err = runs.run("check", directory / "run.toml")
    return code, out + err


def test_driver_that_is_too_old_for_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.install(monkeypatch, tmp_path, 1, driver="550.54.15")
    code, text = check(tmp_path, "13.0")
    assert code == 1 and "driver 550.54.15" in text and "580" in text
    assert check(tmp_path, "12.8")[0] == 0


def test_shared_memory_that_cannot_hold_the_adapters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}]
    config = Config.model_validate(
        {"model_name": "Qwen/Qwen3-1.7B", "engine": {"kind": "transformers"}, "train_envs": envs}
    )
    gpus.install(monkeypatch, tmp_path, 1, gib=80)
    make_plan(config)
    monkeypatch.setattr(machine, "SHARED_MEMORY", Path("/sys"))  # a file system of size 0
    with pytest.raises(ConfigError, match=r"/sys has 0 MB.*--shm-size=\d+g"):
        make_plan(config)
    cpu = {"devices": ("cpu",)}
    on_cpu = {"model_name": "builtin:tiny", "engine": {"kind": "transformers"} | cpu, "learner": cpu}
    make_plan(Config.model_validate(on_cpu | {"train_envs": envs}))
