"""Dashboard: panels of one run for a terminal of at least 80 × 24 characters, redrawn until the viewer quits.

Draws the contents of a RunDirectory; itself reads only the load of this machine. The run is not affected.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
from rich.console import Console, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text, TextType

from unstable_lite.dashboards.league import league_panel
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.tracking.displayed_metrics import METRICS, Metric, metrics_of_env

REDRAW_S = 1.0
LEAST_WIDTH, LEAST_HEIGHT = 80, 24
BARS = "▁▂▃▄▅▆▇█"
SILENT_S = 10.0
"""Age of live.json from which the event loop counts as blocked; a run writes it every two seconds."""
SAMPLES = 128
"""Most updates in a sparkline (reference: `terminal_interface.py`)."""
GOOD, FAIR = 0.75, 0.40
"""Shares of a bar from which it is coloured as good, and as fair (reference)."""
FIRST_LOOK_S = 0.1
"""Time over which a process's load is first measured; later it is measured from frame to frame."""
NARROW = 72
"""Width of a panel below which an evaluation takes two rows."""
PLAYERS = 23
"""Height of the ladder beyond which the evaluations have more than five rows first."""
HEADER = 3
"""Height of the header."""
LITTLE = 13
"""Height of the middle below which it shows only the statistics of one env and the ladder."""
ROOMY = 30
"""Height from which alarms have a panel; below it the newest alarm is shown under the header."""


