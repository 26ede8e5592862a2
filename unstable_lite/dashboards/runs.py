"""List, compare and prune the runs on this disk.

Reads the files of runs. Removes nothing that `run --resume` needs, and nothing of a run that is in progress. Knows
nothing of the making of runs.
"""

from __future__ import annotations

import os
import shutil
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich import filesize
from rich.table import Table
from rich.text import Text

from unstable_lite.adapters.run_adapters import by_update
from unstable_lite.adapters.store import LOCK, try_lock
from unstable_lite.config.games import against
from unstable_lite.dashboards.report.runs import RunData, differences, flat
from unstable_lite.dashboards.run_view import RunView
from unstable_lite.errors import UnstableError
from unstable_lite.files import understood
from unstable_lite.planning.trust import CONFIG
from unstable_lite.tracking.run_directory import PAUSED, RUNS, find_damage, runs_in

STATE_STYLES = {"running": "green", "paused": "yellow", "failed": "red", "killed": "red", "unreadable": "red"}
DAY_S = 86_400.0
EMPTY_FOR_S = 60.0
"""Age in seconds below which a run without a checkpoint may still be starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    directory: Path
    began: float
    """Start time, in seconds since the epoch."""
    size_bytes: int
    state: str
    """`running`, `paused`, `ended`, `failed` (by an error or a second Ctrl-C), `killed` (its process is gone without a
    record), or `unreadable`."""
    updates: str = "0/0"
    """Number of updates, made and planned."""
    points: str = "–"
    """Points and number of games of the newest evaluation."""
    content: str = ""
    """Algorithm, model and training envs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prunable:
    """Files of one run that may be removed."""

    directory: Path
    paths: tuple[Path, ...] = ()
    size_bytes: int = 0
    kept: tuple[str, ...] = ()
    """Names of the checkpoints that stay."""
    refused: str | None = None
    """Reason why nothing of a run that was named may be removed."""


def list_runs(outputs: Path) -> list[RunEntry]:
    """Return every run in `outputs`, the newest first. Raises UnstableError if there is none."""
    return sorted(map(_entry, runs_in(outputs)), key=lambda entry: (entry.began, entry.directory), reverse=True)


def runs_table(entries: Sequence[RunEntry]) -> Text:
    """Return three lines per run: numbers, content, and the directory, which is never cut because it is copied."""
    lines = [Text(f"{'begun':<16}  {'state':<10}  {'updates':>11}  {'points (games)':>15}  {'size':>9}", style="bold")]
    for entry in entries:
        line = Text(f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.began))}  ")
        line.append(f"{entry.state:<10}", style=STATE_STYLES.get(entry.state, ""))
        line.append(f"  {entry.updates:>11}  {entry.points:>15}  {filesize.decimal(entry.size_bytes):>9}")
        lines += [line, Text(f"    {entry.content}", style="dim"), Text(f"    {entry.directory}")]
    return Text("\n").join(lines)


def compare(directories: Sequence[Path]) -> tuple[list[Path], Table, Table]:
    """Return the runs of the columns A, B, …, the config keys in which they differ, and their results.

    Raises UnstableError unless all are run directories.
    """
    runs, results = list[RunData](), list[dict[str, str]]()
    for directory in dict.fromkeys(path.resolve() for path in directories):
        with understood(directory):
            runs.append(RunData(directory))
            results.append(dict(_results(runs[-1])))
    if len(runs) < 2:
        raise UnstableError("a comparison needs at least two different run directories")
    differing = differences([dict(flat(run.config)) for run in runs])
    differing.pop("run.output_dir", None)
    names = dict.fromkeys(name for of_run in results for name in of_run)
    rows = {name: [of_run.get(name, "–") for of_run in results] for name in names}
    return (
        [run.directory for run in runs],
        _side_by_side("config", differing, len(runs)),
        _side_by_side("result", rows, len(runs)),
    )


def find_prunable(
    outputs: Path,
    directories: Sequence[Path] = (),
    keep: int = 1,
    older_than_days: float = 0.0,
    with_train_data: bool = False,
    with_empty_runs: bool = False,
) -> list[Prunable]:
    """Return the removable files of `directories`, or of every run in `outputs`.

    Runs that were written to within `older_than_days` have none.
    Older and damaged checkpoints are removable. The newest `keep` intact ones stay, the best of each evaluation, and
    any from which another run starts; without an intact one, all stay. `with_train_data`: also the batches, which only
    `report` and `export` read. `with_empty_runs`: also whole directories of runs without any checkpoint. Raises
    UnstableError for a directory that is not a run's.
    """
    asked = [*map(Path.resolve, directories)] or [path.resolve() for path in runs_in(outputs)]
    all_runs = {*asked, *(path.parent for path in outputs.glob(RUNS))}
    wanted = {path for run in all_runs for path in _starting_points(run)}
    found = []
    for run in asked:
        try:
            with understood(run):
                found.append(_find_prunable_in(run, keep, wanted, older_than_days, with_train_data, with_empty_runs))
        except UnstableError as error:
            if directories:
                raise
            found.append(Prunable(directory=run, refused=str(error)))
    return found


