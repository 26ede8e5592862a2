"""`unstable-lite sft` as a user starts it, and a run that starts from its adapter."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fakes import runs
from fakes.openai_server import chat_reply, serving
from fakes.random_models import make_model
from unstable_lite.cli.app import app
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import ConfigError
from unstable_lite.sft.pairs import read_pairs
from unstable_lite.sft.session import load_sft_plan, run_sft

pytestmark = pytest.mark.timeout(300)

SFT = """
[sft]
players = ["scripted:random"]
pairs = 60
epochs = 2
learning_rate = 1e-3
output = "OUTPUT"
"""

INVALID = ("engine.kind=scripted", 'engine.replies=["[9]"]', 'sft.players=["base"]', 'sft.filter=["valid"]')
"""Overrides with which every turn is left out."""


def write(directory: Path, sft: str = SFT) -> Path:
    path = runs.write_small(directory)
    path.write_text(path.read_text() + sft.replace("OUTPUT", str(directory / "warm")))
    return path


def problems_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_sft_plan(path, overrides)
    return str(caught.value)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory and the output of a warm start."""
    directory = tmp_path_factory.mktemp("warm")
    with mock.patch.dict(os.environ):  # of which a training removes the keys
        code, out, err = runs.invoke("sft", write(directory))
    assert (code, err) == (0, ""), out + err
    return directory, out


def test_sft_leaves_an_adapter_its_pairs_and_its_settings(warm: tuple[Path, str]) -> None:
    directory, out = warm
    made = directory / "warm"
    assert len((made / "pairs.jsonl").read_text().splitlines()) == 60
    how = json.loads((made / "sft.json").read_text())
    assert how["model_name"] == "builtin:tiny" and how["sft"]["players"] == ["scripted:random"]
    assert how["num_pairs"] == 60 and how["left_out"]["not the winner's"] > 0
    assert {path.name for path in (made / "logs").iterdir()} == {"orchestrator.log"}
    metrics = how["metrics"]
    assert metrics["num_trained"] + metrics["num_held_out"] == 60
    assert metrics["train_loss_last_epoch"] < metrics["train_loss_first_epoch"]
    assert re.search(r"^pairs +60, from \d+ games, 0 void$", out, re.M)
    assert re.search(r"^ +loss +[\d.]+ before, [\d.]+ after$", out, re.M)
    assert f"lora.initial_lora_path={made}" in out


@pytest.mark.nightly
def test_run_starts_from_the_adapter_and_refuses_another_shape(warm: tuple[Path, str], tmp_path: Path) -> None:
    start = f"lora.initial_lora_path={warm[0] / 'warm'}"
    out = runs.output_of(runs.run("run", write(tmp_path), start, "run.learning_steps=1", "run.eval_games=0"))
    assert "initial" in out
    code, _, err = runs.run("run", write(tmp_path), start, "lora.lora_rank=8", 'lora.target_modules=["q_proj"]')
    assert code == 1
    assert err.count("error:") == 1 and "Traceback" not in err
    assert "lora_rank" in err and "target_modules" in err


def test_existing_output_is_not_overwritten(warm: tuple[Path, str]) -> None:
    path = warm[0] / "small.toml"
    text = problems_of(path)
    assert "adapter" in text and "pairs" in text
    assert f"sft.data={warm[0] / 'warm' / 'pairs.jsonl'}" in text


