"""Each bench runs end to end with real processes and writes the promised results; no duration is asserted."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import accepted
from bench.__main__ import ON_CUDA, bench_names, with_default
from bench.accepted import machine_class, read_baseline, write_baseline
from bench.harness import Options, Report, Target
from bench.peers import HAS_RAY, HAS_VLLM
from bench.peers.collecting import RAY, ROUNDS, THREADS, VLLM

pytestmark = pytest.mark.nightly
REPOSITORY = Path(__file__).parents[3]


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


Results = Callable[[str], dict[str, Any]]
SLOW = ("embedded", "end_to_end", "faults", "growth", "handoff", "learner", "ranks", "scale", "sustained")
"""Benches that .ci/run leaves out."""
ARGUMENTS = {"orchestrator": ("--profile",)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return a function for the checked results of `python -m bench NAME --small`; each bench runs once."""
    directory = tmp_path_factory.mktemp("results")
    return functools.cache(lambda name: result_of(name, directory, *ARGUMENTS.get(name, ())))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in bench_names()]
)
def test_every_bench_runs_and_writes_its_results(name: str, results: Results) -> None:
    result = results(name)
    assert result["rows"] and result["ratios"]


def result_of(name: str, directory: Path, *arguments: str) -> dict[str, Any]:
    file = directory / f"{name}.json"
    done = run_bench(name, "--small", "--seconds", "0.2", "--rounds", "1", "--json", str(file), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["bench"] == name + "-simulated" * ("--simulate" in arguments) + "-cuda" * ("cuda" in arguments)
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


def test_orchestrator_bench_compares_games_with_the_bare_loop(results: Results) -> None:
    result = results("orchestrator")
    rows, ratios = measured(result["rows"]), measured(result["ratios"])
    sides = ("bare env loop", "384 games", "384 games, no games.jsonl", "384 games, none rated", "8 games")
    assert all(rows[side] > 0 and rows[f"processor time, {side}"] > 0 for side in sides)
    assert ratios["384 games ÷ bare"] > 0
    assert sum(value for name, value in rows.items() if name.startswith("  of these: ")) > 0
    assert any("run_game" in note for note in result["notes"]), "the profile names the game loop"
    assert all(", 0 void" in note for note in result["notes"] if "turns a game" in note)


@pytest.mark.parametrize(
    ("name", "peers"), [("orchestrator", {THREADS, ROUNDS, RAY}), ("collection", {THREADS, ROUNDS, VLLM})]
)
def test_installed_peers_are_measured_in_the_same_run(name: str, peers: set[str], results: Results) -> None:
    peer_rows = {row["name"]: row for row in results(name)["rows"] if row["name"].startswith("peer:")}
    missing = {peer for peer, row in peer_rows.items() if row["remark"] == "not installed"}
    needed = {"Ray task": HAS_RAY, "vLLM": HAS_VLLM}
    assert missing == {peer for peer in peer_rows if any(word in peer and not there for word, there in needed.items())}
    assert all(peer_rows[peer]["median"] > 0 for peer in peer_rows if peer not in missing)
    assert {peer.partition(",")[0] for peer in peer_rows} >= {name.partition(",")[0] for name in peers}


def test_memory_bench_measures_few_and_many_games(results: Results) -> None:
    rows = measured(results("memory")["rows"])
    assert rows["384 games"] > rows["after the imports"] > 10
    assert rows["a process for each ÷ 384 games"] > 1


@pytest.mark.slow
def test_learner_bench_checks_that_both_sides_compute_one_gradient(results: Results) -> None:
    result = results("learner")
    ratios = measured(result["ratios"])
    assert ratios["151k vocabulary: tokens/s, ours ÷ reference"] > 0
    assert ratios["151k vocabulary: update's peak memory, a2c ÷ defaults"] > 0
    assert ratios["151k vocabulary: update's peak memory, ours ÷ reference"] < 1
    assert ratios["151k vocabulary: longest sequence in 2 GB, ours ÷ reference"] > 1
    padding = [value for name, value in ratios.items() if name.startswith("share of padding")]
    assert padding
    assert all(share < 0.05 for share in padding)


@pytest.mark.slow
@pytest.mark.skipif(HAS_VLLM, reason="the test with vLLM covers this one too")
def test_embedded_bench_reports_missing_packages(results: Results) -> None:
    result = results("embedded")
    remarks = {row["name"]: row["remark"] for row in result["rows"]}
    assert remarks["100 + 32: vLLM without LoRA, base only"] == "not installed"
    ratios = measured(result["ratios"])
    assert ratios["100 + 32: embedded ÷ plain generate, base only"] > 0
    assert ratios["100 + 32: embedded with 1 adapter, two workers ÷ one"] > 0


@pytest.mark.slow
@pytest.mark.vllm
def test_embedded_bench_measures_the_embedded_engine_and_vllm(results: Results) -> None:
    result = results("embedded")
    assert all(row["median"] > 0 for row in result["rows"])
    assert all(row["median"] > 0 for row in result["ratios"])
    assert [ratio["target"] for ratio in result["ratios"] if ratio["target"]] == ["≥ 5", "≥ 1"]


def test_engine_bench_measures_every_installed_kind(results: Results) -> None:
    rows = measured(results("engine")["rows"])
    for kind in ("transformers", "scripted", *(["vllm"] if HAS_VLLM else [])):
        assert all(rows[f"{kind}, {adapters}"] > 0 for adapters in ("base only", "1 adapter", "3 adapters"))


@pytest.mark.slow
def test_handoff_bench_times_every_step(results: Results) -> None:
    result = results("handoff")
    rows = measured(result["rows"])
    steps = ("engine's own load", "2 canaries scored", "first token", "publish → first token")
    for step in steps:
        assert rows[f"transformers, idle: {step}"] > 0
    assert rows["transformers, under load: longest gap during a load"] > 0


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


def test_result_is_compared_with_an_earlier_one_of_the_same_bench(tmp_path: Path) -> None:
    row = {"name": "check a config", "median": 1.0}
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"bench": "startup", "date": "2026-01-01", "rows": [row], "ratios": []}))
    refused = run_bench("learner", "--small", "--compare", str(baseline))
    assert refused.returncode == 2
    assert "startup" in refused.stderr
    shown = run_bench("startup", "--small", "--rounds", "1", "--compare", str(baseline))
    assert shown.returncode == 0, shown.stderr
    assert "baseline 2026-01-01" in " ".join(shown.stdout.split())


