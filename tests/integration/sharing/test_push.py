"""Published folders, and real uploads to a server that plays the hub."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fakes import runs
from fakes.handmade_adapters import fitting, write_adapter
from fakes.hub import TOKEN, running_hub
from unstable_lite.cli.app import app
from unstable_lite.config.reading import parse_config
from unstable_lite.models import BUILTIN
from unstable_lite.tracking.evaluations import Evaluation

pytestmark = pytest.mark.timeout(2000)


def evaluation(model: str, wins: int) -> Evaluation:
    return Evaluation(
        label="after",
        model=model,
        step=2,
        env_id="Nim-v0-train",
        opponent="scripted:random",
        n=100,
        wins=wins,
        draws=0,
        losses=100 - wins,
        invalid=1,
        void=0,
        mean_reward=0.0,
        reward_std=1.0,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run with its results, whose files name places of this machine as a real run's do."""
    directory = tmp_path / "secret-place" / "mine"
    packaged = str(BUILTIN["builtin:tiny"])
    for number in (1, 2):
        checkpoint = directory / "checkpoints" / f"ckpt-{number}"
        write_adapter(
            checkpoint, fitting("builtin:tiny", number), base=packaged, target_modules=["q_proj", "down_proj"]
        )
    text = runs.write_small(tmp_path / "secret-place").read_text()
    text = text.replace('"scripted:random"]', f'"scripted:random", "run:{tmp_path}/secret-place/other/ckpt-4"]')
    text += f'[opponents]\nbase_url = "http://{"secret-host"}/v1"\n[tracker]\nwandb_project = "secret-project"\n'
    (directory / "config.toml").write_text(text)
    lines = [evaluation("base", 48), evaluation("ckpt-1", 60), evaluation("ckpt-2", 87)]
    (directory / "eval.jsonl").write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
    versions = {"commit": None, "packages": {"torch": "2.13.0", "vllm": None}, "machine": {"platform": "secret-box"}}
    (directory / "versions.json").write_text(json.dumps(versions))
    return directory


def push(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["push", *map(str, arguments)])
    return done.exit_code, done.output


def test_card_says_that_a_checkpoint_was_not_evaluated(run: Path, tmp_path: Path) -> None:
    path = run / "eval.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    code, output = push(run, "me/nim", "--dry-run", tmp_path / "folder")
    assert code == 0, output
    assert "\n\nThe run did not evaluate `ckpt-2`.\n\n" in (tmp_path / "folder" / "README.md").read_text()


def test_folder_has_the_adapter_and_a_card_and_nothing_private(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    code, output = push(run, "me/nim", "--dry-run", folder)
    assert code == 0, output
    assert str(folder) in output.replace("\n", "")
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "config.toml"}
    assert {file.name for file in folder.iterdir()} == names
    card = (folder / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["library_name"] == "peft" and "license" not in facts and "unstable-lite" in facts["tags"]
    assert "base_model" not in facts  # a packaged base is on no hub
    assert "ckpt-2 scored 87.0% of the points in 100 games of Nim-v0-train" in text and "(95 %: 79.0% – 92.2%)" in text
    assert "base scored 48.0%" in text and "ckpt-1" not in text
    assert "torch 2.13.0" in text and "vllm serve" not in text
    assert "<|im_start|>user\n{observation}<|im_end|>" in text
    config, problems = parse_config(tomllib.loads((folder / "config.toml").read_text()))
    assert config is not None and not problems
    assert config.model_name == "builtin:tiny" and config.engine.max_generation_len == 12
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "builtin:tiny"
    for file in folder.iterdir():
        content = file.read_bytes()
        for private in ("secret", str(tmp_path), str(Path(BUILTIN["builtin:tiny"]).parent)):
            assert private.encode() not in content, f"{file.name} publishes {private}"
    ids = {adapter.key for adapter in _found(str(folder), str(run / "checkpoints" / "ckpt-2"))}
    assert len(ids) == 1, "the published adapter is the run's"


def _found(*directories: str) -> list[object]:
    from unstable_lite.adapters.frozen import read_facts

    return [read_facts(Path(directory)) for directory in directories]  # type: ignore[misc]


def test_merged_model_answers_like_base_and_adapter(run: Path, tmp_path: Path) -> None:
    import peft
    import torch
    import transformers

    folder = tmp_path / "folder"
    code, output = push(run, "me/nim", "--merge", "--checkpoint", "1", "--dry-run", folder)
    assert code == 0, output
    base = str(BUILTIN["builtin:tiny"])
    auto = transformers.AutoModelForCausalLM
    adapted = peft.PeftModel.from_pretrained(
        auto.from_pretrained(base, dtype=torch.float32), str(run / "checkpoints" / "ckpt-1")
    ).eval()
    merged = auto.from_pretrained(folder)
    assert merged.dtype == torch.bfloat16
    ids = torch.arange(5, 65)[None]
    with torch.inference_mode():
        expected = adapted(input_ids=ids).logits.log_softmax(-1)
        got = merged.float()(input_ids=ids).logits.log_softmax(-1)
        plain = auto.from_pretrained(base, dtype=torch.float32)(input_ids=ids).logits.log_softmax(-1)
    assert (got - expected).abs().mean() < 0.02 < (plain - expected).abs().mean()
    own = transformers.AutoTokenizer.from_pretrained(folder)
    assert own("Your move").input_ids == transformers.AutoTokenizer.from_pretrained(base)("Your move").input_ids
    assert own.chat_template
    for file in folder.iterdir():
        assert b"secret" not in file.read_bytes() and base.encode() not in file.read_bytes(), file.name
    assert "library_name: transformers" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("me/nim/deep",), "USER/NAME"),
        (("me/--nim",), "USER/NAME"),
        (("me/nim", "--checkpoint", "9"), "has no ckpt-9"),
        (("me/nim",), "hf auth login"),
        (("me/nim", "--dry-run", "."), "exists"),
    ],
)
def test_impossible_push_is_one_message_before_any_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    before = sorted(tmp_path.iterdir())
    code, output = push(run, *arguments)
    assert code == 1 and problem in output and "Traceback" not in output, output
    assert sorted(tmp_path.iterdir()) == before