def _find_prunable_in(
    run: Path,
    keep: int,
    wanted: Collection[Path],
    older_than_days: float,
    with_train_data: bool,
    with_empty_runs: bool,
) -> Prunable:
    """Return the removable files of one run; none if it was written to too recently."""
    view = RunView(run)
    view.refresh()
    rested_s = time.time() - _last_written(run)
    if _is_locked(view):
        return Prunable(directory=run, refused="it is running")
    if rested_s < older_than_days * DAY_S:
        return Prunable(directory=run)
    paths, kept = _old_checkpoints(view, keep, wanted)
    if (run / LOCK).exists():
        paths += run.glob("unstable_lite-*")  # adapters of a killed run for which shared memory was too small
    if with_train_data and (run / "train_data").is_dir():
        paths.append(run / "train_data")
    if with_empty_runs and rested_s > EMPTY_FOR_S and not any((run / "checkpoints").glob("*ckpt-*")):
        paths = [run]
    taken = sum(map(size_on_disk, paths))
    return Prunable(directory=run, paths=tuple(paths), size_bytes=taken, kept=tuple(kept))


def prune(prunable: Prunable) -> str | None:
    """Remove the files while holding the run's lock, so that no process resumes it; return the reason if that failed.

    Raises OSError if a file cannot be removed.
    """
    try:
        lock = try_lock(prunable.directory)
    except PermissionError:
        return f"{prunable.directory / LOCK} belongs to another user"
    if lock is None:
        return "it is running now"
    try:
        for path in prunable.paths:
            shutil.rmtree(path)
    finally:
        os.close(lock)
    if prunable.paths == (prunable.directory,):
        with suppress(OSError):  # the directory of the day, if this was its last run
            prunable.directory.parent.rmdir()
    return None


