"""Keys of the loss and the learning rate that contradict each other are refused by name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from unstable_lite.config.reading import parse_config
from unstable_lite.planning.objective import objective_problems
from unstable_lite.planning.validation import find_problems

ENV = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}


def problems_of(algorithm: str = "reinforce", **sections: Any) -> list[str]:
    config, problems = parse_config({"train_envs": [ENV], "algorithm": algorithm, **sections})
    assert config is not None, problems
    return list(objective_problems(config))


@pytest.mark.parametrize(
    ("algorithm", "learner", "says"),
    [
        ("reinforce", {"learning_rate_warmup": 200}, "learner.learning_rate_warmup = 200: the run ends after"),
        ("reinforce", {"entropy_target": 0.5}, "learner.entropy_target: .* learner.entropy_coefficient must be above"),
        ("reinforce", {"entropy_target": 12.0, "entropy_coefficient": 0.01}, "learner.entropy_target = 12: a token of"),
        ("reinforce", {"clip_range_high": 0.28}, "learner.clip_range_high: reinforce does not clip"),
        ("a2c", {"clip_range_high": 0.28}, "learner.clip_range_high: a2c does not clip"),
        (
            "grpo",
            {"importance_weight_mode": "mask", "importance_weight_cap": 1.0},
            "learner.importance_weight_mode = 'mask' with importance_weight_cap = 1 ",
        ),
    ],
)
def test_contradiction_is_refused_by_name(algorithm: str, learner: dict[str, Any], says: str) -> None:
    (problem,) = problems_of(algorithm, learner=learner)
    assert re.match(says, problem), problem


def test_contradictions_reach_check() -> None:
    config, _ = parse_config({"train_envs": [ENV], "learner": {"learning_rate_warmup": 200}})
    assert config is not None
    assert any("learning_rate_warmup" in problem for problem in find_problems(config))


def test_combinations_that_mean_something_are_accepted() -> None:
    gspo = {"importance_weight_level": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4}
    assert problems_of("grpo", run={"group_size": 8}, learner=gspo) == []
    target = {"entropy_target": 0.5, "entropy_coefficient": 0.001}
    assert problems_of(learner={"learning_rate_warmup": 199, "learning_rate_schedule": "cosine", **target}) == []
    assert problems_of("module:Class", learner={"clip_range_high": 0.28}) == []
    magnet = {"kl_reference": "average", "kl_coefficient": 0.1, "importance_weight_mode": "mask"}
    assert problems_of("ppo", learner=magnet) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("adam_betas", [0.9, 1.0]),
        ("adam_betas", [-0.1, 0.9]),
        ("adam_betas", [0.9]),
        ("adam_betas", [0.9, math.nan]),
        ("kl_average_decay", 1.0),
        ("kl_average_decay", math.nan),
        ("entropy_target", 0.0),
        ("clip_range_high", 0.0),
        ("learning_rate_warmup", -1),
        ("learning_rate_schedule", "step"),
        ("importance_weight_level", "turn"),
        ("importance_weight_mode", "drop"),
        ("kl_reference", "magnet"),
    ],
)
def test_value_outside_its_range_is_refused_by_name(key: str, value: Any) -> None:
    _, problems = parse_config({"train_envs": [ENV], "learner": {key: value}})
    assert problems and all(f"learner.{key}" in problem for problem in problems), problems


def test_grpo_may_leave_out_the_division_and_rloo_may_not_change_its_baseline() -> None:
    def group_problems(algorithm: str) -> list[str]:
        raw = {"algorithm": algorithm, "run": {"group_size": 4}, "rewards": {"group_baseline": "mean"}}
        config, _ = parse_config({"train_envs": [ENV], **raw})
        assert config is not None
        return [problem for problem in find_problems(config) if "group_baseline" in problem]

    assert group_problems("grpo") == group_problems("reinforce") == []
    assert len(group_problems("rloo")) == 1
