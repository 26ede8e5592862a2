"""Time that a user waits for a first result: an import, a check of a config, the list of envs.

Measures whole processes from start to end, the interpreter's start included. For comparison, the imports of the
reference's way before its first output: torch and transformers, in the process that a user starts.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench.harness import REPOSITORY, Failure, Measure, Options, Report, Target, alternate

COMMANDS = {
    "python": ["-c", "pass"],
    "import unstable_lite": ["-c", "import unstable_lite"],
    "check a config": ["-m", "unstable_lite", "check", "examples/quickstart.toml"],
    "list envs": ["-m", "unstable_lite", "envs", "Nim"],
    "import torch, transformers": ["-c", "import torch, transformers; transformers.AutoModelForCausalLM"],
}
TARGETS = {"import unstable_lite": 0.3, "check a config": 1.5}


def run(options: Options) -> Report:
    report = Report(bench="startup", question="Seconds until a command ends", options=options)
    samples = alternate({name: _timed(name, arguments) for name, arguments in COMMANDS.items()}, options)
    rows = {name: report.add(name, "s", samples[name]) for name in COMMANDS}
    for name, most in TARGETS.items():
        report.add_figure(name, "s", samples[name], Target(bound="≤", value=most))
    report.add_ratio(
        "check a config ÷ import torch, transformers", rows["check a config"], rows["import torch, transformers"]
    )
    report.notes.append("files are in the page cache: each command ran once before it was timed")
    return report


def _timed(name: str, arguments: list[str]) -> Measure:
    def measure() -> float:
        started = time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            raise Failure(f"{name} exited with code {done.returncode}:\n{done.stderr[-2000:]}")
        return seconds

    return measure
