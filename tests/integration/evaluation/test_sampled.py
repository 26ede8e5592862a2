"""`eval --exact --samples` and `run.exact_samples` estimate from answers what exact evaluation computes."""

import csv
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import unstable_lite
from fakes import runs, sync_runs
from fakes.openai_server import chat_reply, serving
from unstable_lite.cli.app import app
from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel.game_tree import flatten

EXAMPLE = Path(__file__).parents[3] / "examples" / "exploitability_of_a_model.toml"
KUHN = "openspiel:kuhn_poker"
CONFIG = """
model_name = "builtin:tiny-games"
engine = { kind = "transformers", temperature = 0.7, max_generation_len = 12, max_model_len = 512 }
[run]
num_collection_workers = 64
[[train_envs]]
env_id = "openspiel:kuhn_poker"
num_players = 2
num_actors = 2
prompt_template = "tiny"
"""
REPLIES = [f"\\boxed{{[{action}]}}" for action in ("check", "bet", "fold", "call")]
"""Answers of which half are legal in every state, each with probability 1/4."""
SCRIPTED = ("engine.kind=scripted", "engine.max_model_len=2048", "engine.max_generation_len=64")
GUESSING = (*SCRIPTED, f"engine.replies={json.dumps(REPLIES)}")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


def rows_of(
    config: Path, *words: str | int, settings: tuple[str, ...] = (), fails: str | None = None
) -> list[dict[str, str]]:
    """Return the rows of exact.csv after random play. fails: part of the message of a command that must fail."""
    places = ["--config", config, "--output", config.parent]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [*map(str, ("eval", *words, "--exact", *places)), *sets]
    ended = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert ended.exit_code == (fails is not None) and (fails or "") in ended.output, ended.output
    with (config.parent / "exact.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["model"] == "random legal" and rows[0]["answers"] == rows[0]["exploitability_low"] == ""
    if "--samples" in words and fails is None:
        assert all(f"(n={row['answers']})" in ended.output for row in rows[1:])
    return rows[1:]


def test_estimate_covers_the_policy_that_answers(config: Path) -> None:
    tree = flatten(KUHN)
    truth = tree.exploitability([np.full(2, 0.25) for _ in tree.states])
    (row,) = rows_of(config, "base", "--samples", 100, settings=GUESSING)
    assert (row["answers"], row["states"]) == ("1200", "12")
    assert float(row["rest"]) == pytest.approx(0.5, abs=0.06)
    assert float(row["exploitability_low"]) <= truth <= float(row["exploitability_high"])
    assert float(row["exploitability_legal_low"]) <= 11 / 24 <= float(row["exploitability_legal_high"])
    for seat in "01":
        assert sum(float(row[f"{what}_{seat}"]) for what in ("win", "draw", "loss")) == pytest.approx(1)
    called = unstable_lite.exploitability("base", config=config, samples=2, overrides=GUESSING, quiet=True)
    assert [each["answers"] for each in called] == [None, 24]


def test_thinking_of_an_answer_is_read_as_in_play(config: Path) -> None:
    settings = (*SCRIPTED, 'engine.replies=["<think> \\\\boxed{[bet]} so \\\\boxed{[call]}"]')
    (row,) = rows_of(config, "base", "--samples", 2, settings=settings)
    assert row["rest"] == "1.0", "the thought never ends"
    (row,) = rows_of(config, "base", "--samples", 2, settings=(*settings, "engine.thinking_tokens=7"))
    assert row["rest"] == "1.0", "the second generation begins a thought of its own"
    settings = (*SCRIPTED, 'engine.replies=["so I call: \\\\boxed{[call]}"]', "engine.thinking_tokens=7")
    (row,) = rows_of(config, "base", "--samples", 2, settings=settings)
    assert (row["rest"], row["exploitability_legal"]) == ("0.5", ""), "legal only where a bet was made"


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "samples"), [("transformers", 100), pytest.param("vllm", 60, marks=pytest.mark.vllm)])
def test_estimate_agrees_with_the_computed_exploitability(config: Path, kind: str, samples: int) -> None:
    (computed,), settings = rows_of(config, "base"), (f"engine.kind={kind}",)
    (sampled,) = rows_of(config, "base", "--samples", samples, settings=settings)
    for name in ("exploitability", "exploitability_legal"):
        low, high = (float(sampled[f"{name}_{end}"]) for end in ("low", "high"))
        assert low - 0.05 <= float(computed[name]) <= high + 0.05, name
    assert float(sampled["rest"]) == pytest.approx(float(computed["rest"]), abs=0.03)


