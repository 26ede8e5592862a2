"""The event loop of a run or an evaluation: how it starts, how signals end it, and which error is reported."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from unstable_lite.errors import UnstableError

T = TypeVar("T")

COLLECT_AFTER = 100_000
"""Number of new objects before a garbage collection. Thousands of games that start and end in waves are tens of
thousands of objects."""


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


@contextlib.contextmanager
def handled_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle` on Ctrl-C, SIGTERM or a closed terminal. Only the main thread receives signals."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signals.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        signals = []
    loop = asyncio.get_running_loop()
    for signum in signals:
        loop.add_signal_handler(signum, handle)
    try:
        yield
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


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
