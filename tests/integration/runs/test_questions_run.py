"""A run that trains a game and asks questions: the order of questions, scores on disk, and the file's digest."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fakes.runs import invoke, output_of, run_torchless, write_small
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.reading import read_config
from unstable_lite.files import read_records
from unstable_lite.games.env_pool import opened_env_pool
from unstable_lite.games.questions import read_questions
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.tracking.intervals import points_interval
from unstable_lite.tracking.run_directory import lasting_changes
from unstable_lite.types import ModelRef


def write_questions(path: Path, answers: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": a}) + "\n" for n, a in enumerate(answers)))
    return path


def write_config(directory: Path, questions: Path) -> Path:
    path = write_small(directory)
    # A scripted engine's log-probabilities are invented: no learner would agree with them.
    text = path.read_text().replace('"transformers"', '"scripted"\nreplies = ["\\\\boxed{0.50}"]')
    text = text.replace("[learner]", "[learner]\ncanary_tolerance = 1e9\nthreads = 1")
    env = f'[[eval_envs]]\nenv_id = "questions:{questions}"\nnum_players = 1\nprompt_template = "tiny"\n'
    path.write_text(text + env)
    return path


def test_run_scores_questions_beside_its_games_and_is_not_resumed_with_others(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "set.jsonl", ["1/2", 7, "half", 0.5])
    out = output_of(run_torchless("run", write_config(tmp_path, questions), "run.learning_steps=1", "run.eval_games=6"))
    (made,) = (tmp_path / "outputs").glob("*/*")
    lines = [line for line in read_records(made / "eval.jsonl") if line["env_id"] == f"questions:{questions}"]
    for line in (line for line in lines if line["label"] != "concurrent"):
        assert (line["n"], line["wins"], line["points"]) == (6, 3, 0.5)
        assert tuple(line["interval"]) == pytest.approx(points_interval(3, 0, 3))
        assert line["scores"] == [[1], [0], [0], [1], [1], [0]]
    assert {line["label"] for line in lines} >= {"before", "after"}
    assert re.search(r"update 0  questions:\S*…\S*set\.jsonl +50\.0 % \(", out)

    config, _ = read_config(made / "config.toml")
    assert not [*lasting_changes(made, config)]
    write_questions(questions, ["1/2", 7, "half", 0.6])
    read_questions.cache_clear()
    code, _, err = invoke("run", "--resume", made, "run.learning_steps=2")
    assert code != 0 and f"{questions} changed since the run began" in err and "Restore the file" in err
    (made / "versions.json").write_text("{}")  # a run of an earlier version
    assert not [*lasting_changes(made, config)]

    output = tmp_path / "offline"
    offline = ("eval", "base", "--config", made / "config.toml", "--output", output, "--env", f"questions:{questions}")
    output_of(invoke(*offline, "--games", "5"))
    assert [row["outcome"] for row in sorted(read_records(output / "results.jsonl"), key=lambda row: row["game"])] == [
        "win", "loss", "loss", "loss", "win"
    ]  # fmt: skip


async def test_isolated_question_is_the_same_as_in_this_process(tmp_path: Path) -> None:
    env_id = f"questions:{write_questions(tmp_path / 'set.jsonl', [1, 2])}"
    env = EvalEnvSpec(env_id=env_id, num_players=1, isolated=True)
    spec = new_game(env, [ModelRef(uid="base", kind="checkpoint", adapter_version=0)], 0, "eval", seed=3)
    async with opened_env_pool(tmp_path, 20) as pool:
        game = await pool.make(spec)
        assert game.observe() == (0, "1?")
        assert await game.advance("2") is None
        assert game.close()[0] == {0: 1.0}
