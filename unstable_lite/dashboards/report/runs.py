"""Read curves, evaluations, ratings, config and alarms of runs, and group the runs that differ in the seed alone.

Run directories may be unfinished. Knows nothing of pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unstable_lite.dashboards.run_view import RunView
from unstable_lite.errors import UnstableError
from unstable_lite.files import understood

OWN_KEYS = ("run.seed", "run.output_dir", "run.name")
"""Config keys in which runs of one group may differ."""
MAX_POINTS = 1000
"""Most points of a curve; longer ones are thinned evenly."""
MAX_LABEL_CHARS = 60


class RunData(RunView):
    """A run as it is when it is read: with its curves, its ratings, and its place among the runs of a report."""

    def __init__(self, directory: Path) -> None:
        """Read a run. Raises UnstableError if it is not a run directory, or cannot be read."""
        super().__init__(directory)
        path = directory / "versions.json"
        try:
            self.versions: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UnstableError(f"{path} cannot be read: {error}") from None
        self.label = ""
        self.group = 0
        """Number of the group, which contains runs whose configs differ only in `OWN_KEYS`."""
        with understood(directory):
            self.refresh()
            self._read_metrics()
            self.ladder_rows = _ladder_rows(self.lines("league"))
            """(update, μ, σ, games) at every change, by model, of models that have played."""

    @property
    def seed(self) -> int:
        return int(self.config["run"].get("seed", 0))

    def _read_metrics(self) -> None:
        """Read one row for each update and one for step 0, each merged from all its lines."""
        rows: dict[int, dict[str, Any]] = {}
        for line in self.lines("metrics"):
            rows.setdefault(line["step"], {}).update(line)
        steps = sorted(rows)
        hours, seconds = list[float](), 0.0
        for step in steps:  # by the run's own clock, which stands still between a kill and a resume
            seconds = rows[step].get("run/seconds", seconds)
            hours.append(round(seconds / 3600, 4))
        names = dict.fromkeys(name for row in rows.values() for name in row if name not in ("step", "time"))
        series = {name: [_rounded(rows[step].get(name)) for step in steps] for name in names}
        kept = _thin(len(steps))
        self.steps = [steps[i] for i in kept]
        """Updates with metrics, thinned."""
        self.hours = [hours[i] for i in kept]
        """Duration of the run at each of `steps`."""
        self.curves = {name: [values[i] for i in kept] for name, values in series.items()}
        """A value for each of `steps`, by metric name."""
        self.newest = {name: value for step in steps for name, value in rows[step].items() if value is not None}
        """Newest value of every metric."""
        self._tails["metrics"].lines.clear()  # a report needs no more than the curves


@dataclass(frozen=True, slots=True)
class Group:
    label: str
    differing: dict[str, str] = field(default_factory=dict)
    """Values of the keys in which the groups differ."""


def read_runs(directories: Sequence[Path]) -> list[RunData]:
    """Read and group runs; a group's runs are adjacent. Raises UnstableError."""
    runs = [RunData(directory) for directory in dict.fromkeys(map(Path.resolve, directories))]
    keys = [json.dumps(_shared_config(run), sort_keys=True, default=str) for run in runs]
    order = list(dict.fromkeys(keys))
    for run, key in zip(runs, keys, strict=True):
        run.group = order.index(key)
    runs.sort(key=lambda run: run.group)
    _label(runs)
    return runs


def groups_of(runs: Sequence[RunData]) -> list[Group]:
    """Return the groups in order. A single group has no label."""
    configs = {run.group: _shared_config(run) for run in runs}
    differing = differences([*configs.values()])
    groups = []
    for number in range(len(configs)):
        own = {key: _short(values[number]) for key, values in differing.items()}
        shown = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in own.items())
        letter = f"config {chr(ord('A') + number % 26)}"
        label = (shown if len(shown) <= MAX_LABEL_CHARS else letter) if len(configs) > 1 else ""
        groups.append(Group(label, own))
    return groups


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values, one for each config, of the keys in which flat configs differ."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = {key: [_text(config.get(key)) for config in configs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _label(runs: Sequence[RunData]) -> None:
    groups = groups_of(runs)
    labels = [" · ".join(filter(None, (groups[run.group].label, f"seed {run.seed}"))) for run in runs]
    for run, label in zip(runs, labels, strict=True):
        started = run.directory.name[:8]  # the time of day, with which run directories begin
        run.label = f"{label} ({started})" if labels.count(label) > 1 else label


def _ladder_rows(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float, float, int]]]:
    rows: dict[str, list[tuple[int, float, float, int]]] = {}
    for line in lines:
        for uid, (mu, sigma, games, *_) in line["models"].items():
            if games:
                rows.setdefault(uid, []).append((line["step"], mu, sigma, games))
    return rows


def _thin(count: int) -> list[int]:
    """Return the indices of `count` points that are kept: all, or every k-th and the last."""
    stride = math.ceil(count / MAX_POINTS) or 1
    return sorted({*range(0, count, stride), *([count - 1] if count else [])})


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _shared_config(run: RunData) -> dict[str, Any]:
    """Return the config without the keys in which runs of one group may differ."""
    return {key: value for key, value in flat(run.config) if key not in OWN_KEYS}


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


def _short(text: str) -> str:
    return text if len(text) <= MAX_LABEL_CHARS else f"{text[: MAX_LABEL_CHARS - 1]}…"
