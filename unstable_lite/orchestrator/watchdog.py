"""Detect a blocked event loop: a reward transform without end, a call that blocks.

A thread, because everything else that watches runs on the loop and is blocked with it. It reports where the loop is
blocked, counts, and ends the process if the loop never returns; the workers then exit. Knows nothing of the tasks on
the loop.
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
"""Multiple of `run.loop_stall_s` after which the loop is taken to be blocked for ever."""
SHOWN_FRAMES = 3
EXIT_STALLED = 75
"""Exit code of an orchestrator that ended itself; `run --resume` continues its run."""


class LoopWatchdog:
    """Watchdog of the event loop in which it is entered."""

    def __init__(self, stall_s: float, log_path: Path, alarm: Callable[[str], None] = log.warning) -> None:
        """`alarm`: called on the loop when it runs again."""
        self.stalls = 0
        self.longest_s = 0.0
        """Longest time between two turns of the loop; 0 if there was no stall."""
        self._alarm = alarm
        self._stall_s = stall_s
        self._log_path = log_path
        self._tick_s = stall_s / 10
        self._turned_at = 0.0
        self._place: str | None = None
        """Place in the code where the loop is blocked, if the thread has found one."""
        self._is_over = threading.Event()
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        # A call that holds the interpreter's lock (a regular expression in its worst case) blocks this thread, too: the
        # kernel counts its computing time, the stacks are written without the lock, and the signal kills.
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

    def metrics(self) -> dict[str, float]:
        """Return the number of stalls and the longest one."""
        return {"run/loop_stalls": self.stalls, "run/longest_loop_stall_s": self.longest_s}

    def _turn(self) -> None:
        """Note that the loop runs; called on the loop at regular times."""
        now = time.monotonic()
        stood_s, self._turned_at = now - self._turned_at, now
        place, self._place = self._place, None
        if stood_s > self._stall_s:
            self.stalls += 1
            self.longest_s = max(self.longest_s, stood_s)
            place = place or "place unknown: the whole process was stopped, or a call kept Python's lock"
            self._alarm(f"the event loop was blocked for {stood_s:.1f} s ({place}); see {self._log_path}")
        signal.setitimer(signal.ITIMER_VIRTUAL, 1.5 * FOR_EVER * self._stall_s)
        self._next = self._loop.call_later(self._tick_s, self._turn)

    def _watch(self) -> None:
        seen, stood_s, looked_at = 0.0, 0.0, time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now = time.monotonic()
            # A suspended machine or Ctrl-Z stops the loop and this thread alike.
            stood_s = 0.0 if self._turned_at != seen else stood_s + min(now - looked_at, 2 * self._tick_s)
            seen, looked_at = self._turned_at, now
            if stood_s > self._stall_s and self._place is None:
                self._place = self._where()
                self._dump(f"the event loop has been blocked for {stood_s:.1f} s, {self._place}")
            if stood_s > FOR_EVER * self._stall_s:
                self._dump(
                    f"error: the event loop has been blocked for {stood_s:.1f} s, {self._where()}; this process ends "
                    f"(run.loop_stall_s = {self._stall_s:g}). Stacks are in {self._log_path}. Correct the blocking "
                    f"call, then: unstable-lite run --resume {shlex.quote(str(self._log_path.parents[1]))}"
                )
                os._exit(EXIT_STALLED)

    def _where(self) -> str:
        """Return the innermost frames; the blocking call is rarely to blame itself."""
        stack = traceback.extract_stack(sys._current_frames()[self._loop_thread])[: -SHOWN_FRAMES - 1 : -1]
        return ", called ".join(f"in {frame.name} ({frame.filename}, line {frame.lineno})" for frame in stack)

    def _dump(self, text: str) -> None:
        """Write to terminal and log without any lock that the blocked thread may hold."""
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())
        with contextlib.suppress(OSError), self._log_path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
