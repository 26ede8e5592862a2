"""`probe --samples` counts what models answer, and agrees with the computed probabilities."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakes import runs
from fakes.handmade_adapters import write_run
from unstable_lite.cli.app import app
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.evaluation.probing import probe_by_samples

NIM = "Nim-v0-train"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=2)


def rows_of(run: Path, *arguments: str | int) -> list[dict[str, str]]:
    output = run / "probe.csv"
    ended = CliRunner().invoke(app, ["probe", *map(str, (run, *arguments)), "--env", NIM, "--output", str(output)])
    assert ended.exit_code == 0, ended.output
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("replies", "entropy", "rest"),
    [
        (["\\boxed{[0 1]}", "\\boxed{[1 1]}"], (0.0, 2.0), (0.02, 0.9)),  # legal as long as these piles are not empty
        (["\\boxed{resign}"], (0.0, 0.0), (1.0, 1.0)),  # no entropy of nothing
    ],
)
def test_shares_and_entropy_are_those_of_the_answers(
    run: Path, replies: list[str], entropy: tuple[float, float], rest: tuple[float, float]
) -> None:
    settings = (
        "engine.kind=scripted",
        f"engine.replies={json.dumps(replies)}",
        "engine.max_model_len=2048",
        "engine.max_generation_len=32",
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    rows = rows_of(run, "--games", "4", "--samples", "50", *sets)
    assert [row["model"] for row in rows] == ["base", "ckpt-1", "ckpt-2"]
    for row in rows:
        assert rest[0] <= float(row["rest"]) <= rest[1]
        assert float(row["rest_low"]) <= float(row["rest"]) <= float(row["rest_high"])
        if rest == (1.0, 1.0):
            assert row["action_entropy_n"] == "0"
        else:
            assert entropy[0] <= float(row["action_entropy"]) <= entropy[1] + 1e-6
        assert row["state_dependence"] == ""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "games", "samples", "tolerance"),
    [("transformers", 4, 200, 0.02), pytest.param("vllm", 2, 30, 0.1, marks=pytest.mark.vllm)],
)
def test_sampled_shares_agree_with_the_computed_ones(
    run: Path, kind: str, games: int, samples: int, tolerance: float
) -> None:
    hot = ("base", "--games", games, "--set", "engine.temperature=0.7", "--set", f"engine.kind={kind}")
    (*_, computed), (sampled,) = rows_of(run, *hot), rows_of(run, *hot, "--samples", samples)
    for metric in ("optimal", "rest"):
        assert float(sampled[metric]) == pytest.approx(float(computed[metric]), abs=tolerance), metric
    assert float(sampled["action_entropy"]) <= float(computed["action_entropy"]) + tolerance


async def test_model_that_no_engine_serves_is_refused(run: Path) -> None:
    plan = plan_evaluation(["scripted:random"], output=run, config=run / "config.toml", opponents=["base"])
    with pytest.raises(ConfigError, match="scripted:random"):
        await probe_by_samples(plan, games=1, samples=2, logs=run / "logs", say=pytest.fail)
