"""The processes of a run: start them where the plan says, wait until they are up, end them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.engines.servers import KIND as VLLM_SERVER
from unstable_lite.engines.servers import server_keys
from unstable_lite.errors import ConfigError
from unstable_lite.learners.client import LearnerClient
from unstable_lite.plan import Plan
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.door import Door, RemoteWorker
from unstable_lite.transport.keys import read_run_keys
from unstable_lite.transport.messages import Message
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.sockets import Peer, Router, make_socket_directory

T = TypeVar("T")

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
}
"""For the learner. glibc gives a large block back to the system as soon as it is free, and every chunk of logits would
have its pages made anew: with a large vocabulary most of what an update takes on a CPU (bench/LOG.md). On a GPU every
micro-batch has another shape, and blocks of fixed sizes would fragment the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkers:
    """Engines and nothing else: enough to play, not to learn."""

    engines: EnginePool
    processes: list[WorkerProcess]
    facts: dict[str, Any]
    """Of the first engine; they are all alike."""

    @property
    def prompts(self) -> dict[str, Any]:
        """What the engines' tokenizer says about prompts; see `templates_for`."""
        return self.facts.get("prompts", {})  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(EngineWorkers):
    learner: LearnerClient
    remote: list[RemoteWorker]
    """Places for workers on other machines, whose clients are the last ones of `engines`."""
    adapter_bytes: int
    """Size of one adapter, as the learner writes it."""
    router: Router
    door: Door | None
    """The router of workers on other machines."""


@contextlib.asynccontextmanager
async def started_workers(
    plan: Plan, logs: Path, say: Callable[[str], None], goes_on: bool = False
) -> AsyncIterator[Workers]:
    """Every worker of `plan`, up; every worker ended afterwards, however that comes. `goes_on`: with a run that others
    began.

    Raises WorkerDied for a worker that ends by itself, UnstableError for one that is not up in time.
    """
    async with _household(plan, logs, goes_on) as household:
        far = household.open_door() if plan.config.remote.workers else []
        engines = EnginePool([*await household.start_engines(), *far])
        if any(isinstance(device, int) for device in plan.shared_devices):
            # An engine that starts measures what is free: the learner must not be taking it meanwhile.
            for process in household.processes:
                await process.ready(plan.config.engine.start_timeout_s)
        learner = LearnerClient(household.router, plan.config.learner)
        await household.start_learner(learner.peer)
        facts = await household.wait_until_up(say)
        yield Workers(
            engines=engines,
            learner=learner,
            processes=household.processes,
            remote=household.remote,
            facts=facts["engine-0"],
            adapter_bytes=int(facts["learner"]["adapter_bytes"]),
            router=household.router,
            door=household.door,
        )


@contextlib.asynccontextmanager
async def started_engines(
    plan: Plan, logs: Path, say: Callable[[str], None], goes_on: bool = False
) -> AsyncIterator[EngineWorkers]:
    """The engines of `plan` alone, under the same rules as `started_workers`."""
    if not plan.engine_devices:
        raise ConfigError("engine.devices = []: workers on other machines serve `run` only; name a device of this one")
    async with _household(plan, logs, goes_on) as household:
        engines = EnginePool(await household.start_engines())
        facts = await household.wait_until_up(say)
        yield EngineWorkers(engines=engines, processes=household.processes, facts=facts["engine-0"])


@contextlib.asynccontextmanager
async def started_fine_tuner(
    plan: Plan, logs: Path, say: Callable[[str], None], on_message: Callable[[Message], None]
) -> AsyncIterator[WorkerProcess]:
    """A worker that imitates, where the learner would be, under the same rules as `started_workers`."""
    async with _household(plan, logs) as household:
        peer = Peer(household.router, "sft", on_message)
        await household.start("unstable_lite.sft.worker", peer, plan.learner_device, plan.learner_threads)
        await household.wait_until_up(say)
        yield household.processes[0]


async def while_alive(processes: Iterable[WorkerProcess], work: Awaitable[T]) -> T:
    """The result of `work`; raises WorkerDied at once if one of `processes` ends before it."""
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(process.watch()) for process in processes]
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        for watch in watching:
            if watch.done():
                watch.result()
        return await working
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def _household(plan: Plan, logs: Path, goes_on: bool = False) -> AsyncIterator[_Household]:
    """Nobody yet; whoever is started is ended at the end."""
    sockets = make_socket_directory()
    router = Router(sockets)
    household = _Household(plan, logs, router, sockets, goes_on)
    try:
        yield household
    finally:
        await asyncio.gather(*(process.stop() for process in household.processes))
        household.close_door()
        router.close()
        shutil.rmtree(sockets, ignore_errors=True)


