"""Shared code of the benches: sides in separate processes, measured in turns, reported as medians and ratios.

A ratio is taken round by round, between samples that were measured seconds apart, so that a noisy machine slows both
sides alike. Absolute metrics depend on the machine at that moment; ratios can be compared across machines.
Does not know what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.orchestrator import wiring, workers
from unstable_lite.rollout.back_pressure import InFlight
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.rpc import Router
from unstable_lite.transport.worker_main import WorkerSpec

REPOSITORY = Path(__file__).parent.parent
MB = 1e6
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seconds: float
    """Length of one sample, if the bench can choose it."""
    rounds: int
    """Samples per side, after one warm-up sample."""
    minutes: float
    """Length of a bench that runs for a given time."""
    seed: int
    small: bool
    """Use smoke-test sizes; the results mean nothing."""
    device: str = "cpu"


class Failure(Exception):
    """A measurement failed. If a subject died, the message has the last lines of its output."""


# ------------------------------------------------------------------------------ measured processes


class Subject:
    """A fresh interpreter that runs `python -m module ARGUMENTS` and measures on request.

    It is frozen between two measurements: it blocks on its stdin and does nothing else, even inside an event loop.
    """

    def __init__(self, module: str, environment: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
        self.name = f"{module} {json.dumps(arguments)}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(arguments)],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.info = self._receive()

    def measure(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _receive reports why it died
        return self._receive()

    def ask_to_end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        self.ask_to_end()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-20:])
            raise Failure(f"{self.name} exited with code {code}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Subjects:
    """The subjects of one bench; closes all of them on exit."""

    def __init__(self) -> None:
        self._subjects: list[Subject] = []

    def __enter__(self) -> Subjects:
        return self

    def __exit__(self, *_: object) -> None:
        for subject in self._subjects:
            subject.ask_to_end()
        for subject in self._subjects:
            subject.close()

    def start(self, module: str, **arguments: Any) -> Subject:
        return self.start_in({}, module, **arguments)

    def start_in(self, environment: Mapping[str, str], module: str, **arguments: Any) -> Subject:
        """Start a subject with these variables added to the environment of this process."""
        self._subjects.append(Subject(module, environment, arguments))
        return self._subjects[-1]


class Questioner:
    """The subject's side: its arguments, the requests to measure, and the answers."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = json.loads(sys.argv[1])
        # Libraries may print to stdout, so answers get a separate descriptor.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield requests. Blocks, even an event loop, because a subject that is not measured must not compute."""
        for line in sys.stdin:
            yield json.loads(line)


def memory_mb(which: Literal["now", "peak"]) -> float:
    """Return the resident memory of this process in MB. Needs Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    key = "VmRSS:" if which == "now" else "VmHWM:"
    return float(next(line for line in lines if line.startswith(key)).split()[1]) * 1024 / MB


def forget_peak_memory() -> None:
    """Reset the peak of resident memory. If the kernel forbids it, the peak stays that of the whole process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# ---------------------------------------------------------------------------------- running engines


