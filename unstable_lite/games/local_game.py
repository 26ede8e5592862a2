"""Base class of the games of this process, and the guards around each call of an env.

A call that takes too long is interrupted: TextArena has endless loops (in its `state.py`, when all players are
eliminated) that would stop every other game. An exception of `step` is the player's invalid move, unless the world
outside of the game failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from functools import partial
from multiprocessing import ProcessError
from typing import TypeVar

from unstable_lite.errors import EnvRaised, UnstableError, described, is_out_of_memory

T = TypeVar("T")


class Overdue(Exception):
    """A guarded call did not return in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"a call did not return within {limit_s:g} s")
        self.limit_s = limit_s


class _BrokenOff(BaseException):
    """Raised inside an env call that takes too long; not an Exception, so that no `except Exception` catches it."""


class _Guard:
    """Interrupts one thread's guarded calls, each at most once, and no other code of that thread.

    The main thread is interrupted by a signal, which also ends a `sleep`. Any other thread is watched by a second
    thread, which has Python raise an exception in it; a call that ends at that moment gets it or takes it back.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.call = 0
        """Number of the running call; 0: none."""
        self.numbers = itertools.count(1)
        """Numbers of the next calls."""
        self.is_aiming = False
        self._seen = 0
        self._since = 0.0
        self._send = partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident()))
        """Function that has Python raise an exception in the guarded thread soon; with None, it takes it back."""

    def is_overdue(self) -> bool:
        """Return whether the running call takes too long. Poll it; it is true only once per call."""
        call, now = self.call, time.monotonic()
        if call != self._seen:
            self._seen, self._since = call, now
        elif call and now - self._since > self.limit_s:
            self._since = math.inf
            return True
        return False

    def interrupt(self, signum: int, frame: object) -> None:  # noqa: ARG002
        """Handle the signal, which arrives in the guarded thread between two of its instructions."""
        if self.is_overdue():
            raise _BrokenOff

    def watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(self.limit_s / 4):
            if self.is_overdue():
                self.is_aiming = True
                if self.call == self._seen:
                    self._send(ctypes.py_object(_BrokenOff))
                self.is_aiming = False

    def settle(self) -> None:
        """Wait for the watching thread, which saw a call run that just ended, and take back its exception."""
        while self.is_aiming:
            time.sleep(0.001)
        self._send(None)


_NO_GUARD = _Guard(math.inf)


class _Thread(threading.local):
    """The guard that interrupts calls of this thread."""

    guard = _NO_GUARD


_thread = _Thread()


def guarded_call(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` under the guard of this thread, if it has one. Raises Overdue if the guard interrupts it."""
    guard = _thread.guard
    try:
        try:
            guard.call = next(guard.numbers)
            return function(*arguments)
        finally:
            guard.call = 0
            if guard.is_aiming:
                guard.settle()
    except _BrokenOff as broken:
        guard.call = 0
        raise Overdue(guard.limit_s) from broken


@contextlib.contextmanager
def hang_guard(limit_s: float) -> Iterator[None]:
    """Interrupt every guarded call of this thread that takes longer than `limit_s`.

    Works for Python code only: an env that hangs in a library's C code must be `isolated`.
    """
    guard = _thread.guard = _Guard(limit_s)
    with contextlib.ExitStack() as ending:
        ending.callback(setattr, _thread, "guard", _NO_GUARD)
        if threading.current_thread() is threading.main_thread():
            ending.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, guard.interrupt))
            ending.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_REAL, limit_s / 4, limit_s / 4)
        else:
            is_over = threading.Event()
            watcher = threading.Thread(target=guard.watch, args=(is_over,), name="hang-guard", daemon=True)
            watcher.start()
            ending.callback(watcher.join)
            ending.callback(is_over.set)
        yield


_CLIENTS = re.compile(
    r"(http|httpx|httpcore|aiohttp|requests|urllib3|websockets?|grpc|pycurl|zmq|redis|tenacity|huggingface_hub|botocore"
    r"|azure|google|openai|openrouter|anthropic|mistralai|groq|cohere|together|litellm|ollama|replicate|xai_sdk)(\.|$)"
)
"""Names of packages that talk to a server."""
_NAMES = re.compile(
    "Timeout|TimedOut|Connect(?!Four|4)|Network(?!X)|RateLimit|TooManyRequests|Unavailable|ServerError|HTTP|A(PI|pi(?=E))"
)
"""Names of exceptions that an env made by itself of those of a client."""


def reason_of(error: BaseException) -> str:
    """Return the reason of a void game that `error` ended; "failed" if no error of its chain is known."""
    return next(filter(None, map(_known_reason, _chain(error))), "failed")


def _known_reason(error: BaseException) -> str:
    if isinstance(error, UnstableError):
        return error.reason
    if is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
        return "timeout"
    if isinstance(error, EOFError | BrokenExecutor | ProcessError | subprocess.SubprocessError):
        return "process_died"
    is_client_s = any(_CLIENTS.match(base.__module__) for base in type(error).__mro__)
    if is_client_s or isinstance(error, ConnectionError) or _NAMES.search(type(error).__name__):
        return "network"
    return "os_error" if isinstance(error, OSError) else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, those in its group, and those that it was raised from or while they were handled."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for member in error.exceptions:
                yield from _chain(member)
        error = error.__cause__ or error.__context__


class _StepErrors(contextlib.AbstractContextManager[object]):
    """Context of a call of an env's `step`. Raises EnvRaised for an exception that only the action explains."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, UnstableError) or not isinstance(error, Exception | SystemExit):  # argparse exits
            return
        if reason_of(error) == "failed":
            raise EnvRaised(described(error)) from error


STEP_ERRORS = _StepErrors()


class LocalGame:
    """Base class of the games of this process: a subclass has `observe` and `step`."""

    def observe(self) -> tuple[int, str]:
        """Return the current player and its observation."""
        raise NotImplementedError

    def step(self, action: str) -> bool:
        """Play `action` for the current player; return whether the game is over."""
        raise NotImplementedError

    def play(self, action: str) -> tuple[int, str] | None:
        """Call `step`, and `observe` unless the game is over."""
        with STEP_ERRORS:
            is_over = self.step(action)
        return None if is_over else self.observe()

    async def advance(self, action: str) -> tuple[int, str] | None:
        """Call `play`. It is async because an isolated env, used in the same way, waits for its process."""
        return self.play(action)

    def drop(self) -> None:
        """Abandon the game, finished or not; an env in another process is dropped there, too."""
