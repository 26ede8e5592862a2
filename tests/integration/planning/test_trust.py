"""A config in a run directory runs code only if its user wrote it or allows it."""

import os
import shutil
from pathlib import Path

import pytest

from fakes import runs
from unstable_lite.config import Config
from unstable_lite.config.reading import read_config
from unstable_lite.errors import ConfigError
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.trust import SEAL, clear_key_warnings, run_config
from unstable_lite.tracking.run_directory import create_run_directory, replace_config

LEAKING = (
    *("http://openrouter.ai/api/v1", "HTTP://openrouter.ai/api/v1", "http://OPENROUTER.ai:443/api/v1"),
    *("https://me:word@openrouter.ai/api/v1", "https://openrouter.ai@evil/v1", "http://localhost@evil/v1"),
    *("http://10.0.0.5/v1", "https://gpu-node-7/v1", "http://localhost.evil/v1"),
)
"""URLs of servers that might receive a key."""
CODE = {"action_extraction_fn": "subprocess:getstatusoutput"}


def config_of(tmp_path: Path, *overrides: str) -> Config:
    config, problems = read_config(runs.write_small(tmp_path), overrides)
    assert config is not None and not problems
    return config


def write_run(tmp_path: Path, text: str) -> Path:
    """Write a run directory as another person might send it."""
    directory = tmp_path / "theirs"
    (directory / "checkpoints").mkdir(parents=True)
    small = runs.write_small(tmp_path).read_text().replace("[learner]", '[learner]\nkl_reference = "stage:16"')
    (directory / "config.toml").write_text(f"{small}\n{text}" if text.lstrip().startswith("[") else f"{text}\n{small}")
    return directory


def own_run(tmp_path: Path) -> Path:
    config = config_of(tmp_path)
    envs = tuple(env.model_copy(update=CODE) for env in config.train_envs)
    return create_run_directory(config.model_copy(update={"train_envs": envs}))


def test_own_config_is_used_anywhere_by_a_private_secret(tmp_path: Path) -> None:
    run = own_run(tmp_path)
    assert run_config(run) == run / "config.toml"
    copied = shutil.copytree(run, tmp_path / "copy")
    assert run_config(copied) == copied / "config.toml"
    state = Path(os.environ["XDG_STATE_HOME"]) / "unstable_lite"
    assert [path.name for path in state.iterdir()] == ["secret"]
    assert (state.stat().st_mode & 0o777, (state / "secret").stat().st_mode & 0o777) == (0o700, 0o600)


def test_resumed_run_stays_trusted(tmp_path: Path) -> None:
    run = own_run(tmp_path)
    before = (run / "config.toml").read_bytes()
    replace_config(run, config_of(tmp_path, "algorithm=a2c"), update=2)
    run_config(run)
    (run / "config.toml").write_bytes(before)
    run_config(run)  # a crash may leave the earlier config
    (run / SEAL).unlink()
    config, _ = read_config(run_config(run, is_trusted=True))
    assert config is not None
    replace_config(run, config, update=3)
    run_config(run)


