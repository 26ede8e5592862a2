"""Published folders, and real uploads to a server that plays the hub."""

import html
import json
import os
import pty
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from fakes import runs
from fakes.handmade_adapters import fitting, write_adapter
from fakes.hub import TOKEN, running_hub
from fakes.shown_runs import of_points
from unstable_lite.adapters.frozen import read_facts
from unstable_lite.cli.app import app
from unstable_lite.config.reading import parse_config
from unstable_lite.models import BUILTIN
from unstable_lite.tracking.evaluations import Evaluation

pytestmark = pytest.mark.timeout(2000)


def evaluation(step: int, points: float) -> Evaluation:
    return of_points(step, "Nim-v0-train", "scripted:random", points, games=100)


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
    frozen = f'"scripted:random", "run:{directory}/ckpt-4", "average:{directory}/linear/ckpt-4,5"]'
    text = text.replace('"scripted:random"]', frozen)
    text += f'[opponents]\nbase_url = "http://{"secret-host"}/v1"\n[tracker]\nwandb_project = "secret-project"\n'
    (directory / "config.toml").write_text(text)
    lines = [evaluation(0, 0.48), evaluation(1, 0.6), evaluation(2, 0.87)]
    (directory / "eval.jsonl").write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
    versions = {"commit": None, "packages": {"torch": "2.13.0", "vllm": None}, "machine": {"platform": "secret-box"}}
    (directory / "versions.json").write_text(json.dumps(versions))
    return directory


def push(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["push", *map(str, arguments)])
    return done.exit_code, done.output


def published(run: Path, folder: Path, *arguments: str) -> str:
    """Write what would be published into `folder`, and return its card."""
    code, output = push(run, "me/nim", *arguments, "--dry-run", folder)
    assert code == 0, output
    return (folder / "README.md").read_text()


def test_card_says_that_a_checkpoint_was_not_evaluated(run: Path, tmp_path: Path) -> None:
    path = run / "eval.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert "\n\nThe run did not evaluate `ckpt-2`.\n\n" in published(run, tmp_path / "folder")


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
    assert "ckpt-2: points 87.0 % (95 %: 78.6–92.4) in 100 games of Nim-v0-train" in text
    assert "base: points 48.0 %" in text and "ckpt-1" not in text
    assert "torch 2.13.0" in text and "vllm serve" not in text
    assert "<|im_start|>user\n{observation}<|im_end|>" in text
    config, problems = parse_config(tomllib.loads((folder / "config.toml").read_text()))
    assert config is not None and not problems
    assert config.model_name == "builtin:tiny" and config.engine.max_generation_len == 12
    assert "run:mine/ckpt-4" in repr(config) and "average:mine/linear/ckpt-4,5" in repr(config)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "builtin:tiny"
    for file in folder.iterdir():
        content = file.read_bytes()
        for private in ("secret", str(tmp_path), str(Path(BUILTIN["builtin:tiny"]).parent)):
            assert private.encode() not in content, f"{file.name} publishes {private}"
    places = (folder, run / "checkpoints" / "ckpt-2")
    assert len({read_facts(place).key for place in places}) == 1, "the published adapter is the run's"


def test_merged_model_answers_like_base_and_adapter(run: Path, tmp_path: Path) -> None:
    import peft
    import torch
    import transformers

    folder = tmp_path / "folder"
    card = published(run, folder, "--merge", "--checkpoint", "1")
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
    assert "library_name: transformers" in card


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("me/nim/deep",), "USER/NAME"),
        (("me/--nim",), "USER/NAME"),
        (("me/nim", "--checkpoint", "9"), "has no ckpt-9"),
        (("me/nim", "--checkpoint", "typo"), "--checkpoint typo: give the number of an update"),
        (("me/nim", "--checkpoint", "../other/best"), "--checkpoint ../other/best: give the number of an update"),
        (("me/nim", "--checkpoint", "ckpt-1/../ckpt-2"), "--checkpoint ckpt-1/../ckpt-2: give the number of an"),
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
    assert code == 1 and problem in " ".join(output.split()) and "Traceback" not in output, output
    assert sorted(tmp_path.iterdir()) == before


