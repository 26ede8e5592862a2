"""A run whose eval envs differ only in their sampling, in an env with arguments, and its resumption."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from fakes import runs
from unstable_lite.adapters.frozen import find_saved
from unstable_lite.files import read_records

pytestmark = pytest.mark.nightly
SAMPLINGS = {"scripted:random": None, "scripted:random, greedy": "greedy", "scripted:random, top_p=0.01": "top_p=0.01"}
"""Sampling in games.jsonl by opponent in eval.jsonl."""


def write_config(directory: Path) -> Path:
    path = runs.write_small(directory)
    content = path.read_text()
    env = content[content.index("[[eval_envs]]") :]
    content = content.replace("num_actors = 1", "num_actors = 1\nenv_kwargs = { piles = [2, 3] }\nerror_allowance = 1")
    # The same batches in each run: in other batches, rounding may make another answer the most probable one.
    content = content.replace("learning_steps = 3", 'learning_steps = 1\nschedule = "sync"')
    path.write_text(f"{content}temperature = 0\n{env}top_p = 0.01\n{env}")
    return path


def evaluated(games: list[dict[str, Any]], sampling: str | None) -> dict[tuple[str, str], set[str]]:
    """Return the answers of each model to each observation in evaluations with this sampling."""
    answers = defaultdict(set)
    for game in games:
        if game["kind"] == "eval" and game.get("sampling") == sampling:
            (own,) = [agent for agent in game["agents"] if "opponent" not in agent]
            for pid, observation, text, *_ in game["turns"]:
                if pid == own["pid"]:
                    answers[own["model"], observation].add(text)
    return answers


def test_labels_of_eval_envs_last_over_a_resumption(tmp_path: Path) -> None:
    runs.output_of(runs.run_torchless("run", write_config(tmp_path)))
    directory = runs.run_directory(tmp_path)
    out = runs.output_of(runs.run_torchless("run", "--resume", directory, "run.learning_steps=2"))

    results = read_records(directory / "eval.jsonl")
    assert Counter((line["step"], line["opponent"]) for line in results) == {
        (step, opponent): 1 for step in range(3) for opponent in SAMPLINGS
    }
    games = list(read_records(directory / "games.jsonl"))
    assert {game.get("sampling") for game in games if game["kind"] == "train"} == {None}
    assert all("pile 1: 3" in game["turns"][0][1] for game in games if game["turns"])
    greedy, nearly, as_trained = (evaluated(games, sampling) for sampling in ("greedy", "top_p=0.01", None))
    assert any(len(texts) > 1 for texts in as_trained.values())
    for of_sampling in (greedy, nearly):  # so small a top_p leaves the most probable token
        assert len(of_sampling) > 3 and {len(texts) for texts in of_sampling.values()} == {1}
    logged = {name for line in read_records(directory / "metrics.jsonl") for name in line}
    for opponent in SAMPLINGS:
        assert re.search(rf"update 2  {opponent.removeprefix('scripted:')}  ", out)
        assert f"evaluation-Nim-v0-train ({opponent})/Reward" in logged
    assert find_saved(f"{directory}/best").name in ("ckpt-1", "ckpt-2")
