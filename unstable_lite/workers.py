"""The processes of a run: start them where the plan says, wait until they are up, end them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import UnstableError
from unstable_lite.learners.client import LearnerClient
from unstable_lite.plan import Plan
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.sockets import Peer, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    engines: EnginePool
    learner: LearnerClient
    processes: list[WorkerProcess]
    adapter_bytes: int
    """Size of one adapter, as the learner writes it."""
    prompts: dict[str, Any]
    """What the engines' tokenizer says about prompts; see `templates_for`."""


@contextlib.asynccontextmanager
async def started_workers(plan: Plan, logs: Path, say: Callable[[str], None]) -> AsyncIterator[Workers]:
    """Every worker of `plan`, up; every worker ended afterwards, however that comes.

    Raises WorkerDied for a worker that ends by itself, UnstableError for one that is not up in time.
    """
    sockets = Path(tempfile.mkdtemp(prefix="unstable_lite-"))  # 0700; short: an ipc path ends at 107 bytes
    router = Router(sockets)
    processes: list[WorkerProcess] = []
    try:
        yield await _start(plan, router, logs, processes, say)
    finally:
        await asyncio.gather(*(process.stop() for process in processes))
        router.close()
        shutil.rmtree(sockets, ignore_errors=True)


async def _start(
    plan: Plan, router: Router, logs: Path, processes: list[WorkerProcess], say: Callable[[str], None]
) -> Workers:
    config = plan.config

    async def start(module: str, peer: Peer, device: int | str, threads: int) -> None:
        process = WorkerProcess(peer, logs / f"{peer.name}.log")
        processes.append(process)
        spec = WorkerSpec(
            name=peer.name,
            endpoint=router.endpoint,
            device="cpu" if device == "cpu" else "cuda:0",
            threads=threads,
            config_json=config.model_dump_json(),
        )
        await process.start(module, spec, _environment(device, threads))

    engines = [EngineClient(router, f"engine-{index}", config.engine) for index in range(len(plan.engine_devices))]
    learner = LearnerClient(router, config.learner)
    for engine, device in zip(engines, plan.engine_devices, strict=True):
        await start("unstable_lite.engines.worker", engine.peer, device, plan.engine_threads)
    await start("unstable_lite.learners.worker", learner.peer, plan.learner_device, plan.learner_threads)

    timeouts = {engine.peer.name: config.engine.start_timeout_s for engine in engines}
    timeouts["learner"] = config.learner.start_timeout_s
    say(f"waiting for {', '.join(timeouts)} ({config.engine.kind}: {plan.engine_reason})")
    facts = {}
    for process in processes:
        name = process.peer.name
        facts[name] = await _ready(process, timeouts[name])
        shown = {key: value for key, value in facts[name].items() if not isinstance(value, dict)}
        say(f"{name} is up: {', '.join(f'{key} {value}' for key, value in shown.items())}")
    return Workers(
        engines=EnginePool(engines),
        learner=learner,
        processes=processes,
        adapter_bytes=int(facts["learner"]["adapter_bytes"]),
        prompts=facts["engine-0"].get("prompts", {}),
    )


async def _ready(process: WorkerProcess, timeout_s: float) -> dict[str, Any]:
    """A worker's facts; raises if it ends, or is not up in time."""
    death = asyncio.create_task(process.watch())
    either: set[asyncio.Future[Any]] = {death, process.peer.ready}
    try:
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            death.result()
        if not process.peer.ready.done():
            raise UnstableError(
                f"{process.peer.name} was not up after start_timeout_s = {timeout_s:g}; see {process.log_path}"
            )
        return process.peer.ready.result()
    finally:
        death.cancel()


def _environment(device: int | str, threads: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    cuda = "" if device == "cpu" else (visible[int(device)] if visible != [""] else str(device))
    return {
        "CUDA_VISIBLE_DEVICES": cuda,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