@pytest.mark.nightly
def test_base_and_adapter_play_and_collect_only_trains_nothing(warm: tuple[Path, str], tmp_path: Path) -> None:
    adapter = f"adapter:{warm[0] / 'warm'}"
    players = (f'sft.players=["base", "{adapter}", "scripted:random"]', f'sft.imitate=["base", "{adapter}"]')
    out = runs.output_of(runs.invoke("sft", write(tmp_path), *players, "sft.pairs=20", "--collect-only"))
    pairs = [json.loads(line) for line in (tmp_path / "warm" / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 20 and {pair["player"] for pair in pairs} == {"base", adapter}
    assert not (tmp_path / "warm" / "adapter_config.json").exists()
    assert "imitated" in out
    assert f"sft.data={tmp_path / 'warm' / 'pairs.jsonl'}" in out


def test_filter_that_leaves_nothing_is_refused_with_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstable_lite.sft.session.MAX_GAMES", 20)
    ended = CliRunner().invoke(app, ["sft", str(write(tmp_path)), *INVALID])
    assert ended.exit_code == 1
    assert re.search(r"\b20 games\b.*\b0\b.*\b20 turns\b", ended.output)


@pytest.mark.nightly
def test_ctrl_c_during_training_keeps_the_pairs_and_leaves_no_process(warm: tuple[Path, str], tmp_path: Path) -> None:
    given = warm[0] / "warm" / "pairs.jsonl"
    process = runs.start("sft", write(tmp_path), f"sft.data={given}", "sft.players=[]", "sft.epochs=100000")
    output: list[str] = []
    assert process.stdout is not None
    while not any("update 1/" in line for line in output):
        output.append(process.stdout.readline())
        assert output[-1], "".join(output)
    assert not runs.children_of(process)
    process.send_signal(signal.SIGINT)
    code, _, err = runs.finish(process, 30)
    assert code == 130
    assert "Traceback" not in err
    assert (tmp_path / "warm" / "pairs.jsonl").read_text() == given.read_text()
    assert not (tmp_path / "warm" / "adapter_config.json").exists()


def test_dead_engine_ends_the_collection_and_is_named(tmp_path: Path) -> None:
    process = runs.start("sft", write(tmp_path), *INVALID, "engine.kind=fakes.long_games:SlowEngine")
    log = tmp_path / "warm" / "logs" / "engine-0.log"
    assert process.stdout is not None
    while "engine-0 is up" not in (line := process.stdout.readline()):
        assert line
    (engine,) = runs.children_of(process)
    engine.kill()
    code, _, err = runs.finish(process, 30)
    assert code == 1
    assert "engine-0 was killed by SIGKILL" in err and str(log) in err
    assert "Traceback" not in err


def test_endpoint_model_is_imitated_until_its_budget_is_spent_and_training_has_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    with serving() as server:
        server.answer = lambda body: chat_reply("One from the first. \\boxed{[0 1]}")
        players = ('sft.players=["vendor/model", "scripted:random"]', 'sft.imitate=["vendor/model"]', "sft.filter=[]")
        limits = (f'opponents.base_url="{server.url}"', "opponents.max_requests=20", "run.num_collection_workers=2")
        plan = load_sft_plan(write(tmp_path), (*players, *limits))
        console = Console(file=io.StringIO(), width=200)
        record = run_sft(plan, TerminalInterface(console), collect_only=True)
    pairs = read_pairs(tmp_path / "warm" / "pairs.jsonl", {env.env_id for env in plan.config.train_envs})
    assert 0 < record["num_pairs"] == len(pairs) <= 20 == len(server.bodies)
    assert {pair.player for pair in pairs} == {"vendor/model"}
    assert {pair.completion for pair in pairs} == {"One from the first. \\boxed{[0 1]}"}
    assert record["games"] < 30, "no game is played without need"
    assert isinstance(console.file, io.StringIO)
    assert f"{len(pairs)} of 60" in console.file.getvalue()
    data = f"sft.data={tmp_path / 'warm' / 'pairs.jsonl'}"
    on_these = (data, "sft.players=[]", "sft.epochs=1", "engine.max_generation_len=64")
    with mock.patch.dict(os.environ):
        run_sft(load_sft_plan(write(tmp_path), on_these), TerminalInterface(console))
        assert "OPENAI_API_KEY" not in os.environ, "a model's code is not given it"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sft.players=[]"], "sft.players: "),
        (['sft.players=["scripted:perfect"]'], "scripted:perfect"),
        (['sft.players=["no/such-model"]'], "'no/such-model'"),
        (['sft.players=["adapter:/nowhere"]'], "sft.players: "),
        (['sft.players=["run:/nowhere/best"]'], "sft.players: 'run:/nowhere/best': /nowhere is not a run directory"),
        (['sft.imitate=["base"]'], "sft.imitate: 'base'"),
        (['sft.filter=["loosers"]'], "sft.filter.0 = 'loosers'"),
        (["sft.pears=3"], "did you mean 'pairs'"),
        (["engine.temperature=1e-3"], "engine.temperature = 0.001"),
        (["sft.data=/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_impossible_config_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENROUTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert says in problems_of(write(tmp_path), *overrides)


def test_only_engines_that_play_are_judged(tmp_path: Path) -> None:
    model = make_model(tmp_path / "capped", "Gemma2")
    on_it = f"model_name={model}", "engine.kind=transformers", "learner.activation_checkpointing=auto"
    assert load_sft_plan(write(tmp_path), on_it).config.learner.activation_checkpointing is True
    assert "soft cap of 50" in problems_of(write(tmp_path), *on_it, 'sft.players=["base"]')


def test_file_may_already_name_its_own_output_as_the_start(tmp_path: Path) -> None:
    plan = load_sft_plan(write(tmp_path), (f"lora.initial_lora_path={tmp_path / 'warm'}",))
    assert plan.config.lora.initial_lora_path is None
    assert "/elsewhere" in problems_of(write(tmp_path), "lora.initial_lora_path=/elsewhere")
