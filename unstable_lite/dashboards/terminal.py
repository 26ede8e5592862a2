"""Terminal output of a run: a live line on a terminal, plain dated lines elsewhere; at the end a table and next steps.

No text is markup, because names of models and messages of libraries contain brackets.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from rich.theme import Theme

from unstable_lite.adapters.frozen import by_update, find_best, policies_of
from unstable_lite.config.games import against
from unstable_lite.dashboards.league import about
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.dashboards.text_rows import hanging
from unstable_lite.errors import UnstableError
from unstable_lite.printable import visible
from unstable_lite.tracking.displayed_metrics import named
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.result_rows import ResultRow

PLAIN_LINE_EVERY_S = 5.0
_BARS = dict.fromkeys(("bar.complete", "bar.finished", "bar.pulse", "progress.download"), "green")
PLAIN = Theme(_BARS | dict.fromkeys(("progress.elapsed", "progress.remaining"), "default"))
"""Rich's own bars are red and its times yellow, which mean trouble here."""


class VisibleConsole(Console):
    """Console whose text is neither markup, emoji codes nor terminal control."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False, theme=PLAIN)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with control characters made visible; rich's own control segments stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class StandardOutput(VisibleConsole):
    """Standard output that replaces characters outside of its encoding, and survives the end of its reader."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        super().__init__()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it exits


