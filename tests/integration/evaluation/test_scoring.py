"""Exact answer probabilities, compared with the model computed by hand."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from fakes import runs
from unstable_lite.adapters import peft_files
from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, EnvError, ModelError, UnsupportedEnvError
from unstable_lite.evaluation import action_distribution
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.learner.model import Policy
from unstable_lite.models import resolve_model

NIM = "Nim-v0-train"


def settings(temperature: float = 1.0, **env: object) -> Config:
    entry = {"env_id": NIM, "num_players": 2, "prompt_template": "tiny", **env}
    return Config.model_validate(
        {
            "model_name": "builtin:tiny",
            "engine": {"temperature": temperature},
            "learner": {"dtype": "float32"},
            "lora": {"lora_rank": 4},
            "train_envs": [{**entry, "num_actors": 2}],
        }
    )


def observations(num_turns: int = 2) -> list[str]:
    env, seen = Environment(NIM, 2, 0), []
    for _ in range(num_turns):
        _, observation = env.observe()
        seen.append(observation)
        env.step(legal_actions(NIM, observation)[3])
    return seen


def write_adapter(directory: Path, scale: float, rank: int = 4) -> Path:
    """Write a PEFT directory for builtin:tiny with random B matrices of size `scale`."""
    config = settings().model_copy(update={"lora": settings().lora.model_copy(update={"lora_rank": rank})})
    tensors, stored = Policy(config, "cpu").adapter_state()
    torch.manual_seed(1)
    scaled = {name: scale * torch.randn_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    directory.mkdir(parents=True)
    peft_files.write_files(directory, scaled, stored)
    return directory


def by_hand(observation: str, action: str, temperature: float, adapter: Path | None = None) -> float:
    path = resolve_model("builtin:tiny")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    prompt = tokenizer(f"<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = tokenizer(f"\\boxed{{{action}}}<|im_end|>")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
    return float(logits.log_softmax(-1)[torch.arange(len(answer)), answer].sum().exp())


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.5, marks=pytest.mark.nightly)])
def test_base_and_adapters_are_scored_token_by_token_as_by_transformers_and_peft(
    tmp_path: Path, temperature: float
) -> None:
    shown, distributions = observations(), []
    adapters = {scale: write_adapter(tmp_path / f"{scale}", scale) for scale in (0.0, 0.1, 0.3)}
    for model in (None, *adapters.values()):
        given = settings(temperature)
        found = action_distribution(model or "base", NIM, shown, config=given, prompt_template="tiny", device="cpu")
        for observation, distribution in zip(shown, found, strict=True):
            assert distribution.actions == tuple(legal_actions(NIM, observation))
            for action, p in list(zip(distribution.actions, distribution.probabilities, strict=True))[:3]:
                assert p == pytest.approx(by_hand(observation, action, temperature, model), rel=1e-3)
            assert distribution.probabilities.sum() + distribution.rest == pytest.approx(1)
            assert distribution.rest > 0
        distributions.append(found[0])
    base, idle, _, busy = (distribution.probabilities for distribution in distributions)
    assert distributions[0].rest < 0.4
    assert np.allclose(idle, base, rtol=1e-3)
    assert np.abs(busy - base).max() > 0.02


def test_adapter_needs_no_config(tmp_path: Path) -> None:
    adapter, shown = write_adapter(tmp_path / "busy", 0.3), observations(1)
    one, other = (
        action_distribution(adapter, NIM, shown, config=config, prompt_template="tiny", device="cpu")[0]
        for config in (settings(), None)
    )
    assert np.allclose(one.probabilities, other.probabilities, rtol=1e-6)


def test_unscorable_input_is_refused_with_advice(tmp_path: Path) -> None:
    def ask(model: str | Path, env_id: str = NIM, text: str = "Current Pile:\n  pile 0: 2", **more: object) -> None:
        options = {"config": settings(), "device": "cpu"} | more
        action_distribution(model, env_id, [text], **options)  # type: ignore[arg-type]

    with pytest.raises(UnsupportedEnvError, match="Chopsticks"):
        ask("base", "Chopsticks-v0-train")
    with pytest.raises(EnvError, match="Current Pile"):
        ask("base", text="Once upon a time")
    with pytest.raises(ConfigError, match="scripted:random"):
        ask("scripted:random")
    with pytest.raises(ConfigError, match="base model"):
        ask("base", config=None)
    with pytest.raises(ConfigError, match="prompt_template 'tinny'"):
        ask("base", prompt_template="tinny")
    with pytest.raises(ConfigError, match="shouted"):
        ask("base", config=settings(action_extraction_fn=f"{__name__}:shouted"))
    with pytest.raises(ModelError, match=r"\b8\b.*\b4\b"):
        ask(write_adapter(tmp_path / "wide", 0.1, rank=8))


def shouted(text: str) -> tuple[str, bool]:
    return text.upper(), True


def probe(model: Path) -> str:
    ended = CliRunner().invoke(app, ["probe", str(model), "--games", "4", "--device", "cpu"], env={"COLUMNS": "200"})
    assert ended.exit_code == 0, ended.output
    return ended.output


@pytest.mark.nightly
def test_every_checkpoint_of_a_run_is_probed_at_the_same_positions(tmp_path: Path) -> None:
    config = runs.write_small(tmp_path)
    run = tmp_path / "run"
    for number, scale in ((1, 0.0), (2, 0.2)):
        write_adapter(run / "checkpoints" / f"ckpt-{number}", scale)
    (run / "config.toml").write_text(config.read_text() + "[lora]\nlora_rank = 4\nlora_alpha = 32\n")
    out = probe(run)
    assert "state dependence" in out and "ckpt-2" in out
    with (run / "probe.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["random legal", "base", "ckpt-1", "ckpt-2"]
    assert len({(row["positions"], row["optimal_n"]) for row in rows.values()}) == 1
    assert float(rows["random legal"]["rest"]) == pytest.approx(0, abs=1e-6)
    assert float(rows["base"]["optimal"]) == pytest.approx(float(rows["ckpt-1"]["optimal"]), abs=1e-4)
    assert abs(float(rows["ckpt-2"]["optimal"]) - float(rows["base"]["optimal"])) > 1e-3
    for row in rows.values():
        assert float(row["action_entropy_low"]) < float(row["action_entropy"]) < float(row["action_entropy_high"])
    out = probe(run / "checkpoints" / "ckpt-1")
    assert "ckpt-1" in out and "ckpt-2" not in out


def test_package_does_not_import_torch_until_a_model_is_scored() -> None:
    """The tests above show that `action_distribution` is found at its first use."""
    code = "import sys, unstable_lite.evaluation, unstable_lite.evaluation.probing; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False"]
