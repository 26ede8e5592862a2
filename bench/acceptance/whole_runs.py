"""Stages `learning`, `sleep` and `killed`: runs of examples/quickstart.toml by the command that a user types.

On a GPU engine and learner share the first one, and vLLM is the engine; on the CPU runs are short, and `learning` need
only end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import MB, REPOSITORY, Failure, Options, Report, Target
from unstable_lite.files import read_records
from unstable_lite.tracking.run_directory import LIVE, RUNS

OPPONENT = "scripted:random"
WON = 0.75
TURNS = 6
KILLED = ("engine-0", "learner")
FEW_GAMES = "run.eval_games=2"
FREED = 0.3
"""Share of the GPU that the engine must free and take again in a turn; it may use 0.7 of the GPU."""
SAMPLE_EVERY_S = 0.05


class TrainingRun:
    """One run of the quickstart, its process and the files that it writes."""

    def __init__(self, name: str, options: Options, out: Path, *overrides: str) -> None:
        self._outputs = out / f"{name}-run"
        shutil.rmtree(self._outputs, ignore_errors=True)
        place = "cpu" if options.device == "cpu" else 0
        given: dict[str, object] = {
            "engine.kind": "transformers" if options.device == "cpu" else "vllm",
            "engine.devices": [place],
            "learner.devices": [place],
            "run.seed": options.seed,
            "run.output_dir": str(self._outputs),
            "run.name": name,
        }
        overrides = (*(f"{key}={json.dumps(value)}" for key, value in given.items()), *overrides)
        command = [sys.executable, "-m", "unstable_lite", "run", "examples/quickstart.toml", *overrides]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL)

    @property
    def directory(self) -> Path | None:
        """Directory of the run; None until the run has made it."""
        return next((path.parent for path in self._outputs.glob(RUNS)), None)

    def records(self, name: str) -> list[dict[str, Any]]:
        return [] if self.directory is None else list(read_records(self.directory / name))

    def metrics(self, name: str) -> list[float]:
        return [line[name] for line in self.records("metrics.jsonl") if name in line]

    def num_updates(self) -> int:
        return len(self.metrics("learner/loss"))

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a worker that is up, as the run last wrote it; None if it is not up."""
        with contextlib.suppress(OSError, ValueError):
            if self.directory is not None:
                workers = json.loads((self.directory / LIVE).read_text())["workers"]
                return next((one["pid"] for one in workers if one["name"] == name and one["state"] == "ready"), None)
        return None

    def kill(self, name: str) -> float:
        """Kill a worker after two more updates; return the seconds until another is up, up to 2 of them live.json's."""
        least = self.num_updates() + 2
        self.wait_until(lambda: self.num_updates() >= least and self.pid_of(name) is not None, f"{name} was killed")
        pid, since = self.pid_of(name), time.monotonic()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.wait_until(lambda: self.pid_of(name) not in (None, pid), f"{name} was back")
        return time.monotonic() - since

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises Failure if the run ends before it is true."""
        while not condition():
            if self.process.poll() is not None:
                raise Failure(f"the run ended with exit code {self.process.returncode} before {what}; see the log")
            time.sleep(0.1)

    def add_end(self, report: Report, updates: int) -> None:
        """Wait for the end of the run, and add its exit code and updates, which must be 0 and `updates`."""
        code = self.process.wait()
        report.add("duration of the run", "s", [time.monotonic() - self.started])
        report.add_figure("exit code", "", [abs(code)], Target(bound="≤", value=0), "the log has its output")
        report.add_figure("updates", "", [self.num_updates()], Target(bound="≥", value=updates))


def learning(options: Options, out: Path) -> Report:
    report = Report(bench="learning", question="The quickstart, from its first to its last evaluation", options=options)
    short = ("run.learning_steps=3", "run.eval_games=4", "run.eval_every=3") if options.small else ()
    run = TrainingRun("learning", options, out, "engine.when_shared=split", *short)
    run.add_end(report, updates=3 if options.small else 1)
    evaluations = run.records("eval.jsonl")
    report.notes += [f"{line['label']}, {line['opponent']}: {line['wins']} of {line['n']} won" for line in evaluations]
    of_random = [line for line in evaluations if line["opponent"] == OPPONENT]
    shares = [line["win_rate"] for line in of_random[-1:]]
    remark = "".join(f"{line['wins']} of {line['n']} games, 95 %: {line['interval']}" for line in of_random[-1:])
    target = Target(bound="≥", value=0.0 if options.small else WON)
    report.add_figure(f"won against {OPPONENT} in the last evaluation", "", shares, target, remark)
    return report


def sleep(options: Options, out: Path) -> Report:
    report = Report(bench="sleep", question="Engine and learner in turns on one device", options=options)
    used: list[float] = []
    with _sampled(used, options.device):
        overrides = ("engine.when_shared=sleep", f"run.learning_steps={TURNS}", FEW_GAMES)
        run = TrainingRun("sleep", options, out, *overrides)
        run.add_end(report, updates=TURNS)
    asleep_s = [value for value in run.metrics("inference/asleep_s") if value > 0]
    report.add("engine asleep", "s", asleep_s)
    report.add_figure("turns", "", [len(asleep_s)], Target(bound="≥", value=TURNS))
    if options.device == "cuda":
        report.add("GPU memory in use, at most", "MB", [max(used) / MB])
        taken = _num_rises(used, FREED * _gpu_memory()[1])
        # The engine takes it once at the start, and after each turn of the learner.
        report.add_figure("times that the engine took its memory", "", [taken], Target(bound="≥", value=1 + TURNS))
    return report


def killed(options: Options, out: Path) -> Report:
    report = Report(bench="killed", question="SIGKILL for the engine, then for the learner", options=options)
    # On a GPU a few updates pass before live.json shows the new worker.
    updates = 12 if options.small else 40
    overrides = ("engine.when_shared=split", f"run.learning_steps={updates}", FEW_GAMES)
    run = TrainingRun("killed", options, out, *overrides)
    for name in KILLED:
        report.add(f"{name} killed, until it is up again", "s", [run.kill(name)])
    run.add_end(report, updates=updates)
    alarms = [line["text"] for line in run.records("alarms.jsonl")]
    for name in KILLED:
        restarts = sum(name in text and "It is restarted" in text for text in alarms)
        report.add_figure(f"restarts of {name}", "", [restarts], Target(bound="≥", value=1))
    return report


@contextlib.contextmanager
def _sampled(used: list[float], device: str) -> Iterator[None]:
    """Append the bytes in use on the GPU, of all processes, while the body runs."""
    if device == "cpu":
        yield
        return
    is_over = threading.Event()

    def take() -> None:
        free, total = _gpu_memory()
        used.append(total - free)

    def sample() -> None:
        while not is_over.wait(SAMPLE_EVERY_S):
            take()

    take()  # makes this process's CUDA context before an engine measures the free memory
    thread = threading.Thread(target=sample, name="gpu-memory")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _gpu_memory() -> tuple[int, int]:
    """Return the free and the whole memory of the first GPU, in bytes."""
    import torch

    return torch.cuda.mem_get_info(0)


def _num_rises(values: list[float], least: float) -> int:
    """Return how often the values rose by `least` above the lowest one since they last fell by as much."""
    rises, low, high, is_high = 0, values[0], values[0], False
    for value in values:
        low, high = min(low, value), max(high, value)
        if not is_high and value - low >= least:
            rises, high, is_high = rises + 1, value, True
        elif is_high and high - value >= least:
            low, is_high = value, False
    return rises
