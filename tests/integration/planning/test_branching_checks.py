"""Branching is checked beside the other problems of envs, and does not hide them."""

from __future__ import annotations

from typing import Any

import pytest

from unstable_lite.config.reading import parse_config
from unstable_lite.planning.validation import find_problems

KUHN, NIM = "openspiel:kuhn_poker", "Nim-v0-train"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"num_players": 5}, "num_players = 5"),
        ({"env_id": "None-v0"}, "None-v0"),
        ({"env_kwargs": {"pile": 3}}, "pile"),
        ({"env_id": "questions:nowhere.jsonl", "num_players": 1}, "nowhere.jsonl"),
        ({"env_id": "openspiel:nowhere"}, "nowhere"),
    ],
)
def test_env_that_does_not_start_is_reported_as_without_branching(env: dict[str, Any], says: str) -> None:
    of, _ = parse_config(
        {
            "algorithm": "rloo",
            "run": {"group_size": 4},
            "branching": {"share": 0.5},
            "train_envs": [
                {"env_id": NIM, "num_players": 2, "num_actors": 1, "prompt_template": "tiny"} | env,
                {"env_id": KUHN, "num_players": 2, "num_actors": 2, "prompt_template": "tiny"},
            ],
        }
    )
    assert of is not None
    found = find_problems(of)
    assert any(says in problem for problem in found)
    assert not any("branching" in problem for problem in found)