class _Household:
    """The processes that hang on one router, and the places at its door for others."""

    def __init__(self, plan: Plan, logs: Path, router: Router, sockets: Path, goes_on: bool) -> None:
        self.router = router
        self._sockets = sockets
        self.processes: list[WorkerProcess] = []
        self.remote: list[RemoteWorker] = []
        self.door: Door | None = None
        self._plan = plan
        self._logs = logs
        self._goes_on = goes_on

    async def start_engines(self) -> list[EngineClient]:
        plan = self._plan
        names = [f"engine-{index}" for index in range(len(plan.engine_devices))]
        engines = [EngineClient(self.router, name, plan.config.engine) for name in names]
        keys = server_keys() if plan.config.engine.kind == VLLM_SERVER else None
        for index, (engine, device) in enumerate(zip(engines, plan.engine_devices, strict=True)):
            if isinstance(device, int) and device in plan.engine_devices[:index]:
                # vLLM measures the memory of the whole GPU while it starts, so the others there must be up.
                for process in self.processes:
                    await process.ready(plan.config.engine.start_timeout_s)
            await self.start("unstable_lite.engines.worker", engine.peer, device, plan.engine_threads, keys)
        return engines

    def open_door(self) -> list[EngineClient]:
        """To workers on other machines, a place and a client for each that may come."""
        config, first = self._plan.config, len(self._plan.engine_devices)
        self.door = Door(config.remote.bind, read_run_keys(config.remote.keys), config.remote.silence_s)
        engines = []
        for index in range(first, first + config.remote.workers):
            engine = EngineClient(self.door, f"engine-{index}", config.engine)
            engines.append(engine)
            self.remote.append(RemoteWorker(self.door, engine.peer, config, engine.holds_already))
        return engines

    def close_door(self) -> None:
        for worker in self.remote:
            worker.stop()
        if self.door is not None:
            self.door.close()

    async def start_learner(self, peer: Peer) -> None:
        """Its rank 0 answers as `peer`."""
        plan, module = self._plan, "unstable_lite.learners.worker"
        ranks = [
            self._make(
                module,
                Peer(self.router, f"{peer.name}-{rank}") if rank else peer,
                device,
                plan.learner_threads,
                KEEP_MEMORY,
                rank=rank,
                num_ranks=len(plan.learner_devices) + plan.config.learner.remote_ranks,
            )
            for rank, device in enumerate(plan.learner_devices)
        ]
        process = WorkerGroup(ranks, self._sockets) if len(ranks) > 1 else ranks[0]
        self.processes.append(process)
        await process.start()

    async def start(
        self, module: str, peer: Peer, device: int | str, threads: int, more: Mapping[str, str] | None = None
    ) -> None:
        process = self._make(module, peer, device, threads, more or {})
        self.processes.append(process)
        await process.start()

    def _make(
        self,
        module: str,
        peer: Peer,
        device: int | str,
        threads: int,
        more: Mapping[str, str],
        rank: int = 0,
        num_ranks: int = 1,
    ) -> WorkerProcess:
        spec = WorkerSpec(
            name=peer.name,
            endpoint=self.router.endpoint,
            device=device if isinstance(device, str) else "cuda:0",
            threads=threads,
            config_json=self._plan.divided.model_dump_json(),
            goes_on=self._goes_on,
            rank=rank,
            num_ranks=num_ranks,
        )
        log_path = self._logs / f"{peer.name}.log"
        return WorkerProcess(peer, log_path, module, spec, environment(device, threads) | dict(more))

    async def wait_until_up(self, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
        """The facts of each, by name."""
        config = self._plan.config
        names = [process.peer.name for process in self.processes]
        has_engines = any(name.startswith("engine-") for name in names)
        engine = f" ({config.engine.kind}: {self._plan.engine_reason})" * has_engines
        say(f"waiting for {', '.join(names)}{engine}")
        if self.door is not None:
            say(f"{self.door.endpoint}: {len(self.remote)} places for workers on other machines")
        facts = {}
        for name, process in zip(names, self.processes, strict=True):
            section = config.engine if name.startswith("engine-") else config.learner
            facts[name] = await process.ready(section.start_timeout_s)
            say(f"{name} is up: {shown(facts[name])}")
        if self.remote and not self._plan.engine_devices:
            say("all engines are elsewhere: waiting for the first worker to connect")
            first = self.remote[0]
            facts[first.peer.name] = await while_alive(self.processes, first.take_one(say))
            first.peer.take_back()
            say(f"{first.peer.name} ({first.where}) is up: {shown(facts[first.peer.name])}")
        return facts


def shown(facts: Mapping[str, Any]) -> str:
    """A worker's facts on a line."""
    return ", ".join(f"{key} {value}" for key, value in facts.items() if not isinstance(value, (dict, list)))


def environment(device: int | str, threads: int) -> dict[str, str]:
    """What a worker finds in its environment: its own device and no other, and as many threads as it is given."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    cuda = "" if isinstance(device, str) else (visible[int(device)] if visible != [""] else str(device))
    return {
        "CUDA_VISIBLE_DEVICES": cuda,
        # CUDA would count the fastest first; nvidia-smi, and so `check` and `top`, count by bus.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