def test_base_that_others_lack_is_refused_and_may_be_named(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    local = tmp_path / "my-base"
    local.symlink_to(BUILTIN["builtin:tiny"])
    config.write_text(config.read_text().replace('"builtin:tiny"', f'"{local}"'))
    code, output = push(run, "me/nim", "--dry-run", tmp_path / "folder")
    assert code == 1 and "--base-model" in output and "--merge" in output
    card = published(run, tmp_path / "folder", "--base-model", "org/base", "--license", "mit")
    assert "base_model: org/base" in card and "vllm serve org/base --enable-lora" in card and "my-base" not in card
    assert "license: mit" in card
    assert "base_model:" not in published(run, tmp_path / "merged", "--merge")
    assert all(str(tmp_path).encode() not in file.read_bytes() for file in (tmp_path / "merged").iterdir())
    local.unlink()
    code, output = push(run, "me/nim", "--merge", "--dry-run", tmp_path / "again")
    assert code == 1 and "my-base" in output and not (tmp_path / "again").exists()


OPEN_TABLES = """
[engine.options]
worker = "my private text"
nested = { deeper = "my private text" }
[learner.options]
secret_word = "my private text"
[rewards]
final_reward_transformation = [
    { name = "mine:Reward", note = "my private text" },
    { name = "WinDrawLossFormatter", win_reward = 2.0 },
]
"""


def test_open_tables_are_left_out_unless_asked_for(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    text = config.read_text().replace(
        "{ mirror = 0.5, fixed = 0.5 }", '{ "mine:Sampler" = { note = "my private text" } }'
    )
    text = text.replace("[[train_envs]]\n", '[[train_envs]]\nenv_kwargs = { note = "my private text" }\n')
    config.write_text(text + OPEN_TABLES)
    card = published(run, tmp_path / "folder")
    for file in (tmp_path / "folder").iterdir():
        assert b"my private text" not in file.read_bytes(), file.name
    config_text = (tmp_path / "folder" / "config.toml").read_text()
    line = config_text.partition("\n")[0]
    assert line.startswith("# Left out: engine.options, learner.options, ") and line.endswith(
        "--with-options publishes them."
    )
    for name in ("rewards.final_reward_transformation.note", "mine:Sampler", "train_envs.env_kwargs"):
        assert f"{name}, " in line
    assert 'name = "mine:Reward"' in config_text and "win_reward = 2" in config_text and 'mine:Sampler"]' in config_text
    assert "opponent_sampling_strategy" in config_text and "# Left out" in card
    published(run, tmp_path / "whole", "--with-options")
    assert (tmp_path / "whole" / "config.toml").read_text().count("my private text") == 7


SECRETS = {
    "MY_PASSPHRASE": "correct horse",
    "DB_PASS": "short1",
    "QUOTED_SECRET": 'with "quotes" and \\',
    "a_token_2": "hidden-token",
    "MINE_API_KEY": "sk-1234567890",
}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[engine.options]\npassword = "hunter2"', "like a credential"),
        ('[learner.options]\nnested = { API-Key = "hunter2" }', "like a credential"),
        ('[rewards]\nfinal_reward_transformation = [{ name = "mine:R", auth = "hunter2" }]', "like a credential"),
        ('[engine.options]\nx = "hf_abcdefghijklmnop"', "like a credential"),
        ('[engine.options]\nx = ["sk-proj-abcdefghijklmnop"]', "like a credential"),
        ('[engine.options]\nx = "postgres://me:word@host/games"', "like a credential"),
        ('[engine.options]\nx = "https://token@host"', "like a credential"),
        ('[engine.options]\nx = "AKIAABCDEFGHIJKLMNOP"', "like a credential"),
        ('[engine.options]\nx = "ghp_abcdefghijklmnopqrstuvwxyz"', "like a credential"),
        ('[templates.mine]\nuser = "{observation} https://me:word@host"', "like a credential"),
        ('[engine.options]\nx = "correct horse"', "MY_PASSPHRASE"),
        ('[engine.options]\nx = "short1"', "DB_PASS"),
        ("[engine.options]\nx = 'with \"quotes\" and \\'", "QUOTED_SECRET"),
        ('[templates.mine]\nuser = "{observation} hidden-token"', "a_token_2"),
        ('[templates.mine]\nuser = "{observation} sk-1234567890"', "a key of your environment"),
    ],
)
def test_credentials_are_never_published(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    with (run / "config.toml").open("a") as file:
        file.write(f"{text}\n")
    options = ["--with-options"] * ("[templates" not in text)  # templates are published in any case
    code, output = push(run, "me/nim", *options, "--dry-run", tmp_path / "folder")
    assert code == 1 and says in output and "Traceback" not in output, output
    assert not any(secret in output for secret in ("hunter2", "word@", *SECRETS.values()))
    assert not (tmp_path / "folder").exists()


def test_words_that_look_like_no_credential_are_published(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYBOARD", "nim")
    monkeypatch.setenv("SHORT_TOKEN", "random")
    with (run / "config.toml").open("a") as file:
        file.write('[engine.options]\ntokenizer_mode = "automatic"\nkeys = 12345678\nurl = "https://host/a@b"\n')
        file.write('[templates.mine]\nuser = "{observation} task-oriented-answer, risk-averse-play, hf_hub_download"\n')
    published(run, tmp_path / "folder", "--with-options")


EVIL = "evil | <script>x</script> ![i](http://e) `code` [l](u) *b* _e_ ~~s~~ [red]x & $m$"


def test_markup_in_names_is_escaped_in_the_card(run: Path, tmp_path: Path) -> None:
    lines = [evaluation(0, 0.48), replace(evaluation(2, 0.87), opponent=f"{EVIL}\n# Heading", env_id=EVIL)]
    (run / "eval.jsonl").write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
    packages = {"packages": {"torch": "<img src=x>", "vllm": "`2`"}}
    (run / "versions.json").write_text(json.dumps(packages))
    config = run / "config.toml"
    config.write_text(
        config.read_text().replace('"tiny"', '"mine|<b>`"')
        + '[templates."mine|<b>`"]\nuser = """\n{observation}\n```\n<script>\n````\n# out"""\n'
    )
    text = published(run, tmp_path / "folder").split("---\n", 2)[2]
    page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(text)
    for tag in ("<script", "<img", "<b>", "<em>", "<strong>", "<s>", "<a "):
        assert tag not in page, tag
    assert page.count("<h1") == 1 and page.count("<h2") == 4
    shown = html.unescape(page)
    assert f"{EVIL} # Heading" in shown and shown.count("<td>mine|<b>`</td>") == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("versions.json", json.dumps({"packages": {"torch": "\ud800"}})),
        ("eval.jsonl", json.dumps(evaluation(2, 0.87).to_json() | {"ended_invalid": 10**400}) + "\n"),
    ],
    ids=["surrogate", "number without end"],
)
def test_content_that_no_run_writes_ends_a_push_with_one_message(
    run: Path, tmp_path: Path, file: str, content: str
) -> None:
    (run / file).write_text(content)
    code, output = push(run, "me/nim", "--dry-run", tmp_path / "folder")
    assert code == 1 and f"{run}: its files are not as a run writes them" in " ".join(output.split()), output
    assert not (tmp_path / "folder").exists()


