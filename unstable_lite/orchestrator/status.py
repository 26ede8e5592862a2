"""Write live.json of a run directory: the present state of the run, for dashboards in other processes.

Replaced atomically every `EVERY_S` seconds. Readers ask the run nothing, so they cannot hold it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from unstable_lite.files import replaced
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.orchestrator.workers import environment
from unstable_lite.tracking.run_directory import LIVE
from unstable_lite.transport.rpc import WorkerChannel

EVERY_S = 2.0


@contextlib.asynccontextmanager
async def shown_live(parts: RunParts) -> AsyncIterator[None]:
    """Write the state while the body runs; the last state stays, marked as ended, and as failed if the body raised."""

    async def keep_writing() -> None:
        while True:
            _write(parts, has_ended=False)
            await asyncio.sleep(EVERY_S)

    writing = asyncio.create_task(keep_writing())
    try:
        yield
    finally:
        writing.cancel()
        _write(parts, has_ended=True, has_failed=sys.exception() is not None)


def _write(parts: RunParts, has_ended: bool, has_failed: bool = False) -> None:
    # A full disk is reported by writers that matter more.
    with contextlib.suppress(OSError), replaced(parts.directory / LIVE) as partial:
        ending = {"has_ended": has_ended, "has_failed": has_failed}
        partial.write_text(json.dumps(_picture(parts) | ending), encoding="utf-8")


def _places(parts: RunParts) -> Iterator[tuple[str, WorkerChannel, int | None, int | str]]:
    """Yield name, channel, process id and device of each worker and of each rank of the learner.

    Of an engine's GPUs it is the first. A rank on another machine has no process id.
    """
    plan, workers = parts.plan, parts.workers
    devices = [*(devices[:1] for devices in plan.devices_by_engine), plan.learner_devices]
    for process, own in zip(workers.processes, devices, strict=True):
        for rank, device in zip(process.ranks, own, strict=True):
            yield rank.channel.name, process.channel, rank.pid, device
    for rank_index in range(len(plan.learner_devices), plan.num_ranks):
        yield f"learner-{rank_index}", workers.learner.channel, None, "elsewhere"


def _picture(parts: RunParts) -> dict[str, Any]:
    config, tracker, collector = parts.plan.config, parts.tracker, parts.collector
    engines = {engine.channel.name: engine for engine in parts.workers.engines.engines}
    workers = [
        {
            "name": name,
            "pid": pid,
            "device": device,
            "gpu": environment((device,), 1)["CUDA_VISIBLE_DEVICES"],
            "state": channel.state.value,
            "waited_for": channel.num_pending,
            "stats": msgspec.structs.asdict(engines[name].stats) if name in engines else None,
        }
        for name, channel, pid, device in _places(parts)
    ]
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "learning_steps": config.run.learning_steps,
        "games": tracker.games_finished,
        "void_games": tracker.void_games,
        "train_games_in_flight": collector.games_in_flight["train"],
        "eval_games_in_flight": collector.games_in_flight["eval"],
        "buffer": parts.buffer.size(),
        "buffer_size": config.buffer_size,
        "batch_size": config.learner.batch_size,
        "workers": workers,
    }
