"""Notice that the event loop does not come round: a reward transform without end, a call that blocks.

Everything else that watches runs on the loop and stands still with it; this is a thread. It tells where the loop is,
counts, and where the loop never comes back it ends the process, whose workers then end by themselves. Knows nothing
of what runs on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)

FOR_EVER = 10
"""So many times `run.loop_stall_s` is for ever."""
SHOWN_FRAMES = 3
EXIT_STALLED = 75
"""Exit code of an orchestrator that ended itself; `run --resume` goes on."""


class LoopWatch:
    """Of the event loop on which it is entered."""

    def __init__(self, stall_s: float, log_path: Path) -> None:
        self.stalls = 0
        self.longest_s = 0.0
        """Between two turns of the loop; 0 as long as there was no stall."""
        self.alarm: Callable[[str], None] = log.warning
        """Called on the loop, once it goes on."""
        self._stall_s = stall_s
        self._log_path = log_path
        self._tick_s = stall_s / 10
        self._turns = 0
        self._turned_at = 0.0
        self._told: str | None = None
        """Where the loop stands still."""
        self._is_over = threading.Event()
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        # What holds the interpreter's lock (a regular expression in its worst case) lets no thread see it: the
        # kernel counts the time that it computes, the stacks are written without the lock, and the signal kills.
        self._last_resort = self._log_path.open("a")
        faulthandler.register(signal.SIGVTALRM, self._last_resort, all_threads=True, chain=True)
        self._turned_at = time.monotonic()
        self._turn()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._next is not None:
            self._next.cancel()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.unregister(signal.SIGVTALRM)
        self._thread.join()
        self._last_resort.close()

    def figures(self) -> dict[str, float]:
        """As metrics."""
        return {"run/loop_stalls": self.stalls, "run/longest_loop_stall_s": self.longest_s}

    def _turn(self) -> None:
        """On the loop, again and again."""
        now = time.monotonic()
        stood_s, self._turned_at = now - self._turned_at, now
        self._turns += 1
        told, self._told = self._told, None
        if stood_s > self._stall_s:
            self.stalls += 1
            self.longest_s = max(self.longest_s, stood_s)
            where = told or "nobody could look where: the whole process stood still, or a call kept Python's lock"
            self.alarm(f"the event loop stood still for {stood_s:.1f} s ({where}); see {self._log_path}")
        signal.setitimer(signal.ITIMER_VIRTUAL, 1.5 * FOR_EVER * self._stall_s)
        self._next = self._loop.call_later(self._tick_s, self._turn)

    def _watch(self) -> None:
        seen, stood_s, looked_at = -1, 0.0, time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now = time.monotonic()
            # What this thread slept through (a suspended machine, Ctrl-Z) the loop slept through, too.
            stood_s = 0.0 if self._turns != seen else stood_s + min(now - looked_at, 2 * self._tick_s)
            seen, looked_at = self._turns, now
            if stood_s > self._stall_s and self._told is None:
                self._told = self._where()
                self._dump(f"the event loop has stood still for {stood_s:.1f} s, {self._told}")
            if stood_s > FOR_EVER * self._stall_s:
                self._dump(
                    f"error: the event loop has stood still for {stood_s:.1f} s, {self._where()}; this process ends "
                    f"(run.loop_stall_s = {self._stall_s:g}). Stacks are in {self._log_path}; with what is there put "
                    f"right, go on with: unstable-lite run --resume {shlex.quote(str(self._log_path.parents[1]))}"
                )
                os._exit(EXIT_STALLED)

    def _where(self) -> str:
        """Innermost first; who is to blame is rarely the library's function that is just being called."""
        stack = traceback.extract_stack(sys._current_frames()[self._loop_thread])[: -SHOWN_FRAMES - 1 : -1]
        return ", called ".join(f"in {frame.name} ({frame.filename}, line {frame.lineno})" for frame in stack)

    def _dump(self, text: str) -> None:
        """To terminal and log, past everything that may be locked by who stands still."""
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())
        with contextlib.suppress(OSError), self._log_path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
