"""A run's directory as other processes read it: by `top` again and again, once by `runs` and once by a report.

A refresh reads only the lines that were added since the last one. A report has runs in groups that differ in the seed
alone. Runs may be unfinished, and the list of the runs on this disk has also damaged ones.
"""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.text import Text

from unstable_lite.adapters.store import LOCK, try_lock
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.dashboards.league import League
from unstable_lite.errors import UnstableError
from unstable_lite.files import check_links, parsed_line, understood
from unstable_lite.planning.trust import CONFIG
from unstable_lite.tracking.displayed_metrics import Spike, Totals, find_spikes
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.result_rows import ResultRow, result_rows
from unstable_lite.tracking.run_directory import LIVE, PAUSED, runs_in

Metrics = dict[str, Any]
PACE_UPDATES = 20
OWN_KEYS = ("run.seed", "run.output_dir", "run.name")
"""Config keys in which runs of one group may differ."""
MAX_POINTS = 1000
"""Most points of a curve; longer ones are thinned evenly."""
STATE_STYLES = {"running": "green", "paused": "red", "failed": "red", "killed": "red", "unreadable": "red"}


class _Tail:
    """Complete lines of a JSON-lines file that grows; read from its beginning again if it was rewritten."""

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        """Another list once the file was read from its beginning again."""
        self._path = path
        self._offset = 0
        self._inode = -1

    def refresh(self) -> None:
        """Read the new lines. Raises UnstableError for one that is not a record of an update."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._offset, self._inode = 0, status.st_ino
                    self.lines = []
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnstableError(f"{self._path} cannot be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            self.lines.append(parsed_line(line, f"{self._path}: the line that begins {line[:40]!r}"))


class RunDirectory:
    """A run on disk: `refresh`, then read. All values are as of the newest update."""

    def __init__(self, directory: Path) -> None:
        """Open a run directory. Raises UnstableError if it is not one."""
        self.directory = directory
        path = directory / CONFIG
        if not path.is_file():
            raise UnstableError(f"{directory} is not a run directory: it has no {CONFIG}")
        check_links(directory)
        try:
            self.config_text = path.read_text(encoding="utf-8")
            self.config: dict[str, Any] = tomllib.loads(self.config_text)
            if missing := {"model_name", "run", "train_envs"} - self.config.keys():
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            if not isinstance(self.config["run"], dict):
                raise ValueError("run is not a table")
        except (OSError, ValueError, RecursionError) as error:
            raise UnstableError(f"{path} cannot be read: {error}") from None
        self.live: dict[str, Any] = {}
        """Content of live.json; empty before the run has written it."""
        self.is_up = False
        """Whether the run goes, or starts: then its lock is held before live.json says so."""
        self._tails = {name: _Tail(directory / f"{name}.jsonl") for name in ("metrics", "league", "eval", "alarms")}
        self._league, self._league_lines, self._num_in_league = League(), list[dict[str, Any]](), 0
        self._spikes, self._judged = list[Spike](), 0

    def refresh(self) -> None:
        for tail in self._tails.values():
            tail.refresh()
        try:
            live = json.loads((self.directory / LIVE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            live = None
        self.live = live if isinstance(live, dict) else {}
        self.is_up = self.is_running or self.state in ("running", "paused")

    @property
    def is_running(self) -> bool:
        """Return whether the process that wrote live.json exists; only meaningful on its machine."""
        return bool(self.live) and not self.live["has_ended"] and psutil.pid_exists(self.live["pid"])

    @property
    def state(self) -> str:
        """Return the state as `RunEntry` names it."""
        if self._is_locked():
            return "paused" if (self.directory / PAUSED).exists() else "running"
        if not self.live.get("has_ended"):
            return "killed"
        return "failed" if self.live.get("has_failed") else "ended"  # runs of before know no failure

    def _is_locked(self) -> bool:
        """Return whether a process holds the lock; if the lock is another user's, whether its process exists."""
        if not (self.directory / LOCK).exists():
            return False
        try:
            lock = try_lock(self.directory)
        except OSError:
            return self.is_running
        if lock is not None:
            os.close(lock)
        return lock is None

    @property
    def num_updates(self) -> int:
        return max((line["step"] for line in self.lines("metrics")), default=0)

    @property
    def learning_steps(self) -> int:
        return int(self.live.get("learning_steps") or self.config["run"]["learning_steps"])

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of `<name>.jsonl`: of metrics, league, eval or alarms."""
        return self._tails[name].lines

    @property
    def policies(self) -> list[str]:
        """Names of the policies that learn; "" for the only one of a run."""
        return [*self.config.get("policies", ())] or [""]

    def updates(self) -> list[Metrics]:
        """Return the line of metrics of each update."""
        return [line for line in self.lines("metrics") if "run/games" in line]

    def spikes(self) -> list[Spike]:
        """Return the spikes of the updates; they are looked for only if there are new updates."""
        if self._judged != len(updates := self.updates()):
            self._spikes, self._judged = find_spikes(updates, self.policies), len(updates)
        return self._spikes

    def pace(self) -> tuple[float, float] | None:
        """Return seconds per update and games per second, over the newest updates; None before there are two."""
        lines = self.updates()[-PACE_UPDATES:]
        if len(lines) < 2:
            return None
        seconds = lines[-1]["run/seconds"] - lines[0]["run/seconds"]  # without the time between a stop and a resume
        if seconds <= 0:
            return None
        games = lines[-1]["run/games"] - lines[0]["run/games"]
        return seconds / (lines[-1]["step"] - lines[0]["step"]), games / seconds

    def latest(self) -> Metrics:
        return (self.updates() or [{}])[-1]

    def totals(self) -> Totals:
        """Return the totals of the whole run: of live.json, which is newer than the newest update's metrics."""
        played = sum(line["n"] for line in self.lines("eval"))  # runs of before recorded no other number
        none = {"games": 0, "eval_games": played, "void_games": 0, "seconds": 0.0}
        known = none | {name.removeprefix("run/"): value for name, value in self.latest().items()} | self.live
        games, eval_games, void_games = (int(known[name]) for name in ("games", "eval_games", "void_games"))
        return Totals(games, eval_games, void_games, known["seconds"])

    def results(self) -> list[ResultRow]:
        """Return the result rows, opponents in the order of the run's config."""
        envs = [EvalEnvSpec.model_construct(**env) for env in self.config.get("eval_envs", ())]
        evaluations = map(Evaluation.from_json, self.lines("eval"))
        return result_rows(evaluations, [(env.env_id, env.opponent) for env in envs])

    def alarms(self) -> list[str]:
        """Return each alarm once, the oldest first."""
        return [f"update {line['step']}: {line['text']}" for line in self.lines("alarms") if not line.get("is_repeat")]

    def league(self) -> League:
        """Return the ratings and results, which are not to be changed; only lines since the last call are read."""
        lines = self.lines("league")
        if self._league_lines is not lines:
            self._league, self._league_lines, self._num_in_league = League(), lines, 0
        for line in lines[self._num_in_league :]:
            self._league.add(line["models"], line["matches"])
        self._num_in_league = len(lines)
        return self._league


