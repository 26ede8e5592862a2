import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unstable_lite as unstable
from fakes import numpy_learner, run_files, runs
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.games.environments import env_arguments
from unstable_lite.planning.plan import make_plan

NIM = unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny")


def small(tmp_path: Path, **keywords: Any) -> unstable.Run:
    return unstable.build(
        train_envs=[NIM],
        max_generation_len=12,
        batch_size=16,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
        run={"output_dir": str(tmp_path)},
        **keywords,
    )


@pytest.fixture
def torchless(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the test's runs use the learner without torch, and return the keywords of an engine without it."""
    numpy_learner.use(monkeypatch)
    return {"engine": {"kind": "scripted"}, "learner": {"canary_tolerance": 10.0}}


def test_keywords_set_the_same_keys_as_a_toml(tmp_path: Path) -> None:
    config = small(tmp_path, lora_config={"lora_rank": 8}, engine={"max_loras": 5}, mini_batch_size=2).plan.config
    assert config.lora.lora_rank == 8
    assert config.engine.max_loras == 5
    assert config.engine.max_generation_len == 12
    assert config.engine.temperature == 1.0
    assert config.learner.mini_batch_size == 2
    assert config.train_envs == (NIM,)
    learner = unstable.build(train_envs=[NIM], gradient_checkpointing=False, use_trainer_cache=True).plan.config.learner
    assert not learner.activation_checkpointing
    run = unstable.build(train_envs=[NIM])
    assert run.plan.config == make_plan(Config.model_validate({"train_envs": [NIM]})).config


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"buffer_size": 3}, "buffer.buffer_size = 3"),
        ({"vllm_config": {"temprature": 1}}, "vllm_config.temprature"),
        ({"enginee": {"kind": "vllm"}}, "'engine'"),
        ({"algorithm": "a3c"}, "algorithm"),
        ({"learning_rate": -1.0}, "learner.learning_rate"),
    ],
)
def test_impossible_config_is_refused_by_build(keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        unstable.build(train_envs=[NIM], **keywords)


@pytest.mark.nightly
async def test_background_run_starts_once_inside_an_event_loop_and_can_be_stopped_and_awaited(
    tmp_path: Path, torchless: dict[str, Any]
) -> None:
    run = small(tmp_path, **torchless)
    with pytest.raises(ConfigError, match=r"event loop.*start\(block=False\)"):
        run.start(learning_steps=1)
    assert run.start(learning_steps=10_000, num_collection_workers=16, num_eval_workers=0, block=False) is None
    with pytest.raises(ConfigError, match="started"):
        run.start(learning_steps=2, block=False)
    await asyncio.to_thread(runs.wait_for, lambda: any(map(run_files.updates, tmp_path.glob("*/*"))))
    assert not run.is_over
    run.stop()
    summary = await asyncio.to_thread(run.wait)
    assert run.is_over
    assert run.directory == summary.directory
    assert 0 < summary.updates < 10_000
    assert summary.checkpoint.name == f"ckpt-{summary.updates}"


@pytest.mark.nightly
def test_run_can_be_stopped_before_start_up_and_after_its_end(tmp_path: Path, torchless: dict[str, Any]) -> None:
    run = small(tmp_path, **torchless)
    run.start(learning_steps=10_000, num_collection_workers=16, num_eval_workers=0, block=False)
    run.stop()
    assert run.wait().updates == 0
    run.stop()


def test_unguarded_script_does_not_start_again_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unguarded_script.py").write_text(
        "import unstable_lite as unstable\n"
        "class Same:\n"
        "    def __call__(self, reward, pid, env_id):\n"
        "        return reward\n"
        f"run = unstable.build(train_envs=[unstable.{NIM!r}], run={{'output_dir': {str(tmp_path)!r}}})\n"
        "run.start(learning_steps=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match='if __name__ == "__main__"'):
        small(tmp_path, rewards={"final_reward_transformation": ["unguarded_script:Same"]})
    with pytest.raises(ConfigError, match='if __name__ == "__main__"'):
        env_arguments("unguarded_script:Mine-v0")
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "__pycache__"] == [".py"]


@pytest.mark.nightly
def test_error_of_a_background_run_is_raised_by_wait(tmp_path: Path, torchless: dict[str, Any]) -> None:
    run = small(tmp_path, rewards={"final_reward_transformation": ["fakes.failing_transform:Transform"]}, **torchless)
    run.start(learning_steps=1, num_collection_workers=4, num_eval_workers=0, block=False)
    with pytest.raises(unstable.errors.UnstableError, match="KeyError: 0"):
        run.wait()


@pytest.mark.nightly
def test_error_of_a_worker_of_a_background_run_is_raised_by_wait(tmp_path: Path) -> None:
    run = small(tmp_path, lora={"target_modules": ["no_such_proj"]})
    run.start(learning_steps=1, num_collection_workers=4, num_eval_workers=0, block=False)
    with pytest.raises(unstable.errors.UnstableError, match="no_such_proj"):
        run.wait()


def test_run_that_is_not_started_or_has_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"start\(block=False\)"):
        small(tmp_path).wait()
    with pytest.raises(ConfigError, match="learning_steps"):
        small(tmp_path).start(learning_steps=0)


SCRIPT = """
import unstable_lite as unstable
from fakes import numpy_learner
numpy_learner.use()
nim = unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny")
run = unstable.build(
    train_envs=[nim], max_generation_len=12, batch_size=16, run={"output_dir": "OUTPUT"},
    vllm_config={"temperature": 1.0, "max_model_len": 512}, engine={"kind": "scripted"},
)
run.start(learning_steps=STEPS, num_collection_workers=8, num_eval_workers=0, block=False)
"""

BLOCKED = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])"


def script(tmp_path: Path, steps: int, end: str = "") -> subprocess.Popen[str]:
    source = SCRIPT.replace("OUTPUT", str(tmp_path / "outputs")).replace("STEPS", str(steps)) + end
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", source], text=True, env=runs.environment(), **streams)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("print(run.wait().updates, 'made')", id="in wait"),
        pytest.param(f"{BLOCKED}; print(run.wait().updates, 'made')", id="in wait, to another thread"),
        pytest.param("", id="after the script's end", marks=pytest.mark.nightly),
    ],
)
def test_interrupted_background_run_saves(tmp_path: Path, end: str) -> None:
    process = script(tmp_path, 100_000, end)
    runs.wait_for(lambda: runs.num_updates(tmp_path))
    process.send_signal(signal.SIGINT)
    out = runs.output_of(runs.finish(process))
    assert list((runs.run_directory(tmp_path) / "checkpoints").glob("ckpt-*"))
    assert " made" in out or not end
