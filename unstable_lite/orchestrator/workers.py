"""The worker processes of a run: start them on their devices, wait until they are up, end them.

While the learner learns, the engines on its devices sleep (`Colocation`). Engines on other devices play all the time:
new requests go to them. The caller restores an engine before it plays again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.engines.devices import visible_name
from unstable_lite.engines.vllm_checks import SERVER_KIND as VLLM_SERVER
from unstable_lite.engines.vllm_checks import server_keys
from unstable_lite.errors import WorkerDied
from unstable_lite.games.run_prompts import prompt_warnings
from unstable_lite.learner.client import LearnerClient
from unstable_lite.orchestrator.event_loop import first_reason
from unstable_lite.planning.plan import Plan
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel, make_socket_directory
from unstable_lite.transport.worker_main import WorkerSpec

log = logging.getLogger(__name__)
T = TypeVar("T")

LATE_SERVER_S = 10.0
"""Time that a run waits for more vLLM servers after the last one that came up."""
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"),
    "LRU_CACHE_CAPACITY": os.environ.get("LRU_CACHE_CAPACITY", "64"),
}
"""Environment of the learner. By default glibc returns a large block to the system as soon as it is free, so that every
chunk of logits needs new pages: with a large vocabulary that is most of the time of an update on a CPU (bench/LOG.md).
On a GPU every micro-batch has another shape, and blocks of fixed sizes would fragment the memory.

