"""View of a run's directory from another process: reads only the lines that were added since the last refresh."""

from __future__ import annotations

import itertools
import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from unstable_lite.dashboards.standings import League
from unstable_lite.errors import UnstableError
from unstable_lite.files import parsed_line
from unstable_lite.planning.trust import CONFIG
from unstable_lite.tracking.run_directory import LIVE

Metrics = dict[str, Any]
PACE_UPDATES = 20


@dataclass(frozen=True, slots=True)
class Pace:
    seconds_per_update: float
    games_per_s: float


class _Tail:
    """Complete lines of a JSON-lines file that grows; read from its beginning again if it was rewritten."""

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self.readings = 0
        """Number of times that the file was read from its beginning."""
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
                    self.readings += 1
                    self.lines.clear()
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnstableError(f"{self._path} cannot be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += map(self._parsed, whole.split(b"\n")[:-1])

    def _parsed(self, line: bytes) -> dict[str, Any]:
        where = f"{self._path}: the line that begins {line[:40]!r}"
        record = parsed_line(line, where)
        if type(record.get("step")) is not int:
            raise UnstableError(f"{where} has no whole number as its step; remove it to read the rest")
        return record


class RunView:
    """View of a run: `refresh`, then read. All values are as of the newest update, or as of `at`."""

    def __init__(self, directory: Path) -> None:
        """Open a run directory. Raises UnstableError if it is not one."""
        self.directory = directory
        path = directory / CONFIG
        if not path.is_file():
            raise UnstableError(f"{directory} is not a run directory: it has no {CONFIG}")
        try:
            self.config_text = path.read_text(encoding="utf-8")
            self.config: dict[str, Any] = tomllib.loads(self.config_text)
            if missing := {"model_name", "run", "train_envs"} - self.config.keys():
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
        except (OSError, ValueError, RecursionError) as error:
            raise UnstableError(f"{path} cannot be read: {error}") from None
        self.live: dict[str, Any] = {}
        """Content of live.json; empty before the run has written it."""
        self.at: int | None = None
        """Update to view; None: the newest."""
        self._league, self._league_lines = League(), 0
        self._league_of: tuple[int | None, int] | None = None
        """Value of `at` and number of readings of the file for which `_league` has the first `_league_lines` lines."""
        self._tails = {name: _Tail(directory / f"{name}.jsonl") for name in ("metrics", "league", "eval", "alarms")}

    def refresh(self) -> None:
        for tail in self._tails.values():
            tail.refresh()
        try:
            live = json.loads((self.directory / LIVE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            live = None
        self.live = live if isinstance(live, dict) else {}

    @property
    def is_running(self) -> bool:
        """Return whether the process that wrote live.json exists; only meaningful on its machine."""
        return bool(self.live) and not self.live["has_ended"] and psutil.pid_exists(self.live["pid"])

    @property
    def ending(self) -> str | None:
        """Return `ended`, `failed`, or None if the run said neither."""
        if not self.live.get("has_ended"):
            return None
        return "failed" if self.live.get("has_failed") else "ended"  # runs of before know no failure

    @property
    def num_updates(self) -> int:
        """Return the number of updates so far, regardless of `at`."""
        return max((line["step"] for line in self._tails["metrics"].lines), default=0)

    @property
    def update(self) -> int:
        return self.num_updates if self.at is None else self.at

    @property
    def learning_steps(self) -> int:
        return int(self.live.get("learning_steps") or self.config["run"]["learning_steps"])

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of `<name>.jsonl`: of metrics, league, eval or alarms."""
        return (line for line in self._tails[name].lines if self.at is None or line["step"] <= self.at)

    def updates(self) -> list[Metrics]:
        """Return the line of metrics of each update."""
        return [line for line in self.lines("metrics") if "run/games" in line]

    def series(self, name: str, n: str | None = None) -> list[float]:
        """Return one metric over the updates, if it is a number and its sample size, the metric `n`, is not 0."""
        lines = [line for line in self.updates() if n is None or line.get(n)]
        return [line[name] for line in lines if line.get(name) is not None]

    def pace(self) -> Pace | None:
        """Return the rate over the newest updates; None before there are two of them."""
        lines = self.updates()[-PACE_UPDATES:]
        if len(lines) < 2:
            return None
        seconds = lines[-1]["run/seconds"] - lines[0]["run/seconds"]  # without the time between a stop and a resume
        if seconds <= 0:
            return None
        games = lines[-1]["run/games"] - lines[0]["run/games"]
        return Pace(seconds_per_update=seconds / (lines[-1]["step"] - lines[0]["step"]), games_per_s=games / seconds)

    def latest(self) -> Metrics:
        lines = self.updates()
        return lines[-1] if lines else {}

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations with a quota by update; they overlap and end in any order."""
        with_quota = [line for line in self.lines("eval") if line["label"] != "concurrent"]
        return sorted(with_quota, key=lambda line: line["step"])

    def alarms(self) -> list[str]:
        """Return each alarm once, the oldest first."""
        return [f"update {line['step']}: {line['text']}" for line in self.lines("alarms") if not line.get("is_repeat")]

    def league(self) -> League:
        """Return the ratings and results, which are not to be changed; only lines since the last call are read."""
        tail = self._tails["league"]
        wanted = (self.at, tail.readings)
        if self._league_of != wanted:
            self._league, self._league_of, self._league_lines = League(), wanted, 0
        for line in itertools.islice(tail.lines, self._league_lines, None):
            if self.at is None or line["step"] <= self.at:
                self._league.add(line["models"], line["matches"])
        self._league_lines = len(tail.lines)
        return self._league
