"""A run with groups and the measuring learner reports the variance of its gradient."""

import json
import math
from pathlib import Path

import pytest

from fakes import runs


@pytest.mark.nightly
def test_run_reports_the_variance_of_every_second_update(tmp_path: Path) -> None:
    settings = ("run.learning_steps=3", "run.eval_games=0", "run.num_eval_workers=0")
    measuring = ("algorithm=bench.gradient_variance:MeasuredREINFORCE", "learner.options={every=2,baseline='group'}")
    groups = ("run.group_size=4", "rewards.group_baseline=rloo", "rewards.step_reward_transformation=[]")
    runs.output_of(runs.run("run", runs.write_small(tmp_path), *settings, *measuring, *groups))
    lines = [json.loads(line) for line in (runs.run_directory(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "learner/loss" in line]
    measured = ("gradient_variance", "gradient_signal", "gradient_noise", "relative_variance")
    measured += tuple(f"relative_variance_{name}" for name in ("none", "batch", "role", "opponents", "shared", "group"))
    for update, line in enumerate(updates):
        found = [line[f"learner/{name}"] for name in measured if f"learner/{name}" in line]
        assert len(found) == (len(measured) if update % 2 else 0), line
        assert all(map(math.isfinite, found))
    assert len(updates) == 3
    assert updates[1]["learner/gradient_variance"] > 0
    assert updates[1]["learner/relative_variance"] == updates[1]["learner/relative_variance_group"] > 0
