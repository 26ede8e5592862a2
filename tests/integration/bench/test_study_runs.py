"""Arms of the included studies train in a real run, and one with the measuring learner reports its metrics."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.harness import REPOSITORY
from bench.study.reading import read_study
from fakes import run_files, runs
from unstable_lite.config import Config
from unstable_lite.tracking.run_directory import to_toml

STUDIES = REPOSITORY / "examples" / "studies"
BUGS = [arm["name"] for arm in tomllib.loads((STUDIES / "reference_bugs.toml").read_text())["arms"]]
OTHERS = {
    "asynchrony": "bound 32, cap 1",
    "kuhn_regularisation": "KL to average .1",
    "nim_collapse": "groups of 4, half of them branched",
}


def shortened(config: Config, output: Path) -> dict[str, Any]:
    raw = config.model_dump(mode="json", exclude_none=True)
    raw["run"] |= {"learning_steps": 2, "eval_games": 2, "num_collection_workers": 24, "output_dir": str(output)}
    raw["run"].pop("eval_every")
    raw["run"].pop("exact_every", None)
    raw["learner"]["batch_size"] = 24
    return raw


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("study", "arm"), [*(pytest.param("reference_bugs", arm, marks=pytest.mark.slow) for arm in BUGS), *OTHERS.items()]
)
def test_arm_trains(study: str, arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # the patches are no part of the package
    config = read_study(STUDIES / f"{study}.toml").configs[arm]
    (tmp_path / "arm.toml").write_text(to_toml(shortened(config, tmp_path / "outputs")))
    runs.output_of(runs.finish(runs.start("run", tmp_path / "arm.toml")))
    updates = run_files.updates(runs.run_directory(tmp_path))
    assert [line["learner/step"] for line in updates] == [1, 2]
    assert all(line["learner/policy_grad_norm"] > 0 and line["canary/doubts"] == 0 for line in updates)
    # The share of tokens without weight is that of stop tokens in one arm, and 0 in the others.
    assert all((line["learner/weight_zero"] > 0) == (arm == "no stop token") for line in updates)


@pytest.mark.nightly
def test_run_reports_the_variance_of_every_second_update(tmp_path: Path) -> None:
    settings = ("run.learning_steps=3", "run.eval_games=0", "run.num_eval_workers=0")
    measuring = ("algorithm=bench.gradient_variance:MeasuredREINFORCE", "learner.options={every=2,baseline='group'}")
    groups = ("run.group_size=4", "rewards.group_baseline=rloo", "rewards.step_reward_transformation=[]")
    runs.output_of(runs.run("run", runs.write_small(tmp_path), *settings, *measuring, *groups))
    updates = run_files.updates(runs.run_directory(tmp_path))
    measured = ("gradient_variance", "gradient_signal", "gradient_noise", "relative_variance")
    measured += tuple(f"relative_variance_{name}" for name in ("none", "batch", "role", "opponents", "shared", "group"))
    for update, line in enumerate(updates):
        found = [line[f"learner/{name}"] for name in measured if f"learner/{name}" in line]
        assert len(found) == (len(measured) if update % 2 else 0), line
        assert all(map(math.isfinite, found))
    assert len(updates) == 3
    assert updates[1]["learner/gradient_variance"] > 0
    assert updates[1]["learner/relative_variance"] == updates[1]["learner/relative_variance_group"] > 0
