from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from fakes import runs
from fakes.handmade_adapters import write_run
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.evaluation.resampling import kept_observations, resample
from unstable_lite.tracking.diversity import entropy

NIM = "Nim-v0-train"


def game(turns: list[tuple[int, str]], env_id: str = NIM, end: str = "natural") -> str:
    agents = [{"pid": 0, "model": "ckpt-1"}, {"pid": 1, "model": "fixed-scripted:random"}]
    saved = [[pid, observation, "text", "action", True, 0.0] for pid, observation in turns]
    return json.dumps({"env_id": env_id, "agents": agents, "turns": saved, "end": end}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=2)
    (made / "games.jsonl").write_text(
        game([(0, "a"), (1, "the opponent's"), (0, "b")])
        + game([(0, "a"), (0, "c")])
        + game([(0, "of another env")], env_id="TicTacToe-v0-train")
        + game([(0, "void")], end="void")
    )
    return made


def test_observations_are_those_of_the_served_models_each_once(run: Path) -> None:
    assert sorted(kept_observations(run, NIM, 10)) == ["a", "b", "c"]
    assert kept_observations(run, NIM, 2) == kept_observations(run, NIM, 2)
    assert len(kept_observations(run, NIM, 2)) == 2
    with pytest.raises(ConfigError, match="LiarsDice"):
        kept_observations(run, "LiarsDice-v0-small", 2)


def test_entropy_matches_the_frequencies() -> None:
    assert entropy([8], 8) == pytest.approx(0)
    assert entropy([1, 1, 1, 1], 4) == pytest.approx(math.log(4))
    assert entropy([2, 1, 1], 4) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


@pytest.mark.parametrize(
    ("replies", "expected"), [(["\\boxed{[1 1]}"], 0.0), (["\\boxed{[1 1]}", "\\boxed{[2 1]}"], 0.6)]
)
def test_every_model_is_resampled_and_an_open_choice_has_entropy(
    run: Path, tmp_path: Path, replies: list[str], expected: float
) -> None:
    settings = ("engine.kind=scripted", f"engine.replies={json.dumps(replies)}", "engine.max_generation_len=32")
    sets = [word for setting in settings for word in ("--set", setting)]
    code, _, err = runs.run("resample", run, "--samples", "200", "--output", tmp_path / "r.csv", *sets)
    assert code == 0, err
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["base", "ckpt-1", "ckpt-2"]
    for row in rows:
        assert (row["n"], row["samples"], float(row["correct_answer_format"])) == ("3", "200", 1.0)
        assert float(row["distinct_actions"]) == len(replies)
        assert expected <= float(row["action_entropy"]) <= math.log(len(replies)) + 1e-6
        assert float(row["low"]) <= float(row["action_entropy"]) <= float(row["high"])


async def test_model_that_no_engine_serves_is_refused(run: Path) -> None:
    plan = plan_evaluation(["scripted:random"], output=run, config=run / "config.toml", opponents=["base"])
    with pytest.raises(ConfigError, match="scripted:random"):
        await resample(plan, run, observations=1, samples=2, say=lambda _: None)


def test_unanswerable_observation_is_one_message_and_keeps_rows(run: Path, tmp_path: Path) -> None:
    with (run / "games.jsonl").open("a") as file:
        file.write(game([(0, "too long " * 2000)], env_id="TicTacToe-v0-train"))
    arguments = ("--samples", "2", "--env", NIM, "--env", "TicTacToe-v0-train", "--output", tmp_path / "r.csv")
    code, out, err = runs.run("resample", run, *arguments, "--set", "engine.kind=scripted")
    assert code == 1
    assert "Traceback" not in out + err
    assert "error: " in err and "prompt" in err.splitlines()[-1]
    with (tmp_path / "r.csv").open(newline="") as file:
        assert [(row["model"], row["env_id"]) for row in csv.DictReader(file)] == [
            (model, NIM) for model in ("base", "ckpt-1", "ckpt-2")
        ]


async def test_unwritable_output_is_refused_before_an_engine_starts(run: Path, tmp_path: Path) -> None:
    for output in (tmp_path / "nowhere" / "r.csv", tmp_path):
        plan = plan_evaluation(["base"], output=output, config=run / "config.toml", opponents=["base"])
        with pytest.raises(ConfigError, match=f"--output {output}: "):
            await resample(plan, run, observations=1, samples=2, say=pytest.fail)
