"""Results of a study in one compact JSON file, from which it continues on any machine.

Owns the format: the effective config of each arm once, and one record for each run. Reads run directories.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.study.checkpoints import COMPUTED
from bench.study.reading import (
    Arm,
    Checked,
    Measure,
    as_stored,
    digest,
    digest_of,
    series_of,
    warm_start_digest,
)
from bench.study.statistics import rounded, summarise
from unstable_lite.adapters.peft_files import WEIGHTS
from unstable_lite.config.reading import drop_removed, parse_config
from unstable_lite.dashboards.run_directory import RunDirectory, differences, flat
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced, understood
from unstable_lite.planning.trust import CONFIG
from unstable_lite.types import policy_of

FORMAT = 1
MAX_POINTS = 100
"""Most points of a curve in the file; longer ones are thinned evenly. Measures are taken before that."""
MAX_BYTES = 2_000_000
TAKE: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "mean": fmean,
    "min": min,
    "max": max,
}
NEARLY_ALL = 0.95
"""Share of a run's updates before which a last value is called early; one of several policies may learn last."""
KEYS = {"arm", "seed", "run_seed", "config", "primary", "seconds", "updates", "games", "alarms"}
KEYS |= {"directory", "commit", "measures", "curves"}
"""Keys of a record that are read again."""

Record = dict[str, Any]
Curve = list[tuple[int, float]]


@dataclass(slots=True)
class Results:
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Effective configs by digest."""
    runs: dict[tuple[str, int], Record] = field(default_factory=dict)
    """Records by arm and seed of the study."""

    def of(self, checked: Checked) -> list[Record]:
        """Return the records that belong to the study as it is now, in its order: seed by seed."""
        wanted = _keys_of(checked)
        return [self.runs[key] for key in wanted if key in self.runs and not self.changed(checked, *key)]

    def in_order(self, checked: Checked) -> list[Record]:
        """Return all records in the study's order, whichever ended first, and then those of other arms and seeds."""
        place = {key: number for number, key in enumerate(_keys_of(checked))}
        return [self.runs[key] for key in sorted(self.runs, key=lambda key: place.get(key, len(place)))]

    def changed(self, checked: Checked, arm: str, seed: int) -> list[str]:
        """Return the keys in which the config of a record differs from the arm's: `key: before → now`."""
        record, config = self.runs[arm, seed], checked.configs[arm]
        seed_now = seed + next(one.seed_offset for one in checked.study.arms if one.name == arm)
        shown = [] if record["run_seed"] == seed_now else [f"run.seed: {record['run_seed']} → {seed_now}"]
        if record["config"] == digest(config):
            return shown
        raw = copy.deepcopy(self.configs[record["config"]])
        drop_removed(raw)
        stored, problems = parse_config(raw)  # keys that are new since then have defaults
        if problems or stored is None:
            return [*shown, *problems]
        rows = differences([dict(flat(as_stored(one))) for one in (stored, config)])
        return [*shown, *(f"{key}: {before} → {now}" for key, (before, now) in rows.items())]


def _keys_of(checked: Checked) -> list[tuple[str, int]]:
    return [(arm.name, seed) for seed in checked.study.seeds for arm in checked.study.arms]


