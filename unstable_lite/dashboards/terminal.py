"""Terminal output of a run: a live line on a terminal, plain dated lines elsewhere, a table at the end.

No text is markup, because names of models and messages of libraries contain brackets.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from unstable_lite.config.games import against
from unstable_lite.printable import visible
from unstable_lite.tracking.evaluations import Evaluation

PLAIN_LINE_EVERY_S = 5.0


class VisibleConsole(Console):
    """Console whose text is neither markup, emoji codes nor terminal control."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False)

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
        for the live line; default: that of the last update.
        """
        self._batch_progress = batch_progress
        self._status = status
        self._progress.reset(self._task, total=total_updates, completed=completed)
        self._is_counting = True
        self._show()

    def stop(self) -> None:
        self._doing.clear()
        self.stop_counting()

    def stop_counting(self) -> None:
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
            now = Text(f"{time.strftime('%H:%M:%S')} ", style="dim")
            with contextlib.suppress(OSError):  # a file on a full disk, or a pipe without a reader
                self.console.print(Text.assemble(now, as_line(text)), soft_wrap=True)

    def _render(self) -> Group:
        lines: list[RenderableType] = []
        if self._is_counting:
            lines.append(self._progress)
            if self._batch_progress is not None:
                waiting, needed = self._batch_progress()
                bar = ProgressBar(total=needed, completed=min(waiting, needed), width=24)
                lines.append(Columns(["batch  ", bar, f"{waiting}/{needed} steps"]))
            lines.append(as_line(self._status() if self._status is not None else self._last_status))
        for describe, since in self._doing:
            lines.append(Text(f"{describe()}  ({time.monotonic() - since:.0f} s)", style="cyan"))
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


def evaluation_tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """Return one table for each env and opponent, in chronological order."""
    tables = []
    for env_id, opponent in dict.fromkeys((e.env_id, e.opponent) for e in evaluations):
        rows = [e for e in evaluations if (e.env_id, e.opponent) == (env_id, opponent)]
        has_winners = any(math.isfinite(e.points) for e in rows)
        has_choices = any(e.choices for e in rows)
        shown = ("points", "95 % interval", "won", "draw") if has_winners else ("reward", "95 % interval")
        columns = ("games", *shown, "own\ninvalid", *["best\nmoves"] * has_choices)
        table = plain_table(f"{env_id}{against(opponent)}", ("when", "model"), columns)
        for evaluation in rows:
            if not evaluation.n:
                share = interval = "–"
            elif has_winners:
                share, (low, high) = f"{evaluation.points:.1%}", evaluation.interval
                interval = f"{100 * low:.1f} – {high:.1%}"
            else:
                share, (low, high) = f"{evaluation.mean_reward:.3f}", evaluation.interval
                interval = f"{low:.3f} – {high:.3f}" if math.isfinite(low) else "–"
            table.add_row(
                evaluation.label,
                evaluation.model,
                f"{evaluation.n}" + f" (+{evaluation.void} void)" * bool(evaluation.void),
                share,
                interval,
                *([f"{evaluation.wins}", f"{evaluation.draws}"] if has_winners else []),
                evaluation.own_invalid,
                *[f"{evaluation.optimal_share:.0%}" if evaluation.choices else "–"] * has_choices,
            )
        table.caption = rows[-1].describe_change(rows[0]) if len(rows) > 1 else None
        tables.append(table)
    return tables


def remark_lines(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the remarks on evaluations, to print below their tables."""
    return [f"{e.label}, {e.env_id}{against(e.opponent)}: {remark}" for e in evaluations for remark in e.remarks]