def test_startup_bench_times_the_commands_of_a_user(results: Results) -> None:
    rows = measured(results("startup")["rows"])
    assert all(rows[name] > 0 for name in ("python", "import unstable_lite", "check a config"))


def test_result_worse_than_its_baseline_fails_and_is_named(tmp_path: Path, results: Results) -> None:
    baseline = tmp_path / "baseline.json"
    peer_rows = copy.deepcopy(results("startup"))
    for ratio in peer_rows["ratios"]:
        ratio["median"] *= 0.1
    baseline.write_text(json.dumps(peer_rows))
    done = run_bench("startup", "--small", "--rounds", "1", "--compare", str(baseline))
    assert done.returncode == 1, done.stdout
    assert "check a config" in done.stdout.partition("worse than")[2]


@pytest.mark.slow
def test_scale_bench_drives_real_engines_with_every_policy(results: Results) -> None:
    result = results("scale")
    rows = measured(result["rows"])
    assert all(rows[name] > 0 for name in ("1 engine", "2 engines", "2 engines, in turn", "2 engines, by chance"))
    assert "2 engines ÷ 2 × 1 engine" in measured(result["ratios"])


@pytest.mark.slow
def test_scale_bench_compares_its_simulation_with_real_engines(tmp_path: Path) -> None:
    result = result_of("scale", tmp_path, "--simulate")
    rows, ratios = measured(result["rows"]), measured(result["ratios"])
    assert rows["orchestrator, processor time of a turn"] > 0
    assert rows["bytes of a turn of 400 + 1000 tokens"] > 400 * 8 + 1000 * 12
    for number in ("1 engine", "2 engines"):
        assert rows[f"{number}, simulated"] > 0
        assert ratios[f"{number}: real ÷ simulated"] > 0
    assert len(result["tables"]) == 6
    assert [row[0] for row in result["tables"][0]["rows"]] == [1, 2, 4]
    plot = ElementTree.parse(tmp_path / "scale.svg").getroot()
    assert len(plot.findall(".//{*}polyline")) > 10


