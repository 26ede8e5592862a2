"""`python -m bench acceptance`: on the CPU its stages run in small sizes, and no process outlives it."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.acceptance import command
from bench.acceptance.marked_tests import FOLDERS, add_results
from bench.acceptance.stages import STAGES
from bench.acceptance.whole_runs import _num_rises
from bench.harness import REPOSITORY, Options, Report
from bench.peers import HAS_VLLM
from fakes import runs

ON_CPU = ("facts", "agree", "learner", "handoff", "learning", "sleep", "killed")
"""Stages that need neither a GPU nor vLLM."""


def start(out: Path, *arguments: str, setup: str = "") -> subprocess.Popen[str]:
    """Start the command. `setup`: Python that runs before it."""
    code = f"import runpy, sys; {setup}\nsys.argv[0:1] = ['bench', 'acceptance']\n"
    code += "runpy.run_module('bench', run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(out), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def record(out: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{stage}.json").read_text())
    return found


def test_every_stage_can_be_loaded() -> None:
    assert len(STAGES) == 10
    for stage in STAGES.values():
        assert callable(stage.load())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stages_pass_on_the_cpu_and_are_not_repeated(tmp_path: Path) -> None:
    out, err = (first := start(tmp_path, *ON_CPU, "--device", "cpu")).communicate()
    assert first.returncode == 0, out + err
    for stage in ON_CPU:
        made = record(tmp_path, stage)
        assert (made["result"], made["reason"]) == ("passed", ""), made
        assert made["report"]["ratios"] and made["commit"] and made["device"] == "cpu"
        assert (tmp_path / made["log"]).read_text()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"learning-run", "sleep-run", "killed-run"}

    rest = "tests-learner", "tests-engine"
    out, err = (second := start(tmp_path, "--device", "cpu", "--minutes", "0.5" if HAS_VLLM else "5")).communicate()
    assert second.returncode == 1
    assert all(f"{stage}: passed at" in out for stage in ("facts", "agree")), out
    assert [record(tmp_path, stage)["result"] for stage in rest] == ["needs a GPU"] * 2
    if not HAS_VLLM:
        assert "vLLM is not installed" in record(tmp_path, "offline")["reason"]
        assert all(f"{stage}: passed at" in out for stage in ON_CPU), out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how", ["SIGINT", "stage killed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("SIGTERM", "limit"))]
)
def test_no_process_outlives_the_command(tmp_path: Path, how: str) -> None:
    setup = "from dataclasses import replace; from bench.acceptance.stages import STAGES as all_stages; "
    setup += f"all_stages['killed'] = replace(all_stages['killed'], limit_s={45 if how == 'limit' else 300})"
    process = start(tmp_path, "killed", "--device", "cpu", setup=setup)

    def workers() -> list[psutil.Process]:
        found = []
        for child in runs.children_of(process):
            with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived one may have just ended
                found += [child] if "unstable_lite.transport" in child.cmdline() else []
        return found

    runs.wait_for(lambda: len(workers()) >= 2)
    started = runs.children_of(process)
    match how:
        case "limit":
            for worker in workers():
                worker.send_signal(signal.SIGSTOP)  # the run waits for them
        case "stage killed":
            psutil.Process(process.pid).children()[0].kill()  # the run becomes an orphan
        case _:
            process.send_signal(signal.Signals[how])
    out, err = process.communicate(timeout=120)
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}.get(how, 1), out + err
    assert runs.are_gone(started)
    reasons = {"limit": "did not end within 45 s", "stage killed": "exited with code -9"}
    assert (tmp_path / "killed.json").exists() == (how in reasons)
    if how in reasons:
        made = record(tmp_path, "killed")
        assert made["result"] == "failed" and reasons[how] in made["reason"]


def test_stage_that_failed_does_not_stop_those_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run_stage(name: str, _out: Path, common: dict[str, Any], _deadline: float) -> dict[str, Any] | None:
        ran.append(name)
        result = "failed" if name == "tests-engine" else "passed"
        if len(ran) == 5:  # the end of the first call
            return None
        return {**common, "result": result, "reason": "", "took_s": 1.0, "report": None, "started": ""}

    monkeypatch.setattr(command, "_run_stage", run_stage)
    assert not command._run(tmp_path, [], "cpu", 0, 0.0)
    assert not command._run(tmp_path, [], "cpu", 0, 0.0)
    assert ran == [*list(STAGES)[:5], *list(STAGES)[4:]]


CASES = """<testsuites><testsuite>
<testcase classname="a" name="one" /><testcase classname="a" name="two">{}</testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("inner", "code", "said"),
    [
        ("", 0, []),
        ('<skipped message="vLLM is not installed" />', 0, ["tests skipped is 1", "a::two: vLLM is not installed"]),
        ('<failure message="boom" />', 1, ["tests failed is 1", "a::two: boom", "exit code of pytest is 1"]),
        (None, 4, ["tests passed is 0", "exit code of pytest is 4"]),
    ],
)
def test_skipped_or_failed_tests_fail_their_stage(
    tmp_path: Path, inner: str | None, code: int, said: list[str]
) -> None:
    options = Options(seconds=1.0, rounds=1, minutes=1.0, seed=0, small=False)
    report, results = Report(bench="tests", question="", options=options), tmp_path / "results.xml"
    if inner is not None:
        results.write_text(CASES.format(inner))
    add_results(report, results, code)
    unmet = "; ".join(report.unmet())
    assert bool(unmet) == bool(said) and all(words in unmet for words in said), unmet


def test_every_test_marked_gpu_belongs_to_a_stage() -> None:
    folders = [REPOSITORY / folder for some in FOLDERS.values() for folder in some]
    others = {
        path.name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu\b", path.read_text()) and not any(folder in path.parents for folder in folders)
    }
    assert others == {"test_bench.py"}  # benches are stages themselves


def test_memory_that_an_engine_takes_and_frees_is_counted() -> None:
    assert _num_rises([1, 1, 9, 9, 8, 3, 2, 9, 9, 1], least=5) == 2
    assert _num_rises([1, 3, 1, 3, 1], least=5) == 0
    assert _num_rises([9, 1, 4, 7, 9], least=5) == 1
