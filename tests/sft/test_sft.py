"""`unstable-lite sft` as a user starts it, and the run that goes on from what it made."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import runs
from openai_server import said, serving
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.plan import find_problems
from unstable_lite.sft.pairs import read_pairs
from unstable_lite.sft.session import load_sft_plan, run_sft
from unstable_lite.trackers.terminal import TerminalInterface

pytestmark = pytest.mark.timeout(300)

MakeConfig = Callable[..., Config]
SFT = """
[sft]
players = ["scripted:random"]
pairs = 60
epochs = 2
learning_rate = 1e-3
output = "OUTPUT"
"""


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
    """The directory and the output of one warm start."""
    directory = tmp_path_factory.mktemp("warm")
    code, out, err = runs.run("sft", write(directory))
    assert code == 0, out + err
    assert err == ""
    return directory, out


def test_it_leaves_an_adapter_its_pairs_and_how_it_was_made(warm: tuple[Path, str]) -> None:
    directory, out = warm
    made = directory / "warm"
    assert len((made / "pairs.jsonl").read_text().splitlines()) == 60
    how = json.loads((made / "sft.json").read_text())
    assert how["model_name"] == "builtin:tiny" and how["sft"]["players"] == ["scripted:random"]
    assert how["num_pairs"] == 60 and how["left_out"]["not the winner's"] > 0
    assert {path.name for path in (made / "logs").iterdir()} == {"orchestrator.log", "sft.log"}
    figures = how["figures"]
    assert figures["num_trained"] + figures["num_held_out"] == 60
    assert figures["train_loss_last_epoch"] < figures["train_loss_first_epoch"]
    assert re.search(r"^pairs +60, from \d+ games, 0 void$", out, re.M)
    assert re.search(r"^ +loss +[\d.]+ before, [\d.]+ after$", out, re.M)
    assert f"lora.initial_lora_path={made}" in out


def test_a_run_starts_from_it_and_from_nothing_else(warm: tuple[Path, str], tmp_path: Path) -> None:
    start = f"lora.initial_lora_path={warm[0] / 'warm'}"
    code, out, err = runs.run("run", write(tmp_path), start, "run.learning_steps=1", "run.eval_games=0")
    assert code == 0, out + err
    assert "agree about initial" in out
    code, _, err = runs.run("run", write(tmp_path), start, "lora.lora_rank=8", 'lora.target_modules=["q_proj"]')
    assert code == 1
    assert err.count("error:") == 1 and "Traceback" not in err
    assert "lora_rank is 32 there, 8 here" in err and "target_modules is ['down_proj'" in err


def test_what_is_there_is_not_overwritten(warm: tuple[Path, str]) -> None:
    path = warm[0] / "small.toml"
    assert "holds an adapter already" in (text := problems_of(path)) and "has pairs already" in text
    assert f"sft.data={warm[0] / 'warm' / 'pairs.jsonl'}" in text


def test_the_base_and_an_adapter_play_and_nothing_is_trained_if_so_asked(
    warm: tuple[Path, str], tmp_path: Path
) -> None:
    adapter = f"adapter:{warm[0] / 'warm'}"
    players = (f'sft.players=["base", "{adapter}", "scripted:random"]', f'sft.imitate=["base", "{adapter}"]')
    code, out, err = runs.run("sft", write(tmp_path), *players, "sft.pairs=20", "--collect-only")
    assert code == 0, out + err
    pairs = [json.loads(line) for line in (tmp_path / "warm" / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 20 and {pair["player"] for pair in pairs} == {"base", adapter}
    assert not (tmp_path / "warm" / "adapter_config.json").exists()
    assert "by a player that is not imitated" in out
    assert f"sft.data={tmp_path / 'warm' / 'pairs.jsonl'}" in out


def test_a_filter_that_leaves_nothing_is_refused_with_its_counts(tmp_path: Path) -> None:
    answers = ("engine.kind=scripted", 'engine.replies=["[9]"]', 'sft.players=["base"]')
    code, _, err = runs.run("sft", write(tmp_path), *answers, 'sft.filter=["valid"]', "sft.max_games=20")
    assert code == 1
    assert "the filter leaves nothing of 20 games (0 of them void): 20 turns not valid" in err
    assert "Traceback" not in err


def test_ctrl_c_while_training_on_given_pairs_leaves_them_and_no_process(
    warm: tuple[Path, str], tmp_path: Path
) -> None:
    given = warm[0] / "warm" / "pairs.jsonl"
    process = runs.start("sft", write(tmp_path), f"sft.data={given}", "sft.players=[]", "sft.epochs=100000")
    output: list[str] = []
    assert process.stdout is not None
    while not any("update 1/" in line for line in output):
        output.append(process.stdout.readline())
        assert output[-1], "".join(output)
    children = runs.children_of(process)
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    code, _, err = runs.finish(process, 30)
    assert code == 130
    assert "Traceback" not in err
    runs.wait_for(lambda: runs.are_gone(children), 5)
    assert (tmp_path / "warm" / "pairs.jsonl").read_text() == given.read_text()
    assert not (tmp_path / "warm" / "adapter_config.json").exists()


def test_an_engine_that_dies_while_games_are_collected_ends_it_and_is_named(tmp_path: Path) -> None:
    answers = ("engine.kind=scripted", 'engine.replies=["[9]"]', 'sft.players=["base"]', 'sft.filter=["valid"]')
    process = runs.start("sft", write(tmp_path), *answers, "sft.max_games=1000000")
    log = tmp_path / "warm" / "logs" / "engine-0.log"
    assert process.stdout is not None
    while "engine-0 is up" not in (line := process.stdout.readline()):
        assert line
    (engine,) = runs.children_of(process)
    engine.kill()
    code, _, err = runs.finish(process, 30)
    assert code == 1
    assert f"engine-0 was killed by SIGKILL; the last lines of {log}" in err
    assert "Traceback" not in err


def test_a_model_behind_an_endpoint_is_imitated_word_by_word_until_its_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    with serving() as server:
        server.answer = lambda body: said("One from the first. \\boxed{[0 1]}")
        players = ('sft.players=["vendor/model", "scripted:random"]', 'sft.imitate=["vendor/model"]', "sft.filter=[]")
        limits = (f'opponents.base_url="{server.url}"', "opponents.max_requests=20", "run.num_collection_workers=2")
        plan = load_sft_plan(write(tmp_path), (*players, *limits))
        console = Console(file=io.StringIO(), width=200)
        summary = asyncio.run(run_sft(plan, TerminalInterface(console), collect_only=True))
    pairs = read_pairs(tmp_path / "warm" / "pairs.jsonl")
    assert 0 < summary.num_pairs == len(pairs) <= 20 == len(server.bodies)
    assert {(pair.player, pair.completion) for pair in pairs} == {
        ("vendor/model", "One from the first. \\boxed{[0 1]}")
    }
    assert summary.collected is not None and summary.collected.games < 30, "nothing is played in vain"
    assert isinstance(console.file, io.StringIO)
    assert f"only {len(pairs)} of 60 pairs" in console.file.getvalue()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["sft.players=[]"], "sft.players: name who plays, or give pairs as sft.data"),
        (['sft.players=["scripted:perfect"]'], "scripted:perfect"),
        (['sft.players=["no/such-model"]'], "opponent 'no/such-model' needs an API key"),
        (['sft.players=["adapter:/nowhere"]'], "sft.players: /nowhere has no adapter_model.safetensors"),
        (['sft.imitate=["base"]'], "sft.imitate: 'base' is none of sft.players"),
        (['sft.filter=["loosers"]'], "sft.filter.0 = 'loosers'"),
        (["sft.pears=3"], "did you mean 'pairs'"),
        (["engine.temperature=1e-3"], "engine.temperature = 0.001: below 0.01"),
        (["sft.data=/nowhere.jsonl"], "sft.data: there is no file /nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENROUTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert says in problems_of(write(tmp_path), *overrides)


def test_a_file_may_already_name_its_own_output_as_the_runs_start(tmp_path: Path) -> None:
    plan = load_sft_plan(write(tmp_path), (f"lora.initial_lora_path={tmp_path / 'warm'}",))
    assert plan.config.lora.initial_lora_path is None
    assert "/elsewhere has no adapter_model.safetensors" in problems_of(
        write(tmp_path), "lora.initial_lora_path=/elsewhere"
    )


def test_an_adapter_that_is_none_is_one_clear_problem(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    (problem,) = find_problems(make_config(lora={"initial_lora_path": tmp_path}))
    assert "has no adapter_model.safetensors" in problem
    save_file({"base_model.model.q_proj.lora_A.weight": np.ones((2, 2))}, tmp_path / "adapter_model.safetensors")
    (problem,) = find_problems(make_config(lora={"initial_lora_path": tmp_path}))
    assert "peft_type is 'PROMPT_TUNING'" in problem
