"""Arms of the included studies train in a real run: each bug of the reference, and one arm of other studies."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.harness import REPOSITORY
from bench.study.reading import read_study
from fakes import runs
from unstable_lite.config import Config
from unstable_lite.files import read_records
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
    lines = read_records(runs.run_directory(tmp_path) / "metrics.jsonl")
    updates = [line for line in lines if "learner/loss" in line]
    assert [line["learner/step"] for line in updates] == [1, 2]
    assert all(line["learner/policy_grad_norm"] > 0 and line["canary/doubts"] == 0 for line in updates)
    # The share of tokens without weight is that of stop tokens in one arm, and 0 in the others.
    assert all((line["learner/weight_zero"] > 0) == (arm == "no stop token") for line in updates)
