"""Each bench runs end to end with real processes and writes what it promises; no time is asserted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def result_of(name: str, directory: Path, *arguments: str) -> dict[str, Any]:
    """What `python -m bench NAME --small` writes, after the checks that hold for every bench."""
    file = directory / f"{name}.json"
    done = run_bench(name, "--small", "--seconds", "0.2", "--rounds", "2", "--json", str(file), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["bench"] == name
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


def test_orchestrator_bench_plays_games_beside_the_bare_loop(tmp_path: Path) -> None:
    result = result_of("orchestrator", tmp_path, "--profile")
    rows, ratios = measured(result["rows"]), measured(result["ratios"])
    sides = ("bare env loop", "384 games", "384 games, games.jsonl", "384 games, every game rated", "8 games")
    assert all(rows[side] > 0 for side in sides)
    assert ratios["384 games ÷ bare"] > 0
    assert rows["memory, 384 games"] > 10
    assert any("run_game" in note for note in result["notes"]), "the profile names the game loop"
    assert all(", 0 void" in note for note in result["notes"] if "turns a game" in note)


def test_learner_bench_checks_that_both_sides_compute_one_gradient(tmp_path: Path) -> None:
    result = result_of("learner", tmp_path)
    ratios = measured(result["ratios"])
    for case in ("tiny", "151k vocabulary"):
        assert ratios[f"{case}: tokens/s, ours ÷ reference"] > 0
        assert f"{case}: update's peak memory, ours ÷ reference" in ratios


@pytest.mark.skipif(HAS_VLLM, reason="the test with vLLM covers this one too")
def test_engine_bench_says_what_is_not_installed(tmp_path: Path) -> None:
    result = result_of("engine", tmp_path)
    remarks = {row["name"]: row["remark"] for row in result["rows"]}
    assert remarks["vLLM without LoRA, base only"] == "not installed"
    assert measured(result["ratios"])["embedded ÷ plain generate, base only"] > 0


@pytest.mark.vllm
def test_engine_bench_measures_the_embedded_engine_and_vllm(tmp_path: Path) -> None:
    result = result_of("engine", tmp_path)
    assert all(row["median"] > 0 for row in result["rows"])
    assert all(row["median"] > 0 for row in result["ratios"])


def test_handoff_bench_times_every_step(tmp_path: Path) -> None:
    result = result_of("handoff", tmp_path)
    rows = measured(result["rows"])
    steps = ("engine's own load", "canary scored", "first token", "publish → first token")
    for step in steps:
        assert rows[f"transformers, idle: {step}"] > 0
    assert rows["transformers, under load: longest gap during a load"] > 0


@pytest.mark.slow
def test_faults_bench_strikes_with_every_kind_and_loses_no_game(tmp_path: Path) -> None:
    result = result_of("faults", tmp_path)
    rows, figures = measured(result["rows"]), measured(result["ratios"])
    kinds = [name for name in rows if name.endswith("seconds to recover")]
    assert len(kinds) == 8
    assert rows["faults injected"] == rows["faults survived"] == 8
    assert rows["games played"] > 100
    assert set(figures.values()) == {0.0}, result["notes"]


def test_a_result_is_compared_with_an_earlier_one_of_the_same_bench(tmp_path: Path) -> None:
    row = {"name": "8 games", "median": 1.0}
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"bench": "orchestrator", "date": "2026-01-01", "rows": [row], "ratios": []}))
    refused = run_bench("learner", "--small", "--compare", str(baseline))
    assert refused.returncode == 2
    assert "orchestrator" in refused.stderr
    arguments = ("--small", "--seconds", "0.1", "--rounds", "1", "--compare", str(baseline))
    shown = run_bench("orchestrator", *arguments)
    assert shown.returncode == 0, shown.stderr
    assert "baseline 2026-01-01" in " ".join(shown.stdout.split())


def test_startup_bench_times_what_a_user_waits_for(tmp_path: Path) -> None:
    rows = measured(result_of("startup", tmp_path)["rows"])
    assert all(rows[name] > 0 for name in ("python", "import unstable_lite", "check a config"))


def test_a_result_that_is_worse_than_its_baseline_fails_and_is_named(tmp_path: Path) -> None:
    result_of("startup", tmp_path)
    baseline, file = tmp_path / "baseline.json", tmp_path / "startup.json"
    for factor, is_worse in ((0.1, True), (10.0, False)):
        told = json.loads(file.read_text())
        for ratio in told["ratios"]:
            ratio["median"] *= factor
        baseline.write_text(json.dumps(told))
        done = run_bench("startup", "--small", "--rounds", "1", "--compare", str(baseline))
        assert (done.returncode == 1) == is_worse, done.stdout
        assert ("check a config" in done.stdout.partition("worse than")[2]) == is_worse
