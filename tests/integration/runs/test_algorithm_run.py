"""Real runs of the algorithms with a critic: small model, real games, real processes."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fakes import run_files
from fakes.runs import output_of, run, undocumented_metrics, write_small
from unstable_lite.tracking.run_directory import find_damage

pytestmark = pytest.mark.nightly
OFF = ("run.eval_games=0", "run.num_eval_workers=0", "learner.critic_learning_rate=1e-3")


def directory_of(tmp_path: Path, name: str) -> Path:
    (found,) = (tmp_path / "outputs").glob(f"*/*{name}")
    return found


def test_a2c_run_resumes_and_ppo_continues_from_its_adapter_and_critic(tmp_path: Path) -> None:
    config = write_small(tmp_path)
    warm_up = ("learner.critic_warmup_updates=1", "run.checkpoint_every=1", "run.learning_steps=2")
    engine = "engine.kind=fakes.told_engines:PrintsWhetherResumed"
    output_of(run("run", config, "algorithm=a2c", "run.name=first", engine, *OFF, *warm_up))
    first = directory_of(tmp_path, "first")
    updates = run_files.updates(first)
    assert [update["learner/step"] for update in updates] == [1, 2]
    for update in updates:
        assert update["learner/num_steps"] >= 24
        assert {"learner/value_loss", "learner/value_mae", "learner/explained_variance"} <= update.keys()
    checkpoints = [first / "checkpoints" / f"ckpt-{update}" for update in (1, 2)]
    adapters = [safetensors.numpy.load_file(path / "adapter_model.safetensors") for path in checkpoints]
    critics = [safetensors.numpy.load_file(path / "critic/adapter_model.safetensors") for path in checkpoints]
    assert not any(
        np.any(tensor) for name, tensor in adapters[0].items() if "lora_B" in name
    )  # only the critic was trained
    assert any(np.any(tensor) for name, tensor in adapters[1].items() if "lora_B" in name)
    assert any(not np.array_equal(critics[0][name], critics[1][name]) for name in critics[0])

    log = first / "logs" / "orchestrator.log"
    assert "resumed: False" in log.read_text() and "resumed: True" not in log.read_text()
    output_of(run("run", "--resume", first, "run.learning_steps=3"))
    assert [update["learner/step"] for update in run_files.updates(first)] == [1, 2, 3]
    assert "resumed: True" in log.read_text(), "its engines know that it resumes"
    assert find_damage(first / "checkpoints" / "ckpt-3") is None
    head = first / "checkpoints" / "ckpt-3" / "critic" / "value_head.safetensors"
    head.write_bytes(head.read_bytes()[:-1])
    assert find_damage(first / "checkpoints" / "ckpt-3") is not None

    start = (f"lora.initial_lora_path={checkpoints[1]}", f"lora.initial_critic_path={checkpoints[1] / 'critic'}")
    steps = ("learner.ppo_epochs=2", "learner.ppo_minibatches=2", "run.learning_steps=2")
    output_of(run("run", config, "algorithm=ppo", "run.name=second", *OFF, *start, *steps))
    second = directory_of(tmp_path, "second")
    updates = run_files.updates(second)
    assert [update["learner/step"] for update in updates] == [1, 2]
    assert updates[0]["learner/value_mean"] != 0  # a fresh critic estimates 0
    assert {"learner/clip_fraction", "learner/approx_kl"} <= updates[0].keys()
    assert undocumented_metrics(first) == undocumented_metrics(second) == []
    assert (second / "checkpoints/ckpt-2/critic/value_head.safetensors").is_file()