@dataclass(slots=True, kw_only=True)
class RunEntry:
    directory: Path
    began: float = 0.0
    """Start time, in seconds since the epoch."""
    state: str = "unreadable"
    """`running`, `paused`, `ended`, `failed` (by an error or a second Ctrl-C), `killed` (its process is gone without a
    record), or `unreadable`, for any damage."""
    updates: str = "0/0"
    """Number of updates, made and planned."""
    result: str = ""
    """Result against the first opponent of the config, before training and now; of an unreadable run the reason."""


def list_runs(outputs: Path) -> list[RunEntry]:
    """Return every run in `outputs`, the newest first. Raises UnstableError if there is none."""
    return sorted(map(_entry, runs_in(outputs)), key=lambda entry: (entry.began, entry.directory), reverse=True)


def runs_table(entries: Sequence[RunEntry]) -> Text:
    """Return two lines per run: numbers, and the directory, which is never cut because it is copied."""
    lines = [Text(f"{'state':<10}  {'updates':>11}  before → newest result (95 %)", style="bold")]
    for entry in entries:
        line = Text(f"{entry.state:<10}", style=STATE_STYLES.get(entry.state, ""))
        line.append(f"  {entry.updates:>11}  {entry.result}", style="default")
        lines += [line, Text(f"    {entry.directory}")]
    return Text("\n").join(lines)


def _entry(directory: Path) -> RunEntry:
    entry = RunEntry(directory=directory)
    try:
        entry.began = _began(directory)
        with understood(directory):
            run = RunDirectory(directory)
            run.refresh()
            result, metrics = _result(run.results()), run.lines("metrics")
            entry.began = float(metrics[0]["time"]) if metrics else entry.began
            entry.updates, entry.state, entry.result = f"{run.num_updates}/{run.learning_steps}", run.state, result
    except (UnstableError, OSError) as error:
        entry.result = str(error)
    return entry