@pytest.mark.parametrize("change", ["text", "secret", "no seal", "no home"])
def test_changed_or_foreign_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    run = own_run(tmp_path)
    if change == "text":
        with (run / "config.toml").open("a") as file:
            file.write("\n# changed\n")
    elif change == "secret":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
        own_run(tmp_path)
    elif change == "no seal":
        (run / SEAL).unlink()
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        own_run(tmp_path)  # still starts
    refused = r"train_envs.action_extraction_fn = 'subprocess:getstatusoutput'.*--trust-config"
    with pytest.raises(ConfigError, match=refused):
        run_config(run)
    assert run_config(run, is_trusted=True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("trust_remote_code = true", "trust_remote_code = True"),
        ('algorithm = "evil:Learner"', "algorithm = 'evil:Learner'"),
        ('[policies.main]\nalgorithm = "evil:Learner"', "policies.main.algorithm = 'evil:Learner'"),
        ('[policies.main]\nopponents = "evil:Sampler"', "policies.main.opponents = 'evil:Sampler'"),
        ('[policies.main]\nopponents = { "evil:Sampler" = 1 }', "policies.main.opponents = 'evil:Sampler'"),
        ('[policies.main]\nlearner = { options = { f = "evil:f" } }', "policies.main.learner.options.f = 'evil:f'"),
        ('[policies.main]\nlearner = { x = { kl_reference = "stage:1" } }', "learner.x.kl_reference = 'stage:1'"),
        ('[[train_envs]]\nseats = ["policy:main"]', "train_envs.seats = 'policy:main'"),
        ('[[eval_envs]]\nenv_id = "evil:Nim-v0"', "eval_envs.env_id = 'evil:Nim-v0'"),
        ('[[eval_envs]]\nfixed_opponent = "evil:Player"', "eval_envs.fixed_opponent = 'evil:Player'"),
        ('[rewards]\nstep = [{"evil:transform" = {}}]', "rewards.step = 'evil:transform'"),
        ('[new]\nkey = [["evil:thing"]]', "new.key = 'evil:thing'"),
        ('[new]\nplayers = ["run:x"]', "new.players = 'run:x'"),
        ('[sft]\nplayers = ["evil:Player"]', "sft.players = 'evil:Player'"),
        ('[new]\nweights = { "evil:Env" = 1 }', "new.weights = 'evil:Env'"),
        ('[opponents]\nbase_url = "http://evil/v1"', "opponents.base_url = 'http://evil/v1'"),
        ('[engine.options]\nworker_cls = "evil.Worker"', "engine.options.worker_cls = 'evil.Worker'"),
        ('[engine.options.compilation_config]\nbackend = "evil.f"', "compilation_config.backend = 'evil.f'"),
        ("[engine.options.speculative_config]\ntrust_remote_code = true", "config.trust_remote_code = True"),
        *((f'[opponents]\nbase_url = "{url}"', "opponents.base_url = ") for url in LEAKING),
    ],
)
def test_every_value_that_runs_code_or_receives_a_key_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, named: str
) -> None:
    for variable in ("OPENROUTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(variable, "sk-secret")
    run = write_run(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        run_config(run)
    assert named in str(caught.value)


def test_config_without_code_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-secret")
    text = """[opponents]
base_url = "BASE"
[policies.main]
opponents = { mirror = 1, "policy:exploiter" = 1 }
learner = { kl_reference = "stage:8" }
[policies.exploiter]
opponents = "policy:main/past"
[policies.third]
opponents = { "policy:main" = 1 }
[templates.mine]
user = "See: {observation}"
[engine.options]
max_num_batched_tokens = 4096
[[eval_envs]]
env_id = "Nim-v0-train"
fixed_opponent = "vendor/model:free"
[[eval_envs]]
env_id = "Nim-v0-train"
fixed_opponent = "run:other/best"
[[eval_envs]]
fixed_opponent = "policy:main"
[[train_envs]]
env_id = "Nim-v0-train"
fixed_opponents = ["adapter:Other", "base"]
[sft]
players = ["adapter:other", "vendor/model:free", "scripted:mcts:10"]
"""
    run_config(write_run(tmp_path / "1", text.replace("BASE", "https://openrouter.ai/api/v1")))
    run_config(write_run(tmp_path / "2", text.replace("BASE", "http://elsewhere/v1")))  # no key would be sent
    recorded = write_run(tmp_path / "4", "") / "config.toml"
    recorded.write_text(recorded.read_text().replace("{ mirror = 0.5", '{ "policy:main" = 0.5'))
    run_config(recorded.parent)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    run_config(write_run(tmp_path / "3", text.replace("BASE", "http://127.0.0.1:8000/v1")))


@pytest.mark.parametrize(
    ("url", "opponent", "is_warned"),
    [
        ("http://openrouter.ai/api/v1", "vendor/model", True),
        ("HTTP://10.0.0.5/v1", "vendor/model", True),
        ("http://gpu-node-7:8000/v1", "vendor/model", True),
        ("https://openrouter.ai/api/v1", "vendor/model", False),
        ("https://gpu-node-7/v1", "vendor/model", False),
        ("http://127.0.0.1:8000/v1", "vendor/model", False),
        ("http://openrouter.ai/api/v1", "scripted:random", False),
    ],
)
def test_check_warns_of_a_key_that_travels_in_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, opponent: str, is_warned: bool
) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    config = config_of(tmp_path, f"opponents.base_url={url}")
    evaluated = [env.model_copy(update={"fixed_opponent": opponent}) for env in config.eval_envs]
    plan = make_plan(config.model_copy(update={"eval_envs": tuple(evaluated)}))
    warned = [text for name, text in plan.describe() if name == "warning" and "without encryption" in text]
    assert len(warned) == is_warned
    for variable in ("OPENROUTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable)
    assert not list(clear_key_warnings(plan.config))


def test_command_line_values_are_trusted(tmp_path: Path) -> None:
    run = write_run(tmp_path, 'trust_remote_code = true\nalgorithm = "mine:Learner"')
    run_config(run, ["trust_remote_code=true", "algorithm=mine:Learner"])
    run_config(run, ["trust_remote_code=false", "algorithm=ppo"])
    with pytest.raises(ConfigError, match="mine:Learner") as caught:
        run_config(run, ["trust_remote_code=true"])
    assert "trust_remote_code" not in str(caught.value)
