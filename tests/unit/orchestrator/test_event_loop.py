"""The event loop of a run: its settings, which are reverted afterwards, and the signals that end it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import pytest

from unstable_lite.orchestrator.event_loop import COLLECT_AFTER, handled_signals, run_in_loop


async def _collector() -> tuple[int, int]:
    return gc.get_threshold()[0], gc.get_freeze_count()


async def _fails() -> None:
    raise ValueError("no")


def test_run_collects_garbage_rarely_and_restores_the_settings() -> None:
    gc.unfreeze()  # a vLLM engine in this process may have frozen objects
    before = gc.get_threshold(), gc.get_freeze_count()
    threshold, num_frozen = run_in_loop(_collector())
    assert threshold == COLLECT_AFTER
    assert num_frozen > 1000
    with pytest.raises(ValueError, match="no"):
        run_in_loop(_fails())
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], ids=lambda one: one.name
)
async def test_signals_that_ask_for_the_end_are_handled(signum: signal.Signals) -> None:
    received, before = asyncio.Event(), signal.getsignal(signum)
    signal.signal(signum, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with handled_signals(received.set):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(received.wait(), 10)
        assert signal.getsignal(signum) is signal.SIG_DFL, "the handler stays after the run"
    finally:
        signal.signal(signum, before)


async def test_run_in_a_thread_handles_no_signals() -> None:
    async def run() -> None:
        with handled_signals(lambda: None):
            pass

    await asyncio.to_thread(asyncio.run, run())
