"""A run as its directory shows it, from another process: read only, and only what was added since the last look."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.errors import UnstableError
from unstable_lite.trackers.records import parsed_line
from unstable_lite.trackers.tracker import with_points

Metrics = dict[str, Any]
PACE_UPDATES = 20


@dataclass(frozen=True, slots=True)
class Pace:
    seconds_per_update: float
    games_per_s: float


class _Tail:
    """The whole lines that a file of JSON lines gained; from its beginning, if it was written anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = -1

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether these are all lines there are, new lines)."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_anew = status.st_ino != self._inode or status.st_size < self._offset
                if is_anew:
                    self._offset, self._inode = 0, status.st_ino
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return False, []
        except OSError as error:
            raise UnstableError(f"{self._path} cannot be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[:-1]
        return is_anew, [self._parsed(line) for line in lines]

    def _parsed(self, line: bytes) -> dict[str, Any]:
        where = f"{self._path}: the line that begins {line[:40]!r}"
        record = parsed_line(line, where)
        if type(record.get("step")) is not int:
            raise UnstableError(f"{where} has no whole number as its step; remove it to read the rest")
        return record


def alarm_lines(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of the lines of alarms.jsonl, without those that were only said again."""
    return [f"update {line['step']}: {line['text']}" for line in lines if not line.get("is_repeat")]


class RunView:
    """`refresh`, then look. Everything is as of the newest update, or as of `at`."""

    def __init__(self, directory: Path) -> None:
        """Raises UnstableError if that is no run directory."""
        self.directory = directory
        try:
            self.config: dict[str, Any] = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UnstableError(f"{directory} is no run directory: config.toml: {error}") from None
        self.live: dict[str, Any] = {}
        """live.json; empty before the run has written it."""
        self.at: int | None = None
        """The update to look at; None: the newest."""
        self._lines: list[Metrics] = []
        self._league: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._alarms: list[dict[str, Any]] = []
        self._files = [
            (_Tail(directory / "metrics.jsonl"), self._lines),
            (_Tail(directory / "league.jsonl"), self._league),
            (_Tail(directory / "eval.jsonl"), self._evaluations),
            (_Tail(directory / "alarms.jsonl"), self._alarms),
        ]

    def refresh(self) -> None:
        for tail, lines in self._files:
            is_anew, new = tail.read()
            if is_anew:
                lines.clear()
            lines += new
        try:
            live = json.loads((self.directory / "live.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            live = None
        self.live = live if isinstance(live, dict) else {}

    @property
    def is_running(self) -> bool:
        """Whether the process that wrote live.json is there; only on its own machine."""
        if not self.live or self.live["has_ended"]:
            return False
        try:
            os.kill(self.live["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    @property
    def num_updates(self) -> int:
        """Made so far; not what is looked at."""
        return max((line["step"] for line in self._lines), default=0)

    @property
    def update(self) -> int:
        return self.num_updates if self.at is None else self.at

    @property
    def learning_steps(self) -> int:
        return int(self.live.get("learning_steps") or self.config["run"]["learning_steps"])

    def updates(self) -> list[Metrics]:
        """The line of metrics of each update."""
        return [line for line in self._until(self._lines) if "run/games" in line]

    def series(self, name: str, n: str | None = None) -> list[float]:
        """One metric over the updates, where it is a number, and of something: `n` names the metric that says so."""
        lines = [line for line in self.updates() if n is None or line.get(n)]
        return [line[name] for line in lines if line.get(name) is not None]

    def pace(self) -> Pace | None:
        """Over the newest updates; None before there are two of them."""
        lines = self.updates()[-PACE_UPDATES:]
        if len(lines) < 2:
            return None
        seconds = lines[-1]["run/seconds"] - lines[0]["run/seconds"]  # without the time that it was not going on
        if seconds <= 0:  # of a run by a version whose clock began anew with a resume
            return None
        games = lines[-1]["run/games"] - lines[0]["run/games"]
        return Pace(seconds_per_update=seconds / (lines[-1]["step"] - lines[0]["step"]), games_per_s=games / seconds)

    def latest(self) -> Metrics:
        lines = self.updates()
        return lines[-1] if lines else {}

    def evaluations(self) -> list[dict[str, Any]]:
        """Those with a quota, by update: they overlap, and end in any order."""
        with_quota = [line for line in self.all_evaluations() if line["label"] != "concurrent"]
        return sorted(with_quota, key=lambda line: line["step"])

    def all_evaluations(self) -> list[dict[str, Any]]:
        """Those beside training, too."""
        return [with_points(line) for line in self._until(self._evaluations)]

    def alarms(self) -> list[str]:
        """Each once, the oldest first."""
        return alarm_lines(self._until(self._alarms))

    def ladder(self) -> list[tuple[str, float, float, int, bool, bool]]:
        """(uid, μ, σ, games, active, current) of every model, the strongest first."""
        models: dict[str, list[Any]] = {}
        for line in self._until(self._league):
            models |= line["models"]
        rows = [(uid, *row) for uid, row in models.items()]
        return sorted(rows, key=lambda row: -row[1])

    def matches(self) -> dict[tuple[str, str], int]:
        """Games by pair of uids, both ways round."""
        met: dict[tuple[str, str], int] = {}
        for line in self._until(self._league):
            for one, other, games in line["matches"]:
                met[one, other] = met[other, one] = games
        return met

    def _until(self, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return (line for line in lines if self.at is None or line["step"] <= self.at)


def newest_run(outputs: Path) -> Path:
    """The run directory in which something changed last. Raises UnstableError if there is none."""
    found = sorted(outputs.glob("*/*/config.toml"), key=lambda path: path.parent.stat().st_ctime)
    if not found:
        raise UnstableError(f"there is no run in {outputs.absolute()}; name its directory")
    return found[-1].parent


def update_of(path: Path) -> int | None:
    """The number in `ckpt-<number>`; None for any other name, which is no checkpoint's."""
    match = re.fullmatch(r"ckpt-(\d+)", path.name)
    return int(match[1]) if match else None


def by_update(directory: Path) -> dict[int, Path]:
    """The checkpoints or adapters in a directory, the oldest first."""
    found = [(update, path) for path in directory.glob("ckpt-*") if (update := update_of(path)) is not None]
    return dict(sorted(found))
