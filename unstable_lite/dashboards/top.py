"""Dashboard: one run on a terminal of at least 60 × 20 characters, redrawn until the viewer quits.

Answers three questions in this order: did it learn, can that be believed, how long does it take and which step is
next. A small terminal shows less of the later ones. Draws the contents of a RunDirectory; itself reads only the load of
this machine. The run is not affected.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from unstable_lite.dashboards.league import ladder_lines
from unstable_lite.dashboards.run_directory import STATE_STYLES, RunDirectory
from unstable_lite.dashboards.terminal import next_commands, upcoming
from unstable_lite.dashboards.text_rows import SPIKE, aligned, all_shortened, hanging, sparkline
from unstable_lite.tracking.displayed_metrics import Metric, Spike, duration, is_share, metrics_of_env, of_topic
from unstable_lite.tracking.intervals import percent
from unstable_lite.tracking.result_rows import ResultRow
from unstable_lite.tracking.run_directory import LIVE_EVERY_S
from unstable_lite.types import uid_of

LEAST_WIDTH, LEAST_HEIGHT = 60, 20
WIDE = 80
"""Width from which names make room for sparklines of results."""
MATRIX_WIDTH, MATRIX_HEIGHT = 120, 36
"""Size from which the ladder shows who beats whom, and texts of alarms are wrapped."""
SILENT_S = 10.0
"""Age of live.json from which the event loop counts as blocked."""
FIRST_LOOK_S = 0.1
"""Time over which a process's load is first measured; later it is measured from frame to frame."""
LEAST_BAR, WIDEST_BAR = 8, 40
COLOURS = {"good": "green", "bad": "red", "open": ""}
"""Colour of a result row's verdict."""
LEGEND = "q: quit    ▲ better  ▼ worse than before (95 %)    ! spike"
CORE = 12
"""Rows of health that come before the ladder; further metrics come after it."""
LABEL, NUMBER = 18, 8
"""Widths of a metric's label and of its numbers."""


def show_once(view: RunDirectory, console: Console) -> None:
    """Print the dashboard to a pipe or a file."""
    view.refresh()
    width, height = max(console.width, LEAST_WIDTH), 40
    console.print(draw(view, width, height, MachineLoad()), width=width, height=height)


def watch(view: RunDirectory, console: Console) -> None:
    """Redraw until `q` or Ctrl-C."""
    load = MachineLoad()
    with _quit_key() as is_quit_within, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view.refresh()
            width, height = console.size
            if width < LEAST_WIDTH or height < LEAST_HEIGHT:
                small = f"{LEAST_WIDTH} × {LEAST_HEIGHT} characters are needed; this terminal has {width} × {height}"
                live.update(small, refresh=True)
            else:
                live.update(draw(view, width, height, load), refresh=True)
            if is_quit_within(LIVE_EVERY_S):
                return


