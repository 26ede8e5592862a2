"""`check` names what this machine lacks for a config, and envs that do not start, before anything starts."""

import re
from pathlib import Path
from typing import Any

import pytest

from fakes import gpus, runs
from unstable_lite.config import Config
from unstable_lite.config.reading import parse_config
from unstable_lite.errors import ConfigError
from unstable_lite.planning import placement
from unstable_lite.planning.plan import Plan, make_plan
from unstable_lite.planning.validation import find_problems

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


def test_driver_that_is_too_old_for_torch_is_refused_unless_the_compatibility_package_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.install(monkeypatch, tmp_path, 1, driver="550.54.15")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    code, text = check(tmp_path, "13.0")
    assert code == 1 and "driver 550.54.15" in text and "580" in text
    (folder := tmp_path / "compat").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}")
    assert check(tmp_path, "12.8")[0] == 0
    (folder / "libcuda.so.1").touch()
    assert check(tmp_path, "13.0")[0] == 0


def config(*, model: str = "Qwen/Qwen3-1.7B", engine: dict[str, Any], learner: dict[str, Any]) -> Config:
    envs = [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}]
    raw = {"model_name": model, "engine": {"kind": "transformers"} | engine, "learner": learner, "train_envs": envs}
    return Config.model_validate(raw)


def test_shared_memory_that_cannot_hold_the_adapters_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings(made: Plan) -> str:
        return "; ".join(text for name, text in made.describe() if name == "warning")

    gpus.install(monkeypatch, tmp_path, 1, gib=80)
    assert "--shm-size" not in warnings(make_plan(config(engine={}, learner={})))
    monkeypatch.setattr(placement, "SHARED_MEMORY", Path("/sys"))  # a file system of size 0
    assert re.search(r"/sys has 0 MB.*--shm-size=\d+g", warnings(make_plan(config(engine={}, learner={}))))
    cpu = {"devices": ("cpu",)}
    assert "--shm-size" not in warnings(make_plan(config(model="builtin:tiny", engine=cpu, learner=cpu)))


def test_ranks_on_gpus_without_shared_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.install(monkeypatch, tmp_path, 3, gib=80)
    monkeypatch.setattr(placement, "SHARED_MEMORY", Path("/sys"))
    with pytest.raises(ConfigError, match=r"/sys has 0 MB.*--shm-size=1g"):
        make_plan(config(engine={"devices": (2,)}, learner={"devices": (0, 1)}))
    make_plan(config(engine={"devices": (2,)}, learner={"devices": (0,)}))


KUHN, NIM = "openspiel:kuhn_poker", "Nim-v0-train"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"num_players": 5}, "num_players = 5"),
        ({"env_id": "None-v0"}, "None-v0"),
        ({"env_kwargs": {"pile": 3}}, "pile"),
        ({"env_id": "questions:nowhere.jsonl", "num_players": 1}, "nowhere.jsonl"),
        ({"env_id": "openspiel:nowhere"}, "nowhere"),
    ],
)
def test_env_that_does_not_start_is_reported_as_without_branching(env: dict[str, Any], says: str) -> None:
    of, _ = parse_config(
        {
            "algorithm": "rloo",
            "run": {"group_size": 4},
            "league": {"env_sampling_strategy": {"examples.branching:Branching": {}}},
            "train_envs": [
                {"env_id": NIM, "num_players": 2, "num_actors": 1, "prompt_template": "tiny"} | env,
                {"env_id": KUHN, "num_players": 2, "num_actors": 2, "prompt_template": "tiny"},
            ],
        }
    )
    assert of is not None
    found = find_problems(of)
    assert any(says in problem for problem in found)
    assert not any("branching" in problem for problem in found)