_OF_LEARNER = ("loss", "entropy", "mismatch_mean", "policy_grad_norm", "wait_for_batch_s", "zero_advantage")
LEARNER = [METRICS[f"learner/{name}"] for name in (*_OF_LEARNER, "importance_weight_clipped", "tokens_per_s")]
_OF_BUFFER = ("learner/staleness_mean", "learner/staleness_max", "buffer/size", "buffer/dropped_stale")
STALENESS = [METRICS[name] for name in _OF_BUFFER]
"""Staleness in updates, and numbers of steps: waiting, and dropped so far."""


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
            if is_quit_within(REDRAW_S):
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
    workers = view.live.get("workers", []) if view.is_running else []
    workers_a_row = 1 if len(workers) <= 3 and width < 120 else 2
    of_workers = 2 + max(1, math.ceil(len(workers) / workers_a_row))
    alarms = view.alarms()
    has_alarms = height >= ROOMY
    of_alarms = min(2 + max(1, len(alarms)), 5 if height < 45 else 8) if has_alarms else 0
    room = height - HEADER - of_workers - of_alarms
    middle = Layout(ratio=1)
    middle.split_row(_columns(_left(view, width // 2, room)), _columns(_right(view, width // 2, room)))
    sections = [
        Layout(_header(view, width, not has_alarms), size=HEADER),
        middle,
        Layout(_panel(_workers(workers, workers_a_row, load, width), "workers"), size=of_workers),
    ]
    if has_alarms:
        sections.append(Layout(_alarms(alarms, of_alarms - 2), size=of_alarms))
    return _columns(sections)


def _columns(parts: Sequence[Layout]) -> Layout:
    layout = Layout(ratio=1)
    layout.split_column(*parts)
    return layout


def _panel(content: RenderableType, title: TextType, **options: Any) -> Panel:
    return Panel(content, title=title, title_align="left", **options)


def _left(view: RunDirectory, width: int, room: int) -> list[Layout]:
    """Return the panels of statistics that fit: of each env, of the learner, and of staleness."""
    env_ids = [env["env_id"] for env in view.config["train_envs"]]
    of_learner, of_staleness = 2 + len(LEARNER), 2 + len(STALENESS)
    has_staleness = room >= 8 + 7 + of_staleness
    shown = env_ids[: max(1, (room - of_learner - of_staleness) // 8)]
    omitted = f" {len(shown)} of {len(env_ids)}" if len(shown) < len(env_ids) else ""
    inner = width - 4
    parts = []
    for env_id in shown:
        rows = metrics_of_env(env_id)
        rows = rows[:6] if view.series(rows[2].name) else rows[:2] + rows[4:]  # an exact evaluation replaces two rows
        parts.append(Layout(_panel(_statistics(view, rows, inner), Text(f"collection{omitted}: {env_id}")), size=8))
    if room < LITTLE:
        parts[0].size = None
        return parts
    rows = LEARNER if has_staleness else [*LEARNER[:4], *STALENESS[::2], LEARNER[4]]
    parts.append(Layout(_panel(_statistics(view, rows, inner), "learner"), ratio=1, minimum_size=5))
    if has_staleness:
        parts.append(Layout(_panel(_statistics(view, STALENESS, inner), "staleness"), size=of_staleness))
    return parts


def _right(view: RunDirectory, width: int, room: int) -> list[Layout]:
    """Return the panels of strength that fit: the league, and the newest evaluations."""
    lines = [line for line in view.evaluations() if line["n"]]
    league = view.league()
    of_league = len(league.ladder) + 3
    if width < NARROW:  # two rows for the newest evaluation of each env and opponent
        lines = list({(line["env_id"], line["opponent"]): line for line in lines}.values())
        rows = 2 * min(len(lines), max(2, (room - of_league - 2) // 2))
    else:
        rows = min(len(lines), max(5, room - min(of_league, PLAYERS) - 2))
    of_evaluations = 2 + max(rows, 1) if room >= LITTLE else 0
    parts = [Layout(league_panel(league, width, room - of_evaluations), ratio=1)]
    if of_evaluations:
        parts.append(Layout(_evaluations(lines, width, rows), size=of_evaluations))
    return parts


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a sparkline of the newest `width` values, scaled from their least to their greatest."""
    shown = [value for value in values[-min(width, SAMPLES) :] if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def bar(share: float, width: int) -> Text:
    share = min(max(share, 0.0), 1.0)
    style = "green" if share >= GOOD else "yellow" if share >= FAIR else "red"
    full = round(share * width)
    return Text("█" * full, style=style) + Text("░" * (width - full), style="dim")


def _header(view: RunDirectory, width: int, has_no_alarms_panel: bool) -> Panel:
    live, latest = view.live, view.latest()
    made, planned, pace = view.num_updates, view.learning_steps, view.pace()
    silent_s = time.time() - live.get("time", time.time())
    if view.is_running and silent_s > SILENT_S:
        state = (f"silent for {silent_s:.0f} s", "red")
    elif view.is_running:
        state = ("running", "green")
    else:
        state = (view.ending or "not running", "red" if view.ending == "failed" else "yellow")
    progress = bar(made / max(planned, 1), max(4, width // 4 - 16))
    line = Text.assemble(state, "  update ", (f"{made}/{planned} ", "bold"), progress)
    line.append(f"  {live.get('games', latest.get('run/games', 0)):,.0f} games")
    if pace is not None:
        line.append(f" {pace.games_per_s:.1f}/s")
    line.append(f"  {latest.get('run/tokens_per_s', 0):,.0f} tok/s")
    if view.is_running and pace is not None:
        line.append(f"  left {_duration(pace.seconds_per_update * (planned - made))}")
    if num_alarms := len(view.alarms()):
        line.append(f"  alarms {num_alarms}", style="red")
    line.no_wrap, line.overflow = True, "ellipsis"
    below = Text()
    if has_no_alarms_panel and (alarms := view.alarms()):
        below = Text(f"alarm, {alarms[-1]}", style="red")
    elif view.is_running and "buffer" in live:  # values that change between updates
        below = Text(
            f"{live['train_games_in_flight']} + {live['eval_games_in_flight']} games in flight (train + eval), "
            f"buffer {live['buffer']}/{live['buffer_size']}, batch {live['batch_size']}, void {live['void_games']}",
            style="dim",
        )
    below.truncate(width - 8, overflow="ellipsis")
    return _panel(line, Text(view.directory.name), subtitle=below or None, subtitle_align="left")


def _alarms(alarms: Sequence[str], height: int) -> Panel:
    """Return the panel of the newest alarms."""
    if not alarms:
        return _panel(Text("none", style="dim"), "alarms")
    text = Text("\n".join(alarms[-height:]), style="red", no_wrap=True, overflow="ellipsis")
    return _panel(text, f"alarms: {len(alarms)}", border_style="red")


def _statistics(view: RunDirectory, rows: Sequence[Metric], width: int) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", min_width=7)
    table.add_column(no_wrap=True, ratio=1, style="cyan", overflow="crop")
    for row in rows:
        values = view.series(row.name, row.n)
        newest = format(values[-1], row.form) if values else "–"
        table.add_row(row.label, newest, sparkline(values, max(width - 24, 8)))
    return table


def _evaluations(lines: Sequence[dict[str, Any]], width: int, rows: int) -> Panel:
    """Return the panel of the newest evaluations with their 95 % intervals, in this number of rows."""
    is_narrow = width < NARROW
    shown = lines[-(rows // 2 if is_narrow else rows) :]
    results = []
    for line in shown:
        if line["points"] is not None:
            value, interval = f"{line['points']:.1%}", (f"{edge:.0%}" for edge in line["interval"])
        else:
            value = f"{line['mean_reward']:.3g}"
            interval = ("?" if edge is None else f"{edge:.3g}" for edge in line["interval"])
        results.append((line["model"], value, "–".join(interval), f"n={line['n']}"))
    widths = [max(map(len, column)) for column in zip(*results, strict=True)]
    text = Text(no_wrap=True, overflow="ellipsis")
    for line, (model, *numbers) in zip(shown, results, strict=True):
        result = "  ".join([model.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])])
        against = Text(f"{line['opponent']}, {line['env_id']}", style="dim")
        text.append("\n" if text else "")
        text.append_text(Text.assemble(against, "\n", result) if is_narrow else Text.assemble(result, "  ", against))
    omitted = f": newest {len(shown)} of {len(lines)}" if len(shown) < len(lines) else ""
    return _panel(text if shown else Text("none yet", style="dim"), f"evaluations{omitted}")


def _workers(workers: Sequence[dict[str, Any]], a_row: int, load: MachineLoad, width: int) -> RenderableType:
    """Return a grid of engines with their throughput and their load."""
    if not workers:
        return Text("not running", style="dim")
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in range(a_row):
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    cells = []
    most = max((worker["stats"]["tokens_per_s"] for worker in workers if worker["stats"]), default=0.0)
    for worker in workers:
        stats = worker["stats"]
        name = f"{worker['name']} ({'GPU ' * isinstance(worker['device'], int)}{worker['device']})"
        is_up = worker["state"] in ("ready", "asleep")
        cell = Text(f"{name:<16} ", style="" if is_up else "red")
        if not is_up:
            cell.append(f"is {worker['state']}", style="red")
        elif worker["state"] == "asleep":
            cell.append("sleeps while the learner learns")
        elif stats is not None:
            cell.append_text(bar(stats["tokens_per_s"] / most if most else 0.0, max(4, width // 12)))
            cell.append(f" {stats['tokens_per_s']:,.0f} tok/s  {stats['running']} run, {stats['queued']} wait")
        else:
            cell.append("learns" if worker["waited_for"] else "waits")
        cell.append(f"  {load.of(worker)}", style="dim")
        cells.append(cell)
    for index in range(0, len(cells), a_row):
        table.add_row(*cells[index : index + a_row])
    return table


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


def _duration(seconds: float) -> str:
    days, rest = divmod(seconds, 86_400)
    return f"{days:.0f} d " * (days > 0) + time.strftime("%H:%M:%S", time.gmtime(rest))
