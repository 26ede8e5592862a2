"""live.json of a run directory: what the run is doing now, for whoever looks on from outside.

Written every `EVERY_S` seconds, whole or not at all. Nobody answers questions, so nobody can hold the run up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from unstable_lite.trackers.records import replaced
from unstable_lite.training import Training
from unstable_lite.transport.sockets import Peer
from unstable_lite.workers import environment

EVERY_S = 2.0
LIVE = "live.json"


@contextlib.asynccontextmanager
async def shown_live(training: Training) -> AsyncIterator[None]:
    """While the body runs; the last state stays, marked as ended."""

    async def keep_writing() -> None:
        while True:
            _write(training, has_ended=False)
            await asyncio.sleep(EVERY_S)

    writing = asyncio.create_task(keep_writing())
    try:
        yield
    finally:
        writing.cancel()
        _write(training, has_ended=True)


def _write(training: Training, has_ended: bool) -> None:
    # A full disk is not this file's to tell: what matters more fails on it, and says so.
    with contextlib.suppress(OSError), replaced(training.directory / LIVE) as partial:
        partial.write_text(json.dumps(_picture(training) | {"has_ended": has_ended}), encoding="utf-8")


def _places(training: Training) -> Iterator[tuple[str, Peer, int | None, int | str]]:
    """Name, who answers for it, process id and device of each worker; of the learner each rank is one.

    Without a process id: on another machine.
    """
    plan, workers = training.plan, training.workers
    names = [engine.peer.name for engine in workers.engines.engines]
    devices = dict(zip(names, plan.engine_devices, strict=False))  # others' are told with them
    for process in workers.processes:
        own = [devices[process.peer.name]] if process.peer.name in devices else plan.learner_devices
        for rank, device in zip(process.ranks, own, strict=True):
            yield rank.peer.name, process.peer, rank.pid, device
    for rank_index in range(len(plan.learner_devices), len(plan.learner_devices) + plan.config.learner.remote_ranks):
        yield f"learner-{rank_index}", workers.learner.peer, None, "elsewhere"
    for worker in workers.remote:
        yield worker.peer.name, worker.peer, None, worker.where


def _picture(training: Training) -> dict[str, Any]:
    config, tracker, collector = training.plan.config, training.tracker, training.collector
    engines = {engine.peer.name: engine for engine in training.workers.engines.engines}
    workers = [
        {
            "name": name,
            "pid": pid,
            "device": device,
            "gpu": environment(device, 1)["CUDA_VISIBLE_DEVICES"],
            "is_up": peer.is_up,
            "is_asleep": name in engines and engines[name].is_asleep,
            "waited_for": peer.num_pending,
            "stats": asdict(engines[name].stats) if name in engines else None,
        }
        for name, peer, pid, device in _places(training)
    ]
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "learning_steps": config.run.learning_steps,
        "games": tracker.games_finished,
        "void_games": tracker.void_games,
        "train_games_in_flight": collector.games_in_flight["train"],
        "eval_games_in_flight": collector.games_in_flight["eval"],
        "buffer": training.buffer.size(),
        "buffer_size": config.buffer_size,
        "batch_size": config.learner.batch_size,
        "workers": workers,
    }
