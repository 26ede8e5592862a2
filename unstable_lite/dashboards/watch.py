"""Redraw the dashboard of a run until the viewer quits. The run is not affected."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from unstable_lite.dashboards.league_panel import KEY
from unstable_lite.dashboards.run_view import RunView
from unstable_lite.dashboards.top import MachineLoad, draw, draw_league

REDRAW_S = 1.0
REPLAY_S = 20.0
"""Longest duration of a whole replay."""
LEAST_WIDTH, LEAST_HEIGHT = 80, 24
KEYS = {"\x1b[C": "forward", "\x1b[D": "back", " ": "pause", "q": "quit", "\x03": "quit", KEY: "league"}


def show_once(view: RunView, console: Console) -> None:
    """Print the dashboard and the league to a pipe or a file."""
    view.refresh()
    width, height = max(console.width, LEAST_WIDTH), 40
    console.print(draw(view, width, height, MachineLoad()), width=width, height=height)
    console.print(draw_league(view, width, LEAST_HEIGHT), width=width, height=LEAST_HEIGHT)


def watch(view: RunView, console: Console, replay: bool) -> None:
    """Redraw until `q` or Ctrl-C.

    `replay`, → and ← move through the updates; space pauses and continues; `m` shows the league on the whole screen.
    """
    load = MachineLoad()
    view.refresh()
    if replay:
        view.at = 0
    is_playing, is_league = replay, False
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            width, height = console.size
            if width < LEAST_WIDTH or height < LEAST_HEIGHT:
                small = f"{LEAST_WIDTH} × {LEAST_HEIGHT} characters are needed; this terminal has {width} × {height}"
                live.update(small, refresh=True)
            else:
                frame = draw_league(view, width, height) if is_league else draw(view, width, height, load)
                live.update(frame, refresh=True)
            pause_s = min(REDRAW_S, REPLAY_S / max(view.num_updates, 1)) if is_playing else REDRAW_S
            key = pressed(pause_s)
            if key == "quit":
                return
            view.refresh()
            if key in ("forward", "back"):
                is_playing = False
                view.at = min(max(view.update + (1 if key == "forward" else -1), 0), view.num_updates)
            elif key == "league":
                is_league = not is_league
            elif key == "pause":
                is_playing = not is_playing
                view.at = view.update if is_playing else view.at
            elif is_playing and view.at is not None:
                view.at = min(view.at + max(1, round(view.num_updates / REPLAY_S * pause_s)), view.num_updates)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """Yield a function that waits a number of seconds for a key and returns its meaning."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> str | None:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0]:
                typed = os.read(descriptor, 16).decode(errors="replace")
                if (meaning := KEYS.get(typed)) is not None or not typed:
                    return meaning or "quit"
        return None

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