def read_results(path: Path, name: str) -> Results:
    """Return the results of the study `name`, empty without a file. Raises UnstableError if it has other content."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Results()
    except (OSError, ValueError, RecursionError) as error:
        raise UnstableError(f"{path} cannot be read: {error}; move it away, or name another file with --json") from None
    with understood(path):
        if (raw["format"], raw["study"]["name"]) != (FORMAT, name):
            raise UnstableError(f"{path} has results of study {raw['study']['name']!r}; name another file with --json")
        runs = {(str(run["arm"]), int(run["seed"])): dict(run) for run in raw["runs"]}
        if short := [key for key, run in runs.items() if not run.keys() >= KEYS]:
            raise ValueError(f"its run {short[0]} lacks {', '.join(sorted(KEYS - runs[short[0]].keys()))}")
        if lost := {run["config"] for run in runs.values()} - set(raw["configs"]):
            raise ValueError(f"it has no config {min(lost)}")
        return Results(configs=dict(raw["configs"]), runs=runs)


def write_results(path: Path, checked: Checked, results: Results) -> dict[str, Any]:
    """Replace the file by these results with their aggregates, and return its content. Raises OSError."""
    used = {run["config"] for run in results.runs.values()}
    content = {
        "format": FORMAT,
        "study": checked.study.model_dump(mode="json"),
        **summarise(checked.study, results.of(checked)),
        "configs": {key: config for key, config in results.configs.items() if key in used},
        "runs": results.in_order(checked),
    }
    lines = [f"{json.dumps(key)}: {_listed(value)}" for key, value in content.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return content


def _listed(value: Any) -> str:
    """Return JSON with a line for each item of a list, so that a difference of two versions shows runs."""
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"


def record_run(checked: Checked, arm: Arm, seed: int, directory: Path, results: Results) -> Record:
    """Add the record of a finished run, and return it. Raises UnstableError if its files cannot be read."""
    config, before = checked.configs[arm.name], results.runs.get((arm.name, seed), {})
    is_known = before.get("directory") == directory.name  # it is read again for another measure
    view = RunDirectory(directory)
    view.refresh()
    with understood(directory):
        curves = _curves(view)
        for series in (measure.series for measure in checked.study.measures.values()):
            kind, _, env_id = series.partition("/")
            if kind in COMPUTED and series not in curves:
                curves |= COMPUTED[kind](directory, config, env_id)
        newest: dict[str, Any] = {name: value for line in view.lines("metrics") for name, value in line.items()}
        measures = checked.study.measures
        kept = {measure.series for measure in measures.values()}
        kept |= {name for name in curves if name.startswith(("exploitability/", "points against "))}
        record = {
            "arm": arm.name,
            "seed": seed,
            "run_seed": seed + arm.seed_offset,
            "config": digest(config),
            "overrides": digest_of(arm.overrides),
            "primary": before["primary"] if is_known else checked.study.primary,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(float(newest["time"]))),
            "seconds": round(float(newest["run/seconds"]), 1),
            "updates": view.num_updates,
            "games": newest.get("run/games"),
            "alarms": len(list(view.lines("alarms"))),
            "directory": directory.name,
            "start": _start_of(directory),
            "measures": {name: value_of(measure, curves.get(measure.series, [])) for name, measure in measures.items()},
            "curves": {name: _thinned(curve) for name, curve in curves.items() if name in kept},
            **json.loads((directory / "versions.json").read_text(encoding="utf-8")),
        }
    results.configs[record["config"]] = as_stored(config)
    results.runs[arm.name, seed] = record
    return record


def _start_of(directory: Path) -> str | None:
    """Return a digest of the weights from which a run started; None for the base, or if they are gone."""
    path = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))["lora"].get("initial_lora_path")
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            return hashlib.sha256((Path(path) / WEIGHTS).read_bytes()).hexdigest()[:16]
    return None


def value_of(measure: Measure, curve: Sequence[tuple[int, float]]) -> float | None:
    """Return a measure of a curve; None if the curve has no value after update 0.

    The last half are the updates after half of the curve's last one.
    """
    if measure.take == "change":
        is_whole = len(curve) > 1 and curve[0][0] == 0
        return rounded(curve[-1][1] - curve[0][1]) if is_whole else None
    values = [(update, value) for update, value in curve if update > 0]
    if measure.of == "last-half":
        values = [(update, value) for update, value in values if 2 * update > values[-1][0]]
    return rounded(TAKE[measure.take]([value for _, value in values])) if values else None


def _curves(view: RunDirectory) -> dict[str, Curve]:
    """Return the values of each metric and of each evaluation with a quota, by update."""
    curves: dict[str, dict[int, float]] = {}
    for series, update, value in (*_metrics(view), *_evaluations(view)):
        if value is not None:
            curves.setdefault(series, {})[update] = float(value)
    return {series: sorted(curve.items()) for series, curve in curves.items()}


def _metrics(view: RunDirectory) -> Iterator[tuple[str, int, float | None]]:
    for line in view.lines("metrics"):
        yield from ((name, line["step"], value) for name, value in line.items() if name not in ("step", "time"))


def _evaluations(view: RunDirectory) -> Iterator[tuple[str, int, float | None]]:
    for line in view.lines("eval"):
        # Of several policies, the measures are those of `main`.
        if line["label"] != "concurrent" and line["n"] and policy_of(line["model"]) in ("", "main"):
            for value in ("points", "win_rate", "mean_reward"):
                yield series_of(value, line["opponent"], line["env_id"]), line["step"], line[value]


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    stride = -(-len(curve) // MAX_POINTS)
    return [(update, rounded(value)) for update, value in [*curve[:-1:stride], curve[-1]]]


def remarks(checked: Checked, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe records that lack a measure or have an early one, had another primary one, or are of several commits."""
    study, found = checked.study, list[str]()
    for record in records:
        where = f"{record['arm']}, seed {record['seed']}"
        for name, measure in study.measures.items():
            curve = record["curves"].get(measure.series)
            if record["measures"].get(name) is None:
                found.append(f"{where}: no value of {name!r}")
            elif measure.take in ("last", "change") and curve and curve[-1][0] < NEARLY_ALL * record["updates"]:
                found.append(f"{where}: {name!r} is of update {curve[-1][0]}, the last one is {record['updates']}")
        if record["primary"] != study.primary:
            found.append(f"{where}: the primary measure was {record['primary']!r} when it ran")
    starts = {(warm_start_digest(checked.configs[record["arm"]]), record.get("start")) for record in records}
    if len(starts) > len(dict(starts)):
        found.append("The runs start from several adapters: their warm starts were made on several machines.")
    if len(commits := dict.fromkeys(str(record["commit"])[:12] for record in records)) > 1:
        found.append(f"The runs are of several commits: {', '.join(commits)}")
    return found
