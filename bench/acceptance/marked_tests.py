"""Stages `tests-learner` and `tests-engine`: the tests marked gpu, one at a time; all must pass, none is skipped."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from bench.harness import REPOSITORY, Options, Report, Target
from unstable_lite.engines.devices import count_gpus

FOLDERS = {
    "tests-learner": ("tests/integration/learner",),
    "tests-engine": ("tests/integration/engines", "tests/integration/runs", "tests/unit/engines"),
}
"""Folders of tests by stage. The tests of benches are left out, because benches are stages themselves."""


def _tested(name: str, options: Options, out: Path) -> Report:
    report = Report(bench=name, question="Tests marked gpu", options=options)
    chosen = "gpu"
    if count_gpus() < 2:
        chosen += " and not two_gpus"
        report.notes.append("tests marked two_gpus are left out, because this machine has one GPU")
    results = out / f"{name}.xml"
    results.unlink(missing_ok=True)
    # Without -n 0 several engines would start at once, and each measures the memory of the whole GPU.
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "-m", chosen, f"--junitxml={results}", *FOLDERS[name]]
    code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    add_results(report, results, code)
    return report


learner, engine = partial(_tested, "tests-learner"), partial(_tested, "tests-engine")


def add_results(report: Report, results: Path, code: int) -> None:
    """Add the numbers of passed, failed and skipped tests. `results`: JUnit XML; pytest may not have written it."""
    cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    outcomes = {"failed": ("failure", "error"), "skipped": ("skipped",)}
    found = {
        outcome: [(case, reason) for case in cases for reason in case if reason.tag in tags]
        for outcome, tags in outcomes.items()
    }
    not_passed = {id(case) for some in found.values() for case, _ in some}
    report.add_figure("tests passed", "", [len(cases) - len(not_passed)], Target(bound="≥", value=1))
    for outcome, some in found.items():
        listed = [
            f"{case.get('classname')}::{case.get('name')}: {(reason.get('message') or reason.text or '')[:200]}"
            for case, reason in some
        ]
        report.add_figure(f"tests {outcome}", "", [len(some)], Target(bound="≤", value=0), "; ".join(listed[:5]))
    report.add_figure("exit code of pytest", "", [abs(code)], Target(bound="≤", value=0))