def bench_config(**sections: Any) -> Config:
    env = {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
    return Config.model_validate({"train_envs": [env], **sections})


@contextlib.asynccontextmanager
async def started_engines(
    config: Config, number: int, threads: int, environment: Mapping[str, str] = NO_VARIABLES, device: str = "cpu"
) -> AsyncIterator[tuple[EnginePool, list[WorkerProcess]]]:
    """Start `number` engine workers as a run does, without a learner. `device`: "cpu", or "cuda" for the first GPU.

    `environment`: variables that are added to an engine's own.
    """
    directory = Path(tempfile.mkdtemp(prefix="unstable_lite-"))
    router = Router(directory)
    place = "cpu" if device == "cpu" else 0
    own = workers.environment((place,), threads)
    clients, processes = [], []
    for name in (f"engine-{index}" for index in range(number)):
        client = EngineClient(router, name, config.engine)
        spec = WorkerSpec(
            name=name,
            endpoint=router.endpoint,
            device="cpu" if place == "cpu" else "cuda:0",
            threads=threads,
            config_json=config.model_dump_json(),
        )
        log = directory / f"{name}.log"
        clients.append(client)
        processes.append(
            WorkerProcess(client.channel, log, "unstable_lite.engines.worker", spec, own | dict(environment))
        )
    try:
        for process in processes:
            await process.start()
        for process in processes:
            await process.ready(config.engine.start_timeout_s)
        yield EnginePool(clients), processes
    finally:
        for process in processes:
            await process.stop()
        router.close()
        shutil.rmtree(directory, ignore_errors=True)


def unlimit_games_in_flight() -> None:
    """Let training games of this process start, however many steps are in flight and however slow the learner is."""

    def unlimited(config: Config, *_: Any) -> InFlight:
        return InFlight(config.learner.batch_size, config.learner.batch_size, None, {})

    vars(wiring)["in_flight"] = unlimited


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, all threads. Needs Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cores() -> int:
    return len(os.sched_getaffinity(0))


# --------------------------------------------------------------------------- measuring and reporting


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity and its samples in the order of the rounds; no samples if it could not be measured."""

    name: str
    unit: str
    samples: tuple[float, ...]
    remark: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> tuple[float, float] | None:
        return (min(self.samples), max(self.samples)) if self.samples else None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "spread": self.spread,
            "n": len(self.samples),
            "samples": self.samples,
            "remark": self.remark,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A lower or upper bound that DESIGN.md sets."""

    bound: Literal["≥", "≤"]
    value: float

    def is_met(self, value: float) -> bool:
        return value >= self.value if self.bound == "≥" else value <= self.value


@dataclass(slots=True, kw_only=True)
class Report:
    bench: str
    question: str
    options: Options
    rows: list[Row] = field(default_factory=list)
    ratios: list[tuple[Row, Target | None]] = field(default_factory=list)
    """Ratios, and other metrics that have a target."""
    sizes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, samples: list[float], remark: str = "") -> Row:
        row = Row(name=name, unit=unit, samples=tuple(samples), remark=remark)
        self.rows.append(row)
        return row

    def add_ratio(self, name: str, a: Row, b: Row, target: Target | None = None) -> None:
        """Add a ÷ b, computed round by round."""
        samples = tuple(x / y for x, y in zip(a.samples, b.samples, strict=False) if y)
        remark = "" if samples else "not measured"
        self.ratios.append((Row(name=name, unit="×", samples=samples, remark=remark), target))

    def add_figure(
        self, name: str, unit: str, samples: Sequence[float], target: Target | None, remark: str = ""
    ) -> None:
        self.ratios.append((Row(name=name, unit=unit, samples=tuple(samples), remark=remark), target))

    def to_json(self) -> dict[str, Any]:
        ratios = []
        for row, target in self.ratios:
            entry = row.to_json()
            entry["target"] = None if target is None else f"{target.bound} {target.value:g}"
            entry["is_met"] = None if target is None or row.median is None else target.is_met(row.median)
            ratios.append(entry)
        return {
            "bench": self.bench,
            "question": self.question,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seed": self.options.seed,
            "seconds": self.options.seconds,
            "rounds": self.options.rounds,
            "small": self.options.small,
            "load_average": os.getloadavg(),
            "sizes": self.sizes,
            "rows": [row.to_json() for row in self.rows],
            "ratios": ratios,
            "notes": self.notes,
            **versions(),
        }

    def unmet(self) -> list[str]:
        """Return the metrics that miss their targets or were not measured, with their remarks."""
        missed = []
        for row, target in self.ratios:
            if target is not None and (row.median is None or not target.is_met(row.median)):
                value = "was not measured" if row.median is None else f"is {_number(row.median)} {row.unit}".rstrip()
                remark = f" ({row.remark})" if row.remark else ""
                missed.append(f"{row.name} {value}, wanted {target.bound} {target.value:g}{remark}")
        return missed

    def worse_than(self, baseline: dict[str, Any], tolerance: float) -> list[str]:
        """Return the metrics with a target that are worse than in the baseline, or were not measured.

        A metric is worse if its median is worse by more than `tolerance`, relative.
        """
        now = {row.name: (row, target) for row, target in self.ratios if target is not None and row.median is not None}
        worse = []
        for entry in baseline["ratios"]:
            old = entry["median"]
            if entry["target"] is None or old is None:
                continue
            if entry["name"] not in now:
                worse.append(f"{entry['name']}, which was not measured")
                continue
            row, target = now[entry["name"]]
            assert row.median is not None
            less, more = (old, row.median) if target.bound == "≤" else (row.median, old)
            if more > less * (1 + tolerance):
                worse.append(f"{row.name} {_number(row.median)} instead of {_number(old)} {row.unit}")
        return worse

    def show(self, console: Console, baseline: dict[str, Any] | None = None) -> None:
        table = Table(title=self.question, title_justify="left", title_style="bold")
        table.add_column("what", overflow="fold")
        for column in ("median", "min – max", "n"):
            table.add_column(column, justify="right")
        table.add_column("")
        if baseline is not None:
            table.add_column(f"baseline {baseline['date'][:10]}", justify="right")
            table.add_column("÷ baseline", justify="right")
        for row in self.rows:
            table.add_row(*_cells(row, row.remark, baseline, "rows"))
        table.add_section()
        for row, target in self.ratios:
            remark = row.remark
            if target is not None and row.median is not None:
                verdict = "met" if target.is_met(row.median) else "[bold]not met[/bold]"
                remark = f"target {target.bound} {target.value:g}: {verdict}"
            table.add_row(*_cells(row, remark, baseline, "ratios"))
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", markup=False, highlight=False)
        if self.options.small:
            console.print("  smoke-test sizes: the results mean nothing")


def _cells(row: Row, remark: str, baseline: dict[str, Any] | None, kind: str) -> list[str]:
    spread = row.spread
    cells = [
        row.name,
        "–" if row.median is None else f"{_number(row.median)} {row.unit}",
        "" if spread is None or len(row.samples) < 2 else f"{_number(spread[0])} – {_number(spread[1])}",
        str(len(row.samples)) if row.samples else "",
        remark,
    ]
    if baseline is not None:
        before = next((other["median"] for other in baseline[kind] if other["name"] == row.name), None)
        cells.append("–" if before is None else _number(before))
        cells.append("–" if not before or row.median is None else f"{row.median / before:.2f}")
    return cells


def _number(value: float) -> str:
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


Measure = Callable[[], float]
T = TypeVar("T")


def alternate(cases: Mapping[str, Callable[[], T]], options: Options) -> dict[str, list[T]]:
    """Sample every case: one warm-up round, then rounds that measure all cases, every other one in reverse order."""
    samples: dict[str, list[T]] = {name: [] for name in cases}
    names = list(cases)
    for name in names:
        cases[name]()
    for number in range(options.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            samples[name].append(cases[name]())
    return samples


def letters(rng: random.Random, num_tokens: int) -> str:
    """Return a prompt of letters that no tokenizer here merges; no two prompts share a prefix worth caching."""
    return "".join(rng.choice("QZXJVK") for _ in range(num_tokens))
