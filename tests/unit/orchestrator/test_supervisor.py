"""Deaths of a worker that count as the same error again, and the event loop of a run: its settings and signals."""

import asyncio
import gc
import itertools
import os
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from unstable_lite.config.training import RunConfig
from unstable_lite.errors import AdapterError, WorkerDied
from unstable_lite.orchestrator.event_loop import COLLECT_AFTER, handled_signals, run_in_loop
from unstable_lite.orchestrator.supervisor import Supervisor

HERE = "KeyError /home/me/own.py:12"


def deaths_until_the_end(places: Sequence[str]) -> int:
    """Return how many deaths at these places are restarted before one ends the run; all of them if none does."""

    async def restore() -> None: ...

    supervisor = Supervisor(cast(Any, None), RunConfig(max_restarts=9), 1.0, 1.0, restore, alarm=lambda text: None)
    for number, place in enumerate(places):
        try:
            supervisor._judge(WorkerDied("learner: KeyError", place=place))
        except WorkerDied as death:
            assert "the same error at the same line" in str(death)
            return number
    return len(places)


@pytest.mark.parametrize(
    ("places", "seconds", "restarts"),
    [
        ([HERE, HERE], 1, 1),
        ([HERE, HERE, HERE], 4000, 3),
        ([HERE, "", HERE], 1, 2),
        ([HERE, "KeyError /home/me/own.py:13", "TypeError /home/me/own.py:12"], 1, 3),
        (["", "", ""], 1, 3),
    ],
    ids=["the same place", "more than an hour ago", "a kill between", "other lines and errors", "no code of the user"],
)
def test_second_death_at_the_same_place_within_an_hour_ends_the_run(monkeypatch, places, seconds, restarts):
    monkeypatch.setattr("time.monotonic", itertools.count(0, seconds).__next__)
    assert deaths_until_the_end(places) == restarts


async def test_worker_that_cannot_be_restored_ends_the_run():
    async def ready(timeout_s: float) -> None: ...

    async def for_ever(*_: object, **__: object) -> float:
        await asyncio.Event().wait()
        raise AssertionError

    async def restore() -> None:
        raise AdapterError("other weights")

    channel = SimpleNamespace(name="engine-0", is_up=False, wait_for_stall=for_ever)
    process = cast(Any, SimpleNamespace(channel=channel, ready=ready, watch=for_ever))
    supervisor = Supervisor(process, RunConfig(), 1.0, 1.0, restore, alarm=lambda text: None)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(supervisor.run(), 10)
    assert caught.value.subgroup(AdapterError) and not supervisor.restarts


async def _collector() -> tuple[int, int]:
    return gc.get_threshold()[0], gc.get_freeze_count()


async def _fails() -> None:
    raise ValueError("no")


def test_run_collects_garbage_rarely_and_restores_the_settings():
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
async def test_signals_that_ask_for_the_end_are_handled(signum):
    received, before = asyncio.Event(), signal.getsignal(signum)
    signal.signal(signum, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with handled_signals(received.set):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(received.wait(), 10)
        assert signal.getsignal(signum) is signal.SIG_DFL, "the handler stays after the run"
    finally:
        signal.signal(signum, before)


async def test_run_in_a_thread_handles_no_signals():
    async def run() -> None:
        with handled_signals(lambda: None):
            pass

    await asyncio.to_thread(asyncio.run, run())
