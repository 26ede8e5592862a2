"""Interrupt calls into envs that take too long.

TextArena has endless loops (in its `state.py`, when all players are eliminated) that would stop every other game.
Knows nothing of envs or games.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Overdue(BaseException):
    """Raised inside a guarded call that takes too long; not an Exception, so that no env catches it."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"a call did not return within {limit_s:g} s")
        self.limit_s = limit_s


class _Guard:
    """Interrupts guarded calls of the main thread, each at most once, and no other code."""

    def __init__(self, limit_s: float) -> None:
        self.call = 0
        """Number of the running call; 0: none."""
        self.numbers = itertools.count(1)
        """Numbers of the next calls."""
        self._limit_s = limit_s
        self._seen = 0
        self._since = 0.0

    def interrupt(self, signum: int, frame: object) -> None:  # noqa: ARG002
        """Handle the signal, which arrives between two instructions of the main thread and also ends a `sleep`."""
        call, now = self.call, time.monotonic()
        if call != self._seen:
            self._seen, self._since = call, now
        elif call and now - self._since > self._limit_s:
            self._since = math.inf
            raise Overdue(self._limit_s)


class _Thread(threading.local):
    """The guard of the main thread; other threads have none, because Python handles signals in the main thread."""

    guard: _Guard | None = None


_thread = _Thread()
_NO_GUARD = _Guard(math.inf)


def guarded_call(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` under the guard of this thread, if it has one. Raises Overdue if the guard interrupts it."""
    guard = _thread.guard or _NO_GUARD
    try:
        try:
            guard.call = next(guard.numbers)
            return function(*arguments)
        finally:
            guard.call = 0
    finally:  # the interrupt may arrive within the inner `finally`
        guard.call = 0


def can_guard() -> bool:
    """Return whether `hang_guard` has an effect in this thread."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def hang_guard(limit_s: float) -> Iterator[None]:
    """Interrupt every guarded call of the main thread that takes longer than `limit_s`.

    Works for Python code only, and not in other threads: an env that hangs there or in C code must be `isolated`.
    """
    if not can_guard():
        yield
        return
    guard = _thread.guard = _Guard(limit_s)
    previous = signal.signal(signal.SIGALRM, guard.interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s / 4, limit_s / 4)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        _thread.guard = None