In bfloat16 on a CPU, oneDNN compiles each matrix product for its shape. By default it keeps the newest 1024, and so
does torch's interface to it (LRU_CACHE_CAPACITY): together up to 550 MB, more with fragmentation. A micro-batch uses
about 40, and the next one has another shape."""


class Workers:
    """Worker processes on one router; `started_workers` and its like start them, and stop them on exit."""

    engines: EnginePool
    learners: dict[str, LearnerClient]
    """Each policy's learner by the policy's name, in the order of the config; one process has all of them."""
    adapter_bytes: int
    """Size of one adapter, as the learner writes it."""
    info: dict[str, Any]
    """Facts of one engine; all engines have the same."""

    def __init__(self, plan: Plan, logs: Path, say: Callable[[str], None], is_restart: bool = False) -> None:
        self.processes: list[WorkerProcess] = []
        self._sockets = make_socket_directory()
        self.router = Router(self._sockets)
        self._plan = plan
        self._logs = logs
        self._say = say
        self._is_restart = is_restart

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.gather(*(process.stop() for process in self.processes))
        finally:  # a second interruption ends the grace period
            for process in self.processes:
                process.kill()
            self.router.close()
            shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def prompts(self) -> dict[str, Any]:
        """Facts of the engines' tokenizer about prompts; see `templates_for`."""
        return self.info.get("prompts", {})  # type: ignore[no-any-return]

    async def start_engines(self) -> None:
        plan, config = self._plan, self._plan.config.engine
        engines = [EngineClient(self.router, f"engine-{n}", config) for n in range(len(plan.devices_by_engine))]
        self.engines = EnginePool(engines)
        keys = server_keys() if config.kind == VLLM_SERVER else None
        used: set[int | str] = set()
        for engine, devices in zip(engines, plan.devices_by_engine, strict=True):
            if used & {device for device in devices if isinstance(device, int)}:
                # vLLM measures the memory of the whole GPU while it starts, so the others there must be up.
                await self.all_ready()
            used.update(devices)
            worker = self.make("unstable_lite.engines.worker", engine.channel, devices, plan.engine_threads, keys)
            await self.start(worker)

    async def all_ready(self) -> None:
        """Wait until the workers that were started are up."""
        for process in self.processes:
            await process.ready(self._plan.config.engine.start_timeout_s)

    async def start_learner(self) -> None:
        """Start the learner's ranks, of which rank 0 answers."""
        plan, channel = self._plan, WorkerChannel(self.router, "learner")
        self.learners = {name: LearnerClient(channel, name) for name in plan.config.shares}
        ranks = [
            self.make(
                "unstable_lite.learner.worker",
                WorkerChannel(self.router, f"{channel.name}-{rank}") if rank else channel,
                (device,),
                plan.learner_threads,
                KEEP_MEMORY,
                rank=rank,
                num_ranks=plan.num_ranks,
            )
            for rank, device in enumerate(plan.learner_devices)
        ]
        await self.start(WorkerGroup(ranks, self._sockets) if len(ranks) > 1 else ranks[0])

    async def start(self, process: WorkerProcess) -> None:
        self.processes.append(process)
        await process.start()

    def make(
        self,
        module: str,
        channel: WorkerChannel,
        devices: Sequence[int | str],
        threads: int,
        variables: dict[str, str] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> WorkerProcess:
        """Return a worker that is not started yet. `variables`: more of its environment."""
        spec = WorkerSpec(
            name=channel.name,
            endpoint=self.router.endpoint,
            device=devices[0] if isinstance(devices[0], str) else "cuda:0",
            threads=threads,
            config_json=self._plan.divided_for(devices).model_dump_json(),
            is_restart=self._is_restart,
            rank=rank,
            num_ranks=num_ranks,
        )
        log_path = self._logs / f"{channel.name}.log"
        return WorkerProcess(channel, log_path, module, spec, environment(devices, threads) | (variables or {}))

    async def wait_until_up(self, may_servers_be_late: bool = False) -> None:
        """Wait for every worker; with `may_servers_be_late` one vLLM server is enough, and others may come later."""
        config, say = self._plan.config, self._say
        engines = [process for process in self.processes if process.channel.name.startswith("engine-")]
        if names := ", ".join(process.channel.name for process in self.processes):
            say(f"waiting for {names}")
            log.info("engine %s: %s", config.engine.kind, self._plan.engine_reason)
        servers = engines if may_servers_be_late and config.engine.kind == VLLM_SERVER else []
        facts = await self._first_servers(servers) if servers else {}
        for process in self.processes:
            if process not in servers:
                facts[process.channel.name] = await process.ready(config.engine.start_timeout_s)
                self._say_up(process.channel.name, facts[process.channel.name])
        self.info = next((facts[one.channel.name] for one in engines if one.channel.name in facts), {})
        if "learner" in facts:
            self.adapter_bytes = int(facts["learner"]["adapter_bytes"])
        of_learner = facts.get("learner", {}).get("warning")
        for text in (*prompt_warnings(config, self.prompts), *filter(None, [of_learner])):
            say(f"warning: {text}")
            log.warning("%s", text)

    def _say_up(self, name: str, facts: Mapping[str, Any]) -> None:
        self._say(f"{name} is up")
        shown = ", ".join(f"{key} {fact}" for key, fact in facts.items() if not isinstance(fact, dict | list))
        log.info("%s is up: %s", name, shown)

    async def _first_servers(self, processes: Sequence[WorkerProcess]) -> dict[str, dict[str, Any]]:
        """Wait until a server is up, and a little longer for the others; return their facts by name.

        Raises WorkerDied if a server cannot be used at all, or if none is up in time.
        """
        timeout_s = self._plan.config.engine.start_timeout_s
        starting = {asyncio.ensure_future(process.ready(timeout_s)): process.channel.name for process in processes}
        pending, info, away = set(starting), dict[str, dict[str, Any]](), list[WorkerDied]()
        try:
            while pending:
                patience_s = LATE_SERVER_S if info else None
                done, pending = await asyncio.wait(pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    if isinstance(error := task.exception(), WorkerDied) and error.is_away:
                        away.append(error)
                    else:
                        info[starting[task]] = task.result()
                        self._say_up(starting[task], task.result())
        finally:
            for task in pending:
                task.cancel()
        if not info:
            raise away[0]
        if late := [process.channel for process in processes if process.channel.name not in info]:
            for channel in late:
                channel.mark_late()
            names = ", ".join(channel.name for channel in late)
            self._say(f"starting without {names}: the run uses each server as soon as it is up")
        return info


@contextlib.asynccontextmanager
async def started_workers(
    plan: Plan, logs: Path, say: Callable[[str], None], is_restart: bool = False, has_learner: bool = True
) -> AsyncIterator[Workers]:
    """Start every worker of `plan`, and stop it on exit. `is_restart`: other workers began this run.

    has_learner: whether to start more than the engines, which are enough to play. Raises WorkerDied if a worker exits,
    UnstableError if one is not up in time.
    """
    async with Workers(plan, logs, say, is_restart) as workers:
        await workers.start_engines()
        if has_learner:
            if any(isinstance(device, int) for device in plan.shared_devices):
                # An engine that starts measures the free memory, so the learner must not allocate any before it is up.
                await workers.all_ready()
            await workers.start_learner()
        await workers.wait_until_up(may_servers_be_late=has_learner)
        yield workers


started_engines = partial(started_workers, has_learner=False)
"""Start only the engines of a plan: enough to play, not to learn."""


async def while_alive(processes: Iterable[WorkerProcess], work: Awaitable[T]) -> T:
    """Return the result of `work`; raise WorkerDied at once if one of `processes` ends before it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(process.watch()) for process in processes]
            result = await work
            for watch in watching:
                watch.cancel()
    except BaseExceptionGroup as group:
        raise first_reason(group) from group
    return result


def environment(devices: Sequence[int | str], threads: int) -> dict[str, str]:
    """Return the environment of a worker: its own devices and no other, and its number of threads."""
    own = [visible_name(device) for device in devices if isinstance(device, int)]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(own),
        # CUDA's default order is the fastest first; nvidia-smi, and so `check` and `top`, count by bus.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass(slots=True)
class Colocation:
    engines: Sequence[EngineClient]
    """Engines on the learner's device."""
    load_adapters: Callable[[EngineClient], Awaitable[None]]
    """Loads an engine's adapters, checks them and marks the engine ready."""
    others: Sequence[EngineClient] = ()
    """Engines on other devices."""
    learning: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Context that is entered while no engine plays."""
    device: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that the learner holds while it learns, and an engine while it starts, because both take memory."""
    _asleep_s: float = 0.0
    """Time of the last turn of the learner, from putting the engines to sleep until they are ready again."""

    def metrics(self) -> dict[str, float]:
        """Return the time that the engines last slept, in seconds, if any share the device."""
        return {"inference/asleep_s": self._asleep_s} if self.engines else {}

    @contextlib.asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """Give the device to the learner: every engine that shares it is asleep or dead."""
        if not self.engines:
            yield
            return
        started = time.monotonic()
        async with self.device:
            is_any_up = any(engine.is_up for engine in self.others)
            with contextlib.nullcontext() if is_any_up else self.learning():
                asleep = await asyncio.gather(*(_put_to_sleep(engine) for engine in self.engines))
                yield  # if it raises the run is over, and no engine needs to wake
                await asyncio.gather(*(self._wake_up(engine) for engine in asleep if engine is not None))
        self._asleep_s = time.monotonic() - started

    async def restore(self, engine: EngineClient) -> None:
        """Restore an engine after its start, unless it slept and was restored since."""
        async with self.device:
            if not engine.is_up:
                await self.load_adapters(engine)

    async def _wake_up(self, engine: EngineClient) -> None:
        with contextlib.suppress(WorkerDied):  # its supervisor restarts it
            await engine.wake_up()
            await self.load_adapters(engine)


async def _put_to_sleep(engine: EngineClient) -> EngineClient | None:
    """Put an engine to sleep; return None if it is dead."""
    try:
        await engine.sleep()
    except WorkerDied:
        return None
    return engine
