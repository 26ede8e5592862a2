"""Each bench runs end to end with real processes and writes the promised results; no duration is asserted."""

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import ON_CUDA, bench_names, read_result
from bench.harness import Options, Report, Target

pytestmark = pytest.mark.nightly
REPOSITORY = Path(__file__).parents[3]


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


Results = Callable[[str], dict[str, Any]]
SLOW = ("embedded", "end_to_end", "faults", "handoff", "learner", "ranks", "scale", "sustained")
"""Benches that .ci/run leaves out."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return a function for the checked results of `python -m bench NAME --small`; each bench runs once."""
    directory = tmp_path_factory.mktemp("results")
    return functools.cache(lambda name: result_of(name, directory))


MEASURED = {
    "orchestrator": ("bare env loop", "384 games", "384 games, no games.jsonl", "8 games"),
    "memory": ("384 games", "after the imports"),
    "engine": [
        f"{kind}, {n}" for kind in ("transformers", "scripted") for n in ("base only", "1 adapter", "3 adapters")
    ],
    "handoff": [f"transformers, idle: {step}" for step in ("engine's own load", "2 canaries scored", "first token")],
    "startup": ("python", "import unstable_lite", "check a config"),
    "scale": ("1 engine", "2 engines"),
    "sustained": ("embedded, in a run", "embedded, alone", "paced, in a run", "paced, alone"),
}
"""Rows that a bench must have."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in bench_names()]
)
def test_every_bench_runs_and_writes_its_results(name: str, results: Results) -> None:
    result = results(name)
    assert result["rows"] and result["ratios"]
    rows = measured(result["rows"])
    assert all(rows[row] > 0 for row in MEASURED.get(name, ()))


def result_of(name: str, directory: Path, *arguments: str) -> dict[str, Any]:
    file = directory / f"{name}.json"
    done = run_bench(name, "--small", "--seconds", "0.2", "--rounds", "1", "--json", str(file), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "scale":
        from bench import plan  # imports torch

        assert "\n\n".join(plan.tables()) in done.stdout
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["bench"] == name + "-cuda" * ("cuda" in arguments)
    assert result["small"] is True
    assert {"machine", "packages", "commit", "seed", "date", "sizes", "load_average"} <= result.keys()
    for row in result["rows"] + result["ratios"]:
        assert row["n"] == len(row["samples"])
        if row["n"]:
            assert row["spread"][0] <= row["median"] <= row["spread"][1]
        else:
            assert row["median"] is None
            assert row["remark"] in ("not installed", "not measured")
    return result


def measured(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["name"]: row["median"] for row in rows if row["n"]}


@pytest.mark.slow
def test_learner_bench_checks_that_both_sides_compute_one_gradient(results: Results) -> None:
    result = results("learner")
    ratios = measured(result["ratios"])
    assert ratios["151k vocabulary: tokens/s, ours ÷ reference"] > 0
    assert ratios["151k vocabulary: update's peak memory, a2c ÷ defaults"] > 0
    assert ratios["151k vocabulary: update's peak memory, ours ÷ reference"] < 1
    assert ratios["151k vocabulary: longest sequence in 2 GB, ours ÷ reference"] > 1


@pytest.mark.slow
@pytest.mark.vllm
def test_embedded_bench_measures_the_embedded_engine_and_vllm(results: Results) -> None:
    result = results("embedded")
    assert all(row["median"] > 0 for row in result["rows"])
    assert all(row["median"] > 0 for row in result["ratios"])
    assert [ratio["target"] for ratio in result["ratios"] if ratio["target"]] == ["≥ 5", "≥ 1"]


@pytest.mark.slow
def test_faults_bench_injects_every_kind_and_loses_no_game(results: Results) -> None:
    result = results("faults")
    rows, leaks = measured(result["rows"]), measured(result["ratios"])
    kinds = [name for name in rows if name.endswith("seconds to recover")]
    assert len(kinds) == 8
    assert rows["faults injected"] == rows["faults survived"] == 8
    assert rows["games played"] > 100
    # Negative values: a resource that existed at the beginning ended by itself.
    assert max(leaks.values()) <= 0, (leaks, result["notes"])


def test_result_worse_than_its_baseline_fails_and_is_named(tmp_path: Path, results: Results) -> None:
    baseline = tmp_path / "baseline.json"
    peer_rows = copy.deepcopy(results("memory"))
    for ratio in peer_rows["ratios"]:
        ratio["median"] *= 0.1
    baseline.write_text(json.dumps(peer_rows))
    refused = run_bench("learner", "--small", "--compare", str(baseline))
    assert refused.returncode == 2 and "memory" in refused.stderr
    done = run_bench("memory", "--small", "--seconds", "0.2", "--rounds", "1", "--compare", str(baseline))
    assert done.returncode == 1 and "baseline " in done.stdout, done.stdout
    assert "384 games" in done.stdout.partition("worse than")[2]


OPTIONS = Options(seconds=1.0, rounds=1, minutes=1.0, seed=0, small=False)


def report_with(at_least: float, at_most: float) -> Report:
    report = Report(bench="startup", question="", options=OPTIONS)
    report.add_figure("speed", "×", [at_least], Target(bound="≥", value=2))
    report.add_figure("memory", "MB", [at_most], Target(bound="≤", value=100))
    report.add_ratio("untargeted", report.add("a", "", [1.0]), report.add("b", "", [at_most]))
    return report


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ((4.0, 50.0), (4.0, 50.0), []),
        ((4.0, 50.0), (3.7, 54.0), []),
        ((4.0, 50.0), (9.0, 5.0), []),
        ((4.0, 50.0), (3.5, 50.0), ["speed"]),
        ((4.0, 50.0), (4.0, 56.0), ["memory"]),
        ((4.0, 0.0), (4.0, 1.0), ["memory"]),
        ((4.0, 0.0), (0.0, 0.0), ["speed"]),
        ((4.0, 0.0), None, ["speed, which was not measured", "memory, which was not measured"]),
    ],
)
def test_metric_may_be_worse_than_before_only_within_the_tolerance(
    before: tuple[float, float], after: tuple[float, float] | None, named: list[str]
) -> None:
    report = report_with(*after) if after else Report(bench="startup", question="", options=OPTIONS)
    worse = report.worse_than(report_with(*before).to_json(), tolerance=0.1)
    assert len(worse) == len(named) and all(map(str.startswith, worse, named)), worse


def test_every_baseline_can_be_compared_with_and_has_a_tolerance() -> None:
    for file in (REPOSITORY / "bench" / "baselines").glob("*/*.json"):
        baseline = read_result(file, file.stem, small=False)
        assert 0 < baseline["tolerance"] < 1
        assert any(row["target"] for row in baseline["ratios"])


@pytest.mark.gpu
@pytest.mark.timeout(900)  # each makes a model of 1.7 billion weights and starts up to three engines
@pytest.mark.parametrize("name", ON_CUDA)
def test_bench_runs_on_a_gpu(name: str, tmp_path: Path) -> None:
    result = result_of(name, tmp_path, "--device", "cuda")
    assert result["sizes"]["device"] == "cuda"
    assert all(row["median"] > 0 for row in result["rows"] if row["remark"] != "not installed")


def test_unknown_device_is_refused() -> None:
    for arguments in (("memory", "--device", "cuda"), ("engine", "--device", "tpu")):
        done = run_bench(*arguments)
        assert done.returncode == 2 and "--device" in " ".join(done.stderr.split())
