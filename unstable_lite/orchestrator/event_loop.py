"""The event loop of a run or an evaluation: how it starts, how signals end it, which error is reported, its log file.

A watchdog detects a blocked loop: a reward transform without end, a call that blocks. It is a thread, because
everything else that watches runs on the loop and is blocked with it. It reports where the loop is blocked, counts, and
ends the process if the loop never returns; the workers then exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import io
import logging
import logging.handlers
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from unstable_lite.errors import UnstableError
from unstable_lite.files import open_log
from unstable_lite.printable import VisibleFormatter

log = logging.getLogger(__name__)
T = TypeVar("T")

COLLECT_AFTER = 100_000
"""Number of new objects before a garbage collection. Thousands of games that start and end in waves are tens of
thousands of objects."""
FOR_EVER = 10
"""Multiple of the time of a stall after which the loop is taken to be blocked for ever."""
SHOWN_FRAMES = 3
LOOP_STALL_S = 30.0
"""Time for which the event loop, which all games share, may be blocked before an alarm."""
EXIT_STALLED = 75
"""Exit code of an orchestrator that ended itself; `run --resume` continues its run."""
LOG_BYTES, LOG_BACKUPS = 10_000_000, 5
"""Size of a log file before it rotates, and number of rotated files (reference: `tracker.py`)."""


def run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, on uvloop if it is installed, with few garbage collections."""
    loop_factory: Any = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as loop_factory
    threshold = gc.get_threshold()
    # Reference counts free nearly everything that games leave behind. Python's default, a search every 700 objects
    # through everything ever imported, was a third of the cost of a turn (bench/LOG.md).
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *threshold[1:])
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(coroutine)
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


def end_handlers() -> dict[signal.Signals, Any]:
    """Return the handlers of the signals that ask for the end; none outside the main thread, which alone gets signals.

    They are Ctrl-C, SIGTERM, those of batch systems, and a closed terminal, unless `nohup` is to ignore it.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    return {signum: signal.getsignal(signum) or signal.SIG_DFL for signum in signals}


@contextlib.contextmanager
def handled_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle` on each signal that asks for the end."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for signum, handler in end_handlers().items():
            loop.add_signal_handler(signum, handle)
            stack.callback(signal.signal, signum, handler)
            stack.callback(loop.remove_signal_handler, signum)
        yield


def cancelled_by_signals() -> contextlib.AbstractContextManager[None]:
    """Cancel the current task on these signals, so that the workers end before this process does."""
    task = asyncio.current_task()
    assert task is not None
    return handled_signals(task.cancel)


async def unless_set(waiting: Coroutine[Any, Any, T], *events: asyncio.Event) -> T | None:
    """Return the result of `waiting`, or None if one of `events` is set first; `waiting` is cancelled then."""
    task = asyncio.ensure_future(waiting)
    watching = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, *watching):
            one.cancel()
        await asyncio.wait([task])


def first_reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to report: the first of our own errors in the group, else its first error."""
    reason: BaseException = group.subgroup(UnstableError) or group
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    return reason


def stall_of(env_timeout_s: float) -> float:
    """Return the time of a stall, which is longer than an env in this process may take."""
    return max(LOOP_STALL_S, 2 * env_timeout_s)


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
        self._last_resort = open_log(self._log_path)
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
                    f"(limit: {FOR_EVER * self._stall_s:g} s). Stacks are in {self._log_path}. Correct the blocking "
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
        with contextlib.suppress(OSError), open_log(self._log_path) as file:
            file.write(f"{text}\n".encode())
            faulthandler.dump_traceback(file, all_threads=True)


class _LogFile(logging.handlers.RotatingFileHandler):
    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BufferedWriter(open_log(Path(self.baseFilename))), encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, into a new file if a person removed the old one."""
        with contextlib.suppress(OSError):  # closing retries a write that failed
            if not Path(self.baseFilename).exists():
                self.close()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose a line on a full disk rather than the run."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write everything that this package logs to one file."""
    handler = _LogFile(path, maxBytes=LOG_BYTES, backupCount=LOG_BACKUPS, encoding="utf-8")
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("unstable_lite")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        with contextlib.suppress(OSError):  # closing retries a write that failed
            handler.close()