def test_model_behind_an_endpoint_is_measured(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with serving() as server:

        def answer(body: dict[str, list[dict[str, str]]]) -> tuple[int, object]:
            listed = re.findall(r"\[\w+\]", body["messages"][0]["content"].rpartition("actions:")[2])
            return chat_reply(f"<think>not {listed[0]}</think> \\boxed{{{listed[1]}}}")

        server.answer = answer
        settings = (*GUESSING, f"opponents.base_url={server.url}")
        (row,) = rows_of(config, "vendor/model", "--samples", 8, settings=settings)
    tree = flatten(KUHN)
    always_second = tree.exploitability([np.array([0.0, 1.0]) for _ in tree.states])
    assert (row["model"], row["rest"], len(server.bodies)) == ("vendor/model", "0.0", 96)
    assert float(row["exploitability"]) == pytest.approx(always_second)


def test_results_before_an_error_are_kept(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with serving() as server:
        settings = (*GUESSING, f"opponents.base_url={server.url}", "opponents.max_requests=5")
        rows = rows_of(config, "base", "vendor/model", "--samples", 8, settings=settings, fails="max_requests")
    assert [row["model"] for row in rows] == ["base"]


def test_estimate_needs_two_answers_and_belongs_to_exact_evaluation(config: Path) -> None:
    ended = CliRunner().invoke(app, ["eval", "base", "--samples", "4", "--config", str(config), "--output", "x"])
    assert ended.exit_code == 2 and "--samples is for --exact" in ended.output
    with pytest.raises(ConfigError, match="samples = 1"):
        unstable_lite.exploitability("base", config=config, samples=1, quiet=True)


def test_example_measures_another_model(tmp_path: Path) -> None:
    example = shutil.copy(EXAMPLE, tmp_path)
    settings = (*GUESSING, "model_name=builtin:tiny-games", "engine.devices=auto")
    (row,) = rows_of(Path(example), "base", "--samples", 4, settings=settings)
    assert row["answers"] == "48"


EXACT = (
    "run.exact_every=2",
    "run.exact_samples=200",
    "tracker.keep_tokens=true",
    "run.learning_steps=3",
    "run.eval_games=0",
    "run.num_eval_workers=0",
    f"train_envs=[{{ env_id = '{KUHN}', num_players = 2, num_actors = 2, prompt_template = 'tiny' }}]",
    "eval_envs=[]",
    "league.opponent_sampling_strategy=mirror",
    "league.fixed_opponents=[]",
    "learner.canary_tolerance=10.0",
    *GUESSING,
)


def by_step(directory: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run, those of several lines together."""
    found: dict[int, dict[str, Any]] = {}
    for line in sync_runs.deterministic_metrics(directory):
        found.setdefault(line["step"], {}).update(line)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["async", "sync"])
def test_run_estimates_beside_training_and_a_stopped_one_when_it_resumes(tmp_path: Path, schedule: str) -> None:
    """The resumed run equals an uninterrupted one if its schedule is sync."""
    found = []
    for name in ("stopped", "whole")[: 1 + (schedule == "sync")]:
        (tmp_path / name).mkdir()
        settings = (*EXACT, f"run.schedule={schedule}", "run.num_collection_workers=8", "buffer.max_staleness=2")
        interrupt = {"INTERRUPT": f"2 {signal.SIGTERM}"} if name == "stopped" else {}
        out = runs.output_of(runs.run_torchless("run", runs.write_small(tmp_path / name), *settings, **interrupt))
        if name == "stopped":
            assert "ckpt-2 is saved" in out
            directory = runs.run_directory(tmp_path / name)
            assert f"exploitability/{KUHN}" not in by_step(directory)[2], "the estimate is broken off"
            runs.output_of(runs.run_torchless("run", "--resume", directory))
        found.append(by_step(runs.run_directory(tmp_path / name)))
    lines = {step: line for step, line in found[0].items() if f"exploitability/{KUHN}" in line}
    assert list(lines) == [0, 2]
    for line in lines.values():
        for kind in ("exploitability", "exploitability_legal"):
            low, value, high = (line[f"{kind}{end}/{KUHN}"] for end in ("_low", "", "_high"))
            assert low <= value <= high
        assert 0.2 < line[f"exploitability_other_answers/{KUHN}"] < 0.8
    assert all(each == found[0] for each in found)


def test_check_prints_the_number_of_answers_and_no_env_is_left_out_for_its_extraction(config: Path) -> None:
    settings = ("run.exact_every=10", "run.exact_samples=64", "run.learning_steps=20")
    ended = CliRunner().invoke(app, ["check", str(config), *settings], env={"COLUMNS": "200"})
    assert ended.exit_code == 0, ended.output
    assert "12 decision states × 64 answers = 768, at most 9,216 tokens, × 3" in " ".join(ended.output.split())
