"""What `run_in_loop` sets up around a run, and takes back."""

from __future__ import annotations

import gc

import pytest

from unstable_lite.runtime import COLLECT_AFTER, run_in_loop


async def _collector() -> tuple[int, int]:
    return gc.get_threshold()[0], gc.get_freeze_count()


async def _fails() -> None:
    raise ValueError("no")


def test_a_run_collects_garbage_rarely_and_leaves_the_collector_as_it_was() -> None:
    gc.unfreeze()  # what an engine of vLLM's in this process has frozen
    before = gc.get_threshold(), gc.get_freeze_count()
    threshold, num_frozen = run_in_loop(_collector())
    assert threshold == COLLECT_AFTER
    assert num_frozen > 1000
    with pytest.raises(ValueError, match="no"):
        run_in_loop(_fails())
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