def _result(rows: Sequence[ResultRow]) -> str:
    if not rows:
        return "no evaluation yet"
    row = rows[0]
    before = f"{row.before.value_text} → " * (row.before is not row.newest)
    more = f", and {len(rows) - 1} more" * (len(rows) > 1)
    when = " before training" * (not row.newest.step)
    result = f"{before}{row.newest.value_text}{when} ({row.newest.interval_text})" if row.newest.n else row.verdict_text
    return f"{row.label}: {result}{more}"


def _began(directory: Path) -> float:
    """Return the local time in the name, which may occur twice when clocks change, else that of the first file.

    Copying changes the times of files.
    """
    try:
        return time.mktime(time.strptime(f"{directory.parent.name} {directory.name[:8]}", "%Y-%m-%d %H-%M-%S"))
    except ValueError:
        return min(path.stat().st_mtime for path in directory.glob("config*.toml"))  # a resume may rewrite it


class RunData(RunDirectory):
    """A run as it is when it is read: with its curves, its ratings, and its place among the runs of a report."""

    def __init__(self, directory: Path) -> None:
        """Read a run. Raises UnstableError if it is not a run directory, or cannot be read."""
        super().__init__(directory)
        path = directory / "versions.json"
        try:
            self.versions = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, RecursionError) as error:
            raise UnstableError(f"{path} cannot be read: {error}") from None
        self.label = ""
        with understood(directory):
            self.refresh()
            self.rows = self.results()
            self.spike_list = self.spikes()
            self._read_metrics()

    def _read_metrics(self) -> None:
        """Read one row for each update and one for step 0, each merged from all its lines."""
        rows: dict[int, dict[str, Any]] = {}
        for line in self.lines("metrics"):
            rows.setdefault(line["step"], {}).update(line)
        rows = {step: rows[step] for step in sorted(rows)}
        hours, seconds = dict[int, float](), 0.0
        for step, row in rows.items():  # by the run's own clock, which stands still between a kill and a resume
            seconds = row.get("run/seconds", seconds)
            hours[step] = round(seconds / 3600, 4)
        stride = math.ceil(len(rows) / MAX_POINTS) or 1
        self.steps = sorted({*[*rows][::stride], *[*rows][-1:]})
        """Updates with metrics: all, or every k-th and the last."""
        self.hours_at = hours
        """Duration of the run at each update, also at those that are not among `steps`."""
        names = dict.fromkeys(name for row in rows.values() for name in row if name not in ("step", "time"))
        kept = [rows[step] for step in self.steps]
        self.curves = {
            name: [None if row.get(name) is None else float(f"{row[name]:.6g}") for row in kept] for name in names
        }
        """A value for each of `steps`, by metric name."""
        self.newest = {name: value for row in rows.values() for name, value in row.items() if value is not None}
        """Newest value of every metric."""
        self.lines("metrics")[:] = self.updates()[-1:]  # a report needs no more than the curves and the totals


@dataclass(frozen=True, slots=True)
class Group:
    """Runs whose configs differ only in `OWN_KEYS`."""

    label: str
    runs: list[RunData]
    differing: dict[str, str] = field(default_factory=dict)
    """Values of the keys in which the groups differ."""


def read_groups(directories: Sequence[Path]) -> list[Group]:
    """Read and group runs. A group of several seeds is labelled as a config, others by the end of their run's path.

    Raises UnstableError.
    """
    runs = [RunData(directory) for directory in dict.fromkeys(map(Path.resolve, directories))]
    members = dict[str, tuple[dict[str, Any], list[RunData]]]()
    for run in runs:
        parts = run.directory.parts
        lengths = range(1, 1 + len(parts))
        length = next(n for n in lengths if sum(other.directory.parts[-n:] == parts[-n:] for other in runs) == 1)
        run.label = str(Path(*parts[-length:]))
        shared = {key: value for key, value in flat(run.config) if key not in OWN_KEYS}
        members.setdefault(json.dumps(shared, sort_keys=True, default=str), (shared, []))[1].append(run)
    differing, groups = differences([shared for shared, _ in members.values()]), []
    for number, (_, of_group) in enumerate(members.values()):
        several = f"config {chr(ord('A') + number % 26)}, {len(of_group)} seeds" if differing else "mean of the seeds"
        own = {key: values[number] for key, values in differing.items()}
        groups.append(Group(of_group[0].label if len(of_group) == 1 else several, of_group, own))
    return groups


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values, one for each config, of the keys in which flat configs differ."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [_text(config.get(key)) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `section.key` and the value of every scalar and plain list; tables in a list are counted from 0."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{prefix}.{index}")
    else:
        yield prefix, value


def _text(value: Any) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
