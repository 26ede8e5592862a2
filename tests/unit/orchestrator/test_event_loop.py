"""The settings that `run_in_loop` makes for a run and reverts afterwards."""

from __future__ import annotations

import gc

import pytest

from unstable_lite.orchestrator.event_loop import COLLECT_AFTER, run_in_loop


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