def test_base_that_others_lack_is_refused_and_may_be_named(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    local = tmp_path / "my-base"
    local.symlink_to(BUILTIN["builtin:tiny"])
    config.write_text(config.read_text().replace('"builtin:tiny"', f'"{local}"'))
    code, output = push(run, "me/nim", "--dry-run", tmp_path / "folder")
    assert code == 1 and "--base-model" in output and "--merge" in output
    code, output = push(run, "me/nim", "--base-model", "org/base", "--license", "mit", "--dry-run", tmp_path / "folder")
    assert code == 0, output
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "base_model: org/base" in card and "vllm serve org/base --enable-lora" in card and "my-base" not in card
    assert "license: mit" in card
    code, output = push(run, "me/nim", "--merge", "--dry-run", tmp_path / "merged")
    assert code == 0, output
    assert "base_model:" not in (tmp_path / "merged" / "README.md").read_text()
    assert all(str(tmp_path).encode() not in file.read_bytes() for file in (tmp_path / "merged").iterdir())
    local.unlink()
    code, output = push(run, "me/nim", "--merge", "--dry-run", tmp_path / "again")
    assert code == 1 and "my-base" in output and not (tmp_path / "again").exists()


def test_key_of_the_environment_is_never_published(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE_API_KEY", "sk-1234567890")
    with (run / "config.toml").open("a") as file:
        file.write('[templates.mine]\nuser = "{observation} sk-1234567890"\n')
    code, output = push(run, "me/nim", "--dry-run", tmp_path / "folder")
    assert code == 1 and "a key of your environment" in output and "sk-1234567890" not in output
    assert not (tmp_path / "folder").exists()


def test_run_without_a_checkpoint_is_refused(run: Path) -> None:
    for checkpoint in ("ckpt-1", "ckpt-2"):
        (run / "checkpoints" / checkpoint).rename(run / checkpoint)
    code, output = push(run, "me/nim")
    assert code == 1 and "has no checkpoint yet" in output


def upload(run: Path, url: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        runs.command("push", run, "me/nim", *arguments),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_upload_sends_every_file_to_the_hub(run: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        done = upload(run, hub.url, tmp_path / "home", "--private")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{hub.url}/me/nim" in done.stdout
        assert (hub.created[0]["name"], hub.created[0]["organization"]) == ("nim", "me")
        assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
        assert set(hub.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "config.toml"}
        weights = run / "checkpoints" / "ckpt-2" / "adapter_model.safetensors"
        assert hub.files["adapter_model.safetensors"] == weights.read_bytes()
        assert TOKEN.encode() not in b"".join(hub.files.values())
        hub.refuses_with = 403
        done = upload(run, hub.url, tmp_path / "home")
    assert (
        done.returncode == 1
        and done.stderr.count("\n") == 1
        and "403" in done.stderr
        and "hf auth login" in done.stderr
    )
    done = upload(run, hub.url, tmp_path / "home")  # it is gone
    assert done.returncode == 1 and "cannot be reached" in done.stderr and "Traceback" not in done.stderr