def size_on_disk(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory; a file that disappears counts as 0."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(Path(directory, name)).st_size
    return total


def _entry(directory: Path) -> RunEntry:
    """Return the entry of one run; `unreadable` for any damage, so that the others are shown."""
    began, taken = 0.0, 0
    try:
        began, taken = _began(directory), size_on_disk(directory)
        with understood(directory):
            return _readable_entry(directory, began, taken)
    except (UnstableError, OSError):
        return RunEntry(directory=directory, began=began, size_bytes=taken, state="unreadable")


def _readable_entry(directory: Path, began: float, taken: int) -> RunEntry:
    view = RunView(directory)
    view.refresh()
    state = view.ending or "killed"
    if _is_locked(view):
        state = "paused" if (directory / PAUSED).exists() else "running"
    counted = [line for line in view.lines("eval") if line["n"] and line["points"] is not None]
    newest = max(counted, key=lambda line: (line["label"] != "concurrent", line["step"]), default=None)
    env_ids = dict.fromkeys(str(env["env_id"]) for env in view.config["train_envs"])
    return RunEntry(
        directory=directory,
        began=began,
        size_bytes=taken,
        state=state,
        updates=f"{view.num_updates}/{view.learning_steps}",
        points="–" if newest is None else f"{newest['points']:.1%} ({newest['n']})",
        content=", ".join((view.config.get("algorithm", ""), view.config["model_name"], *env_ids)).strip(", "),
    )


def _is_locked(view: RunView) -> bool:
    """Return whether a process holds the run's lock; if the lock is another user's, whether its process exists."""
    if not (view.directory / LOCK).exists():
        return False
    try:
        lock = try_lock(view.directory)
    except PermissionError:
        return view.is_running
    if lock is not None:
        os.close(lock)
    return lock is None


def _began(directory: Path) -> float:
    """Return the start time in the name, because copying changes the times of files; else that of the first file."""
    try:
        return time.mktime(time.strptime(f"{directory.parent.name} {directory.name[:8]}", "%Y-%m-%d %H-%M-%S"))
    except ValueError:
        return min(path.stat().st_mtime for path in directory.glob("config*.toml"))  # a resume may rewrite it


def _last_written(directory: Path) -> float:
    names = ("config.toml", "metrics.jsonl", "games.jsonl", "live.json", "checkpoints")
    return max((directory / name).stat().st_mtime for name in names if (directory / name).exists())


def _results(run: RunData) -> Iterator[tuple[str, str]]:
    latest = run.newest
    yield "updates", f"{run.steps[-1] if run.steps else 0} of {run.config['run'].get('learning_steps', '?')}"
    evaluations = {
        (line["env_id"], line["opponent"], line["label"] == "concurrent"): line for line in run.lines("eval")
    }
    for (env_id, opponent, is_concurrent), line in evaluations.items():
        remark = ", while training" * is_concurrent
        if line["points"] is not None:
            shown, form = f"{line['points']:.1%} of the points", "{:.1%}"
            interval = line["points_interval"]
        elif line["mean_reward"] is not None:
            shown, form = f"reward {line['mean_reward']:.3f}", "{:.3f}"
            interval = [edge for edge in line["reward_interval"] if edge is not None]
        else:
            continue
        between = " – ".join(map(form.format, interval))
        name = f"{env_id}{against(opponent)}{remark}"
        yield name, f"{shown}{f' ({between})' * bool(interval)}, n={line['n']}, {line['model']}"
    for env in run.config["train_envs"]:
        group = f"collection-{env['env_id']}"
        for name, form in (("reward", "{:+.3f}"), ("Points", "{:.1%}"), ("Ended by own invalid move", "{:.1%}")):
            if (value := latest.get(f"{group}/{name}")) is not None:
                n = latest.get(f"{group}/n", 0)
                yield f"{env['env_id']}, training: {name}", f"{form.format(value)}, n={n:.0f}"
        for name in ("exploitability", "exploitability_legal"):
            if (value := latest.get(f"{name}/{env['env_id']}")) is not None:
                yield f"{env['env_id']}, {name} (exact)", f"{value:.4f}"
    for label, metric, form, of in (
        ("entropy", "learner/entropy", "{:.3f}", "learner/num_tokens"),
        ("staleness", "learner/staleness_mean", "{:.2f}", "learner/num_tokens"),
        ("|Δ log p| engine, learner", "learner/mismatch_mean", "{:.2g}", "learner/mismatch_tokens"),
        ("games at the last update", "run/games", "{:,.0f}", None),
        ("void games", "run/void_games", "{:,.0f}", None),
        ("tokens/s", "run/tokens_per_s", "{:,.0f}", None),
        ("seconds", "run/seconds", "{:,.0f}", None),
    ):
        if metric in latest and (of is None or latest.get(of)):
            yield label, form.format(latest[metric]) + (f", n={latest[of]:.0f} tokens" if of is not None else "")
    yield "alarms", str(len(run.alarms()))


def _side_by_side(title: str, rows: Mapping[str, Sequence[str]], num_runs: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for number in range(num_runs):
        table.add_column(column_name(number), overflow="fold")
    for name, values in rows.items():
        table.add_row(Text(name), *map(Text, values))
    return table


def column_name(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def _old_checkpoints(view: RunView, keep: int, wanted: Collection[Path]) -> tuple[list[Path], list[str]]:
    """Return the removable checkpoints, and the names of the others."""
    checkpoints = view.directory / "checkpoints"
    newest_first = list(reversed(by_update(checkpoints).values()))
    whole: list[Path] = []
    for path in newest_first:
        if len(whole) < keep and find_damage(path) is None:
            whole.append(path)
    if not whole:
        return [], [path.name for path in newest_first]
    best = _best(view)
    stays = [path for path in newest_first if path in whole or path.name in best or path.resolve() in wanted]
    goes = [path for path in newest_first if path not in stays]
    goes += [*checkpoints.glob("damaged-ckpt-*"), *checkpoints.glob(".ckpt-*.partial")]
    return goes, [path.name for path in stays]


def _best(view: RunView) -> set[str]:
    """Return, for each env and opponent, the best checkpoint of the evaluations with a quota."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for line in view.evaluations():
        shown = line["points"] if line["points"] is not None else line.get("mean_reward")
        if shown is not None and line["model"].startswith("ckpt-"):
            cell, result = (line["env_id"], line["opponent"]), (shown, line["model"])
            best[cell] = max(best.get(cell, result), result, key=lambda found: found[0])
    return {model for _, model in best.values()}


def _starting_points(run: Path) -> Iterator[Path]:
    """Yield the checkpoints that a run's config names, because a resume reads them."""
    with suppress(OSError, UnstableError), understood(run):
        lora = tomllib.loads((run / CONFIG).read_text(encoding="utf-8")).get("lora", {})
        for key, inside in (("initial_lora_path", "."), ("initial_critic_path", "..")):
            if key in lora:
                yield (Path(lora[key]) / inside).resolve()


def say_prunable(prunables: Sequence[Prunable], say: Callable[[str], None]) -> int:
    """Report the removable files of each run; return the bytes that removal frees."""
    for prunable in prunables:
        if prunable.refused is not None:
            say(f"{prunable.directory}: nothing, because {prunable.refused}")
        elif prunable.paths:
            names = ", ".join(
                str(path.relative_to(prunable.directory)) if path != prunable.directory else "all of it"
                for path in prunable.paths
            )
            stays = f"; {', '.join(prunable.kept)} stay" * bool(prunable.kept)
            say(f"{prunable.directory}: {filesize.decimal(prunable.size_bytes)}: {names}{stays}")
    return sum(prunable.size_bytes for prunable in prunables)