@contextlib.contextmanager
def _quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits a number of seconds and returns whether `q` or Ctrl-C was pressed."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def is_pressed_within(timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0]:
                typed = os.read(descriptor, 16)
                if typed in (b"q", b"\x03", b""):  # nothing is read at the end of the input
                    return True
        return False

    tty.setcbreak(descriptor)
    try:
        yield is_pressed_within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def draw(view: RunDirectory, width: int, height: int, load: MachineLoad) -> RenderableType:
    """Draw one frame of exactly this size."""
    header, room = _header(view, width), height - 3
    is_large = width >= MATRIX_WIDTH and height >= MATRIX_HEIGHT
    last = _workers(view, width, max(3, room // 5), load) if view.is_up else _next_steps(view, width)
    results = _results(view, width, room - len(last) - 4)
    room -= len(last) + len(results)
    health = _health(view, width, 3 if is_large else 1)
    ladder = ladder_lines(view.league(), width, room - CORE - 4, is_large) if room >= CORE + 8 else []
    gaps = 4 if height >= MATRIX_HEIGHT else 0
    rest = max(room - len(ladder) - gaps, 0)
    sections = [header, results, health[rest < 3 :][:rest], ladder, last]
    lines, spare = list[Text](), room - sum(map(len, sections[2:4]))
    for section in filter(None, sections):
        if lines and spare > 0:
            lines.append(Text())
            spare -= 1
        lines += section
    lines = [*lines[: height - 1], *(Text() for _ in range(height - 1 - len(lines))), Text(LEGEND, style="dim")]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _header(view: RunDirectory, width: int) -> list[Text]:
    """Return the name of the run, and its state with the time left; other parts are left out if they do not fit."""
    made, planned, totals = view.num_updates, view.learning_steps, view.totals()
    env_ids = dict.fromkeys(str(env["env_id"]) for env in view.config["train_envs"])
    about = ", ".join(filter(None, (view.config.get("algorithm", ""), view.config["model_name"], *env_ids)))
    state = "running" if view.is_running and view.state == "killed" else view.state
    when, parts = f"after {duration(totals.seconds)}", [f"{totals.games:,} games"]
    style, silent_s = STATE_STYLES.get(state, "bold"), time.time() - view.live.get("time", 0.0)
    if view.is_up:
        when = "time left known after update 2"
    if view.is_up and not view.is_running:
        state = "starting"
    elif view.is_running:
        if silent_s > SILENT_S:
            state, style = f"silent for {duration(silent_s)}", "red"
        if (pace := view.pace()) is not None:
            seconds_per_update, games_per_s = pace
            when = f"left {duration(seconds_per_update * (planned - made))}"
            parts.append(f"{games_per_s:.1f} games/s")
        parts.append(f"{view.latest().get('run/tokens_per_s') or 0:,.0f} tokens/s")
    line, shown = Text.assemble((state, style), "  update ", (f"{made}/{planned}", "bold")), [when]
    for part in parts:
        if line.cell_len + LEAST_BAR + 4 + len("  ".join([*shown, part])) <= width:
            shown.append(part)
    room = min(width - line.cell_len - 4 - len("  ".join(shown)), WIDEST_BAR)
    full = round(min(made / planned, 1) * room)
    line.append("  ".join(["", "█" * full + "░" * (room - full), *shown] if room >= LEAST_BAR else ["", *shown]))
    return [Text.assemble((view.directory.resolve().name, "bold"), "  ", (about, "dim")), line]


def _results(view: RunDirectory, width: int, room: int) -> list[Text]:
    """Return a row for each policy, env and opponent; a second one, with the verdict in words, if there is room."""
    rows = view.results()
    if not rows:
        return [Text("results", style="bold"), *hanging(Text(f"  {upcoming(view)}"), width, 2)]
    updates = {row.newest.step for row in rows}
    newest = f"update {updates.pop()}" if len(updates) == 1 else "newest"
    heads = ["first" if any(row.before.step for row in rows) else "before", newest, "95 % interval", "change"]
    table = [[Text("results", style="bold"), *(Text(head, style="dim") for head in heads)]]
    names = [row.label.replace(f"{row.env_id}, ", "", 1) + " (training)" * row.is_concurrent for row in rows]
    for row, name in zip(rows, all_shortened(names), strict=True):
        style, mark = COLOURS[row.verdict], {0: "  ", 1: "▲ ", -1: "▼ "}[row.direction]
        numbers = (row.before.value_text, row.newest.value_text, row.newest.interval_text, row.change_text)
        styles = ("", f"{style} bold", "", style)
        table.append([Text.assemble((mark, style), name), *map(Text, numbers, styles)])
    envs = [(row.policy, row.env_id) for row in rows]
    num_envs = len({*envs}) if len({row.env_id for row in rows}) > 1 else 0
    has_second = 1 + num_envs + 2 * len(rows) <= room
    trends = _trends(rows, 24 if width > MATRIX_WIDTH else 10)
    lines = aligned(table, "lrrrr", width - (2 + trends[1].cell_len) * (width >= WIDE and not has_second))
    words, below = [Text(), *(_words(row, width - 4 - trends[1].cell_len) for row in rows)], list[list[Text]]()
    for column in (trends, words):
        if lines[0].cell_len + 2 + max(cell.cell_len for cell in column) <= width:
            lines = aligned([*zip(lines, column, strict=True)], "ll")
        else:
            below.append(column)
    shown = lines[:1]
    for number, row in enumerate(rows, start=1):
        if num_envs and envs[number - 1] not in envs[: number - 1]:
            shown.append(Text(row.env_id, style="dim"))
        shown.append(lines[number])
        second = Text("  ").join([Text(), *(column[number] for column in below)])
        if second.plain.strip() and has_second:
            shown.append(second)
    if not any(row.change for row in rows):
        shown += hanging(Text(f"  one evaluation so far; {upcoming(view)}"), width, 2)
    return shown


def _trends(rows: Sequence[ResultRow], width: int) -> list[Text]:
    """Return the least value, a sparkline of all evaluations and the greatest value of each row, below a head."""
    table = []
    for row in rows:
        ones = row.evaluations
        bars, *_ = sparkline([one.value for one in ones], width, row.newest.is_share)
        low, high = min(ones, key=lambda one: one.value), max(ones, key=lambda one: one.value)
        cells = (low.value_text, bars, high.value_text) if len(ones) > 1 else ("", "", "")
        table.append([Text(cell, style="dim") for cell in cells])
    return [
        Text("whole run" * any(len(row.evaluations) > 1 for row in rows), style="dim"),
        *aligned(table, "rll", gap=1),
    ]


def _words(row: ResultRow, room: int) -> Text:
    """Return the verdict in words, if it does not fit without the change, for which the row has a mark."""
    said = row.verdict_text if row.change or not row.newest.n else ""
    if len(said) > room:
        said = said.rpartition("; ")[2]
    return Text("; ".join(filter(None, [said, *row.newest.remarks])), style=COLOURS[row.verdict])


def _health(view: RunDirectory, width: int, most: int) -> list[Text]:
    """Return alarms and spikes, each in at most `most` rows, games that ended early, and a row for each metric."""
    alarms, spikes, early = view.alarms()[::-1], view.spikes(), Counter[str]()
    for name, count in view.latest().items():
        if name.startswith("ended/"):
            early[name.rpartition(")/")[2]] += int(count)
    ended = ", ".join(f"{count:,} {reason}" for reason, count in early.most_common())
    head = "whole run, in means"
    cells = min(width - LABEL - 3 * (NUMBER + 2) - 2, max(len(view.updates()), len(head)))
    head = head if len(head) <= cells else "whole run"
    heads = f"{'newest':>{NUMBER}}  {'least':>{NUMBER}}  {head:<{cells}}  greatest"
    lines = [Text.assemble(("health".ljust(LABEL), "bold"), "  ", (heads, "dim"))]
    for label, texts, order in (("alarms", alarms, "newest"), ("spikes", [one.text for one in spikes], "largest")):
        text = f"{len(texts)}, {order}: {texts[0]}" if texts else "none"
        lines += hanging(Text.assemble(label.ljust(LABEL), "  ", (text, "red" if texts else "")), width, most)
    lines += hanging(Text(f"{'games ended early':<{LABEL}}  {ended or 'none'}"), width, 1)
    if not view.updates():
        return [*lines, Text(f"{'metrics':<{LABEL}}  none yet; they come with the first update")]
    for policy in dict.fromkeys([*view.policies, ""]):  # those of the run last
        lines += [Text(policy, style="bold")] * bool(policy)
        lines += _metric_lines(view, of_topic("health"), spikes, cells, policy)
        for env in view.config["train_envs"]:
            shown = _metric_lines(view, metrics_of_env(env["env_id"]), spikes, cells, policy)
            lines += [Text(f"training games of {env['env_id']}", style="dim"), *shown] if shown else []
        lines += _metric_lines(view, of_topic("speed"), spikes, cells, policy)
    return lines


def _metric_lines(
    view: RunDirectory, metrics: Sequence[Metric], spikes: Sequence[Spike], cells: int, policy: str
) -> list[Text]:
    """Return a row for each metric that has values, with a sparkline of at most `cells` cells."""
    marked = {(uid_of(spike.policy, spike.metric), spike.update) for spike in spikes}
    lines, updates = [], view.updates()
    for metric in (metric.of(policy) for metric in metrics):
        counted = (line for line in updates if metric.n is None or line.get(metric.n))
        known = [(line["step"], line[metric.name]) for line in counted if line.get(metric.name) is not None]
        if not known:
            continue
        places = {place for place, (update, _) in enumerate(known) if (metric.name, update) in marked}
        bars, *ends = sparkline([value for _, value in known], cells, is_share(metric.name), places)
        text = percent if is_share(metric.name) else f"{{:{metric.form}}}".format
        newest, low, high = map(text, (known[-1][1], *ends))
        line = Text(f"{metric.label:<{LABEL}}  {newest:>{NUMBER}}  ").append(f"{low:>{NUMBER}}  ", style="dim")
        line.append(bars.ljust(cells), style="dim").highlight_words([SPIKE], "not dim red")
        lines.append(line.append(f"  {high}", style="dim"))
    return lines


def _next_steps(view: RunDirectory, width: int) -> list[Text]:
    """Return the best checkpoint of a run that has stopped, and the commands to show it and to continue.

    A command is whole: if it does not fit beside its label it has its own rows.
    """
    is_over, lines = view.state == "ended" and view.num_updates >= view.learning_steps, list[Text]()
    steps = next_commands(view.directory, (), is_over)
    for label in filter(steps.__contains__, ("best checkpoint", "report", "to continue")):
        words, path = steps[label]
        row, head, below = Text(f"{label:<15}  {words} {path}"), Text(label), Text(f"{words} {path}")
        if label == "best checkpoint":
            head, below = Text(f"{label:<15}  {words}"), Text(path)
        lines += [row] if row.cell_len <= width else [head, *below.divide(range(width, len(below), width))]
    return lines


def _workers(view: RunDirectory, width: int, room: int, load: MachineLoad) -> list[Text]:
    """Return a row for each worker, those in trouble first, in columns if it is wide."""
    cells = []
    workers = sorted(view.live.get("workers", []), key=lambda worker: worker["state"] in ("ready", "asleep"))
    for worker in workers:
        stats, state = worker["stats"], worker["state"]
        name = f"{worker['name']} ({'GPU ' * isinstance(worker['device'], int)}{worker['device']})"
        if state not in ("ready", "asleep"):
            cells.append([Text(name, style="red"), Text(f"is {state}", style="red"), Text()])
            continue
        does = "learns" if worker["waited_for"] else "waits"
        if state == "asleep":
            does = "sleeps while the learner learns"
        elif stats is not None:
            does = f"{stats['tokens_per_s']:,.0f} tokens/s, {stats['running']} run, {stats['queued']} wait"
        cells.append([Text(name), Text(does), Text(load.of(worker), style="dim")])
    lines = aligned(cells, "lll") if cells else [Text("none yet; they are started first")]
    beside = max(1, (width + 4) // (lines[0].cell_len + 4))
    rows = [Text("    ").join(lines[first : first + beside]) for first in range(0, len(lines), beside)]
    if len(rows) > room - 1:
        rest = len(lines) - beside * (room - 2)
        rows = [*rows[: room - 2], Text(f"and {rest} more", style="dim")]
    return [Text("workers", style="bold"), *rows]


class MachineLoad:
    """Load of a worker's device: from NVML on a GPU, else the process's share of the processors."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._nvml: Any = None
        with contextlib.suppress(ImportError):
            import pynvml

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml

    def of(self, worker: dict[str, Any]) -> str:
        """Return the load as text; "" if it is unknown, because the process is gone or on another machine."""
        device, pid = worker["device"], worker["pid"]
        if pid is None:  # on another machine
            return str(device)
        if isinstance(device, int) and self._nvml is not None:
            # The run's number of a GPU differs from the machine's if only some were visible to the run.
            return self._of_gpu(worker.get("gpu", str(device)).strip())
        try:
            interval = None if pid in self._processes else FIRST_LOOK_S
            process = self._processes.setdefault(pid, psutil.Process(pid))
            return f"{process.cpu_percent(interval):.0f} % CPU  {process.memory_info().rss / 2**20:,.0f} MiB"
        except psutil.Error:
            return ""

    def _of_gpu(self, gpu: str) -> str:
        """`gpu`: a number or a UUID, as CUDA_VISIBLE_DEVICES has them."""
        nvml, shown = self._nvml, []
        with contextlib.suppress(nvml.NVMLError):
            by_number = gpu.isdecimal()
            handle = nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_number else nvml.nvmlDeviceGetHandleByUUID(gpu)
            with contextlib.suppress(nvml.NVMLError):  # some GPUs have no power meter
                shown.append(f"{nvml.nvmlDeviceGetPowerUsage(handle) / 1000:.0f} W")
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            shown.append(f"{memory.used / 2**30:.1f}/{memory.total / 2**30:.0f} GiB")
        return "  ".join(shown)
