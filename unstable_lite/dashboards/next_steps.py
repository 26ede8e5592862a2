"""Next steps of a run: its next evaluation, and once it has stopped the commands to paste."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from unstable_lite.adapters.frozen import by_update, find_best
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.errors import UnstableError
from unstable_lite.tracking.result_rows import ResultRow


def next_commands(run: Path, rows: Iterable[ResultRow], is_over: bool) -> dict[str, tuple[str, str]]:
    """Return, by name, the best checkpoint of a run that has stopped, and commands: each as words and a path.

    rows: its results, which show if there is an opponent to play against. is_over: whether all updates are made.
    """
    steps, saved = dict[str, tuple[str, str]](), by_update(run / "checkpoints")
    model, path = str(run), saved[max(saved)] if saved else run
    with contextlib.suppress(UnstableError):  # no checkpoint was both evaluated and saved
        path, text = find_best(run)
        words, _, named = text.partition(": ")
        model, steps["best checkpoint"] = f"run:{run}/best", (f"{words}:", named)
    steps["report"] = command("report"), shlex.quote(str(run))
    if saved and any(row.opponent.partition(",")[0] != "none" for row in rows):
        steps["play against it"] = command("play"), shlex.quote(model)
    if saved:
        steps["evaluate it again"] = command("eval", "base"), shlex.join([str(path), "--output", str(run / "eval")])
    if saved and not is_over:
        steps["to continue"] = command("run", "--resume"), shlex.quote(str(run))
    return steps


def command(*words: object) -> str:
    return shlex.join(["unstable-lite", *map(str, words)])


def upcoming(view: RunDirectory) -> str:
    """Return when the next evaluation begins, or why none does."""
    run, made = view.config["run"], view.num_updates
    has_games = run.get("eval_games") or (run.get("num_eval_workers", 16) and run.get("schedule") != "sync")
    if not view.config.get("eval_envs") or not has_games:
        return "no evaluation is planned: that needs [[eval_envs]] and run.eval_games"
    if not view.is_up:
        return f"the run stopped before {'another' if view.lines('eval') else 'an'} evaluation ended"
    if not run.get("eval_games"):
        return "games beside training are a checkpoint's evaluation as soon as it has played its last one"
    first = "no evaluation has ended yet: the first is that before training, " * (not view.lines("eval"))
    every = run.get("eval_every") or view.learning_steps
    return f"{first}the next begins after update {min(every * (made // every + 1), view.learning_steps)}"