def test_base_with_quotes_is_a_string_in_the_code_of_the_card(run: Path, tmp_path: Path) -> None:
    card = published(run, tmp_path / "folder", "--base-model", 'org/x"; import os #$(id)')
    assert 'base = "org/x\\"; import os #$(id)"\n' in card
    assert "vllm serve 'org/x\"; import os #$(id)' --enable-lora" in card


def test_run_without_a_checkpoint_is_refused(run: Path) -> None:
    for checkpoint in ("ckpt-1", "ckpt-2"):
        (run / "checkpoints" / checkpoint).rename(run / checkpoint)
    code, output = push(run, "me/nim")
    assert code == 1 and "has no checkpoint yet" in output


def hub_environment(url: str, home: Path) -> dict[str, str]:
    own = {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return {**os.environ, **own}


def upload(run: Path, url: str, home: Path, *arguments: str) -> tuple[int, str, str]:
    words = runs.command("push", run, "me/nim", *arguments)
    done = subprocess.run(words, env=hub_environment(url, home), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("answer", "is_published"), [("y\n", True), ("n\n", False), ("\n", False), (None, True)])
def test_upload_on_a_terminal_asks_first(run: Path, tmp_path: Path, answer: str | None, is_published: bool) -> None:
    with running_hub() as hub:
        terminal, printed = pty.openpty()
        done = subprocess.Popen(
            runs.command("push", run, "me/nim", *["--yes"] * (answer is None)),
            env=hub_environment(hub.url, tmp_path / "home"),
            stdin=printed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.write(terminal, (answer or "").encode())
        output, _ = done.communicate(timeout=60)
        assert bool(hub.files) is is_published, output
        assert (done.returncode == 0) is is_published
        assert (b"Publish this as me/nim?" in output) is (answer is not None)


def test_upload_sends_every_file_to_the_hub(run: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        code, out, err = upload(run, hub.url, tmp_path / "home", "--private")
        assert code == 0, out + err
        assert f"{hub.url}/me/nim" in out
        assert (hub.created[0]["name"], hub.created[0]["organization"]) == ("nim", "me")
        assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
        assert set(hub.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "config.toml"}
        weights = run / "checkpoints" / "ckpt-2" / "adapter_model.safetensors"
        assert hub.files["adapter_model.safetensors"] == weights.read_bytes()
        assert TOKEN.encode() not in b"".join(hub.files.values())
        assert "## Games" in out and "batch_size = 24" in out.partition("uploading")[0]
        hub.refuses_with = 403
        code, _, err = upload(run, hub.url, tmp_path / "home")
    assert code == 1 and err.count("\n") == 1
    assert "403" in err and "hf auth login" in err
    code, _, err = upload(run, hub.url, tmp_path / "home")  # it is gone
    assert code == 1 and "cannot be reached" in err and "Traceback" not in err