def report_with(at_least: float, at_most: float) -> Report:
    options = Options(seconds=1.0, rounds=1, minutes=1.0, seed=0, small=False, profile=False)
    report = Report(bench="startup", question="", options=options)
    report.add_figure("speed", "×", [at_least], Target(bound="≥", value=2))
    report.add_figure("memory", "MB", [at_most], Target(bound="≤", value=100))
    report.add_ratio("untargeted", report.add("a", "", [1.0]), report.add("b", "", [at_most]))
    return report


@pytest.mark.parametrize(
    ("at_least", "at_most", "named"),
    [(4.0, 50.0, []), (3.7, 54.0, []), (9.0, 5.0, []), (3.5, 50.0, ["speed"]), (4.0, 56.0, ["memory"])],
)
def test_metric_may_be_worse_than_accepted_only_within_the_tolerance(
    tmp_path: Path, at_least: float, at_most: float, named: list[str]
) -> None:
    path = tmp_path / machine_class() / "startup.json"
    write_baseline(path, report_with(4.0, 50.0).to_json(), tolerance=0.1)
    baseline = read_baseline(path, "startup", small=False)
    assert [
        peer_rows.split()[0] for peer_rows in report_with(at_least, at_most).worse_than(baseline, baseline["tolerance"])
    ] == (named)


def test_missing_and_no_longer_zero_metrics_are_worse() -> None:
    before = report_with(4.0, 0.0).to_json()
    options = Options(seconds=1.0, rounds=1, minutes=1.0, seed=0, small=False, profile=False)
    assert Report(bench="startup", question="", options=options).worse_than(before, 0.2) == [
        "speed, which was not measured",
        "memory, which was not measured",
    ]
    assert [peer_rows.split()[0] for peer_rows in report_with(4.0, 1.0).worse_than(before, 0.2)] == ["memory"]
    assert [peer_rows.split()[0] for peer_rows in report_with(0.0, 0.0).worse_than(before, 0.2)] == ["speed"]


def test_compare_defaults_to_the_accepted_result_or_lists_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_default(["startup", "--compare", "--seed", "1"]) == ["startup", "--compare", "accepted", "--seed", "1"]
    assert with_default(["startup", "--compare"]) == ["startup", "--compare", "accepted"]
    assert with_default(["startup", "--compare", "a.json"]) == ["startup", "--compare", "a.json"]
    monkeypatch.setattr(accepted, "BASELINES", tmp_path)
    (tmp_path / "another-machine").mkdir()
    (tmp_path / "another-machine" / "startup.json").write_text("{}")
    with pytest.raises(ValueError, match=r"another-machine.*--accept"):
        read_baseline(accepted.baseline_path("startup"), "startup", small=False)


def test_every_accepted_result_can_be_read_and_has_a_tolerance() -> None:
    for file in accepted.BASELINES.glob("*/*.json"):
        baseline = read_baseline(file, file.stem, small=False)
        assert 0 < baseline["tolerance"] < 1
        assert any(row["target"] for row in baseline["ratios"])


@pytest.mark.slow
def test_growth_bench_has_a_row_for_every_size(results: Results) -> None:
    tables = {table["title"]: table["rows"] for table in results("growth")["tables"]}
    assert {title: [row[0] for row in rows] for title, rows in tables.items()} == {
        "a turn, by games": [8, 64],
        "a turn, by characters before each prompt": [0, 1000],
        "a turn, by adapters alive": [1, 2],
        "buffer": [384, 1536],
        "a run of many updates": [10, 100],
    }
    assert all(value > 0 for rows in tables.values() for row in rows for value in row[1:])


@pytest.mark.slow
def test_sustained_bench_repeats_the_prompts_of_a_run_on_the_same_engine(results: Results) -> None:
    result = results("sustained")
    rows = measured(result["rows"])
    for kind in ("embedded", "paced"):
        assert rows[f"{kind}, in a run"] > 0
        assert rows[f"{kind}, alone"] > 0
        assert f"{kind}: in a run ÷ alone" in measured(result["ratios"])


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
