"""The output of `run`, `runs` and `envs` at 80 columns, and the dashboard at four sizes, for runs in `shown_runs`."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.fakes.shown_runs import CASES, running
from tests.fakes.snapshots import assert_as_before
from unstable_lite.cli.app import app, print_summary
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.dashboards.run_directory import RunDirectory, list_runs, runs_table
from unstable_lite.dashboards.terminal import TerminalInterface, VisibleConsole, print_lines
from unstable_lite.dashboards.top import MachineLoad, draw
from unstable_lite.orchestrator.evaluations import Evaluations
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.orchestrator.run import Summary
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.result_rows import result_rows


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_output_looks_as_before(case: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = case(Path("outputs"))
    view = RunDirectory(directory)
    view.refresh()
    console = VisibleConsole(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    parts = parts_of(view, console)
    for line in view.lines("eval"):
        parts.tracker.evaluations.append(Evaluation.from_json(line))
        Evaluations._say(parts.evaluations, parts.tracker.evaluations[-1])
    progress = Progress(parts)
    monkeypatch.setattr(progress, "_pace", lambda: "4 min 10 s left at 1.4 s an update")
    print_lines(console, progress._answers())
    console.print()
    monkeypatch.setattr("unstable_lite.cli.app.console", lambda: console)
    print_summary(
        Summary(
            **asdict(view.totals()),
            directory=directory,
            updates=view.num_updates,
            skipped_updates=0,
            dropped_stale_steps=31,
            training_seconds=300.0,
            evaluations=tuple(parts.tracker.evaluations),
            alarms=tuple(view.alarms()),
            checkpoint=None,
            planned_updates=view.learning_steps,
            played_steps=5000,
            results=tuple(view.results()),
        )
    )
    print_lines(console, runs_table(list_runs(Path("outputs"))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in shown.splitlines() if "outputs/" not in line) <= 80  # paths stay whole
    assert_as_before(f"output/{case.__name__}", re.sub(r"^\d\d:\d\d:\d\d", "12:42:01", shown, flags=re.M))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_top_looks_as_before(case: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    view, frames = RunDirectory(case(Path("outputs"))), []
    view.refresh()
    for width, height in ((60, 20), (80, 24), (120, 36), (200, 50)):
        console = VisibleConsole(file=io.StringIO(), width=width, height=height, color_system=None)
        console.print(draw(view, width, height, MachineLoad()), width=width, height=height)
        frame = console.file.getvalue()  # type: ignore[attr-defined]
        assert frame.count("\n") == height
        frames.append(f"{width} × {height}\n{frame}")
    assert_as_before(f"top/{case.__name__}", "\n".join(frames))


def test_evaluation_without_a_result_is_a_row_like_the_others(tmp_path: Path) -> None:
    view = RunDirectory(running(tmp_path))
    view.refresh()
    console = VisibleConsole(file=io.StringIO(), width=80)
    parts = parts_of(view, console)
    newest = Evaluation.from_json(view.lines("eval")[-1])
    void = replace(newest, n=0, wins=0, draws=0, losses=0, void=400, scores=(), rewards=(), mean_reward=math.nan)
    parts.tracker.evaluations += [newest, void]
    Evaluations._say(parts.evaluations, void)
    header, row, remark = (line[10:] for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    assert header.split("  ")[0] == "when"
    assert [cell for cell in re.split("  +", row) if cell][2:] == ["no result", "–"]
    assert remark.endswith("400 void of 400 games")


def parts_of(view: RunDirectory, console: VisibleConsole) -> Any:
    """Return the parts of a run that its output is made from."""
    envs = [EvalEnvSpec.model_construct(**env) for env in view.config["eval_envs"]]
    cells = [(env.env_id, env.opponent) for env in envs]
    run = SimpleNamespace(**view.config["run"], num_eval_workers=0)
    trained = [SimpleNamespace(**env) for env in view.config["train_envs"]]
    tracker = SimpleNamespace(evaluations=[], latest=view.latest(), void_games=0, ended_early=list)
    parts = SimpleNamespace(
        terminal=TerminalInterface(console),
        plan=SimpleNamespace(config=SimpleNamespace(run=run, eval_cells=cells, train_envs=trained, shares={"": 1.0})),
        tracker=tracker,
        health=SimpleNamespace(status=lambda: "  alarms 1, on: collapse" * bool(view.alarms())),
        results=lambda: result_rows(tracker.evaluations, cells),
    )
    parts.evaluations = Evaluations(parts, None)  # type: ignore[arg-type]
    return parts


def test_envs_look_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["envs", "nim"]).output + CliRunner().invoke(app, ["envs", "UsedCar"]).output
    assert_as_before("output/envs", shown)