class TerminalInterface:
    """Progress of one run. All methods are cheap and may be called at any time."""

    def __init__(self, console: Console | None = None, quiet: bool = False, unit: str = "update") -> None:
        """Make an interface. `unit`: noun for one step of the progress."""
        self.console = console or StandardOutput()
        self._quiet = quiet
        self._unit = unit
        self._progress = Progress(
            TextColumn(f"{unit}s"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._status: Callable[[], str] | None = None
        self._last_status = ""
        self._batch_progress: Callable[[], tuple[int, int]] | None = None
        self._is_counting = False
        self._doing: list[tuple[Callable[[], str], float]] = []
        """Descriptions of lengthy operations in progress, with their start times."""
        self._live: Live | None = None
        self._task = self._progress.add_task("updates", total=None)
        self._last_line = 0.0

    def of(self, unit: str) -> TerminalInterface:
        """Return an interface on the same terminal for another progress."""
        return TerminalInterface(self.console, self._quiet, unit)

    def start(
        self,
        total_updates: int,
        batch_progress: Callable[[], tuple[int, int]] | None = None,
        completed: int = 0,
        status: Callable[[], str] | None = None,
    ) -> None:
        """Show the progress.

        batch_progress: number of steps that wait for the next update, and number that it takes. status: current text
        below the progress, with the time that is left; default: that of the last update.
        """
        self._batch_progress = batch_progress
        self._status = status
        if status is not None:  # it says the time that is left
            self._progress.columns = self._progress.columns[:4]
        self._progress.reset(self._task, total=total_updates, completed=completed)
        self._is_counting = True
        self._show()

    def stop(self) -> None:
        """End the progress; other operations remain visible."""
        self._is_counting = False
        self._show()

    @contextlib.contextmanager
    def doing(self, describe: Callable[[], str]) -> Iterator[None]:
        """Show, while the body runs, its current description and its duration."""
        entry = (describe, time.monotonic())
        self._doing.append(entry)
        self._show()
        try:
            yield
        finally:
            self._doing = [other for other in self._doing if other is not entry]
            self._show()

    def _show(self) -> None:
        """Start or stop the live lines, which exist while they have content."""
        is_wanted = (self._is_counting or self._doing) and self.console.is_terminal and not self._quiet
        live = self._live
        with contextlib.suppress(OSError):  # the terminal was closed
            if is_wanted and live is None:
                self._live = Live(
                    get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True
                )
                self._live.start()
            elif not is_wanted and live is not None:
                self._live = None
                live.stop()

    def say(self, text: str) -> None:
        """Print one dated line."""
        if not self._quiet:
            now = Text(f"{time.strftime('%H:%M:%S')}  ", style="dim")
            with contextlib.suppress(OSError):  # a file on a full disk, or a pipe without a reader
                print_lines(self.console, Text.assemble(now, as_line(text)))

    def _render(self) -> Group:
        lines: list[RenderableType] = []
        if self._is_counting:
            lines.append(self._progress)
            if self._batch_progress is not None:
                waiting, needed = self._batch_progress()
                bar = ProgressBar(total=needed, completed=min(waiting, needed), width=24)
                lines.append(Columns(["batch  ", bar, f"{waiting}/{needed} steps"]))
            shown = self._status() if self._status is not None else self._last_status
            for line in shown.split("\n"):
                lines += hanging(as_line(line), self.console.width)
        for describe, since in self._doing:
            lines.append(Text(f"{describe()}  ({time.monotonic() - since:.0f} s)"))
        return Group(*lines)

    def show_update(self, update: int, total: int, status: str) -> None:
        self._progress.update(self._task, completed=update)
        self._last_status = status
        is_due = time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_S or update == total
        if self._live is None and is_due:
            self._last_line = time.monotonic()
            self.say(f"{self._unit} {update}/{total}  {status}")


def as_line(text: str) -> Text:
    """Return the line with an alarm, or the number of alarms at its end, in red."""
    line = Text(text)
    line.highlight_regex(r"^(alarm|collapsed|declined)\b|  alarms \d.*$", "red")
    return line


def print_lines(console: Console, text: str | Text) -> None:
    """Print lines: whole, but on a terminal wrapped at words."""
    for line in text.split() if isinstance(text, Text) else map(as_line, text.split("\n")):
        for row in hanging(line, console.width) if console.is_terminal else [line]:
            console.print(row, soft_wrap=True)


def key_value_lines(rows: Iterable[tuple[str, str]]) -> str:
    """Return aligned lines, which are never cut, because paths are copied."""
    rows = list(rows)
    width = max(len(key) for key, _ in rows) + 2
    return "\n".join(f"{key:<{width}}{value}" for key, value in rows)


def plain_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table with columns of names on the left and of numbers on the right."""
    table = Table(
        *(Column(name, overflow="fold") for name in names),
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.pad_edge, table.collapse_padding = False, True  # at most 80 columns
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def evaluation_tables(rows: Iterable[ResultRow]) -> list[Table]:
    """Return one table for each result row, with its evaluations in chronological order."""
    tables = []
    for row in rows:
        evaluations = row.evaluations
        has_choices = any(one.choices for one in evaluations)
        wins = ["won", "draw"] if row.newest.is_share else []
        columns = ("games", row.newest.value_name, "95 %", *wins, "own\ninvalid", *["best\nmoves"] * has_choices)
        table = plain_table(
            row.title + f"\n({about(row.opponent)})" * bool(about(row.opponent)), ("when", "model"), columns
        )
        for one in evaluations:
            table.add_row(
                one.label,
                one.model,
                f"{one.n}" + f" (+{one.void} void)" * bool(one.void),
                one.value_text,
                one.interval_text,
                *[f"{one.wins}", f"{one.draws}"] * bool(wins),
                one.own_invalid,
                *[one.optimal_text] * has_choices,
            )
        if row.change is not None:
            table.caption = f"change {row.change_text} (95 %: {row.change_interval_text}): {row.verdict_text}"
        tables.append(table)
    return tables


def remark_lines(evaluations: Iterable[Evaluation]) -> list[str]:
    """Return the remarks on evaluations, to print below their tables."""
    found = ((one, remark) for one in evaluations for remark in one.remarks)
    return [f"{e.label}, {named(e.policy, e.env_id)}{against(e.opponent)}: {remark}" for e, remark in found]


def next_commands(run: Path, rows: Iterable[ResultRow], is_over: bool) -> dict[str, tuple[str, str]]:
    """Return, by name, the best checkpoint of a run that has stopped, and commands: each as words and a path.

    rows: its results, which show if there is an opponent to play against. is_over: whether all updates are made.
    """
    steps, saved = dict[str, tuple[str, str]](), by_update(run / "checkpoints")
    model, path = str(run), saved[max(saved)] / policies_of(run)[0] if saved else run
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
