"""The worker processes of a run: start them on their devices, wait until they are up, end them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.engines.vllm_server.config_checks import KIND as VLLM_SERVER
from unstable_lite.engines.vllm_server.config_checks import server_keys
from unstable_lite.errors import WorkerDied
from unstable_lite.learner.client import LearnerClient
from unstable_lite.orchestrator.event_loop import first_reason
from unstable_lite.planning.plan import Plan
from unstable_lite.transport.messages import Message
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel, make_socket_directory
from unstable_lite.transport.worker_main import WorkerSpec

T = TypeVar("T")

LATE_SERVER_S = 10.0
"""Time that a run waits for more vLLM servers after the last one that came up."""

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
}
"""Environment of the learner. By default glibc returns a large block to the system as soon as it is free, so that every
chunk of logits needs new pages: with a large vocabulary that is most of the time of an update on a CPU (bench/LOG.md).
On a GPU every micro-batch has another shape, and blocks of fixed sizes would fragment the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkers:
    """Engines without a learner: enough to play, not to learn."""

    engines: EnginePool
    processes: list[WorkerProcess]
    info: dict[str, Any]
    """Facts of one engine; all engines have the same."""

    @property
    def prompts(self) -> dict[str, Any]:
        """Facts of the engines' tokenizer about prompts; see `templates_for`."""
        return self.info.get("prompts", {})  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(EngineWorkers):
    learner: LearnerClient
    adapter_bytes: int
    """Size of one adapter, as the learner writes it."""
    router: Router


@contextlib.asynccontextmanager
async def started_workers(
    plan: Plan, logs: Path, say: Callable[[str], None], is_restart: bool = False
) -> AsyncIterator[Workers]:
    """Start every worker of `plan`, and stop it on exit. `is_restart`: other workers began this run.

    Raises WorkerDied if a worker exits, UnstableError if one is not up in time.
    """
    async with _WorkerFleet(plan, logs, is_restart) as fleet:
        engines = EnginePool(await fleet.start_engines())
        if any(isinstance(device, int) for device in plan.shared_devices):
            # An engine that starts measures the free memory, so the learner must not allocate any before it is up.
            await fleet.engines_ready()
        learner = LearnerClient(fleet.router, plan.config.learner)
        await fleet.start_learner(learner.channel)
        info = await fleet.wait_until_up(say, may_servers_be_late=True)
        yield Workers(
            engines=engines,
            learner=learner,
            processes=fleet.processes,
            info=next(facts for name, facts in info.items() if name.startswith("engine-")),
            adapter_bytes=int(info["learner"]["adapter_bytes"]),
            router=fleet.router,
        )


@contextlib.asynccontextmanager
async def started_engines(
    plan: Plan, logs: Path, say: Callable[[str], None], is_restart: bool = False
) -> AsyncIterator[EngineWorkers]:
    """Start only the engines of `plan`; see `started_workers`."""
    async with _WorkerFleet(plan, logs, is_restart) as fleet:
        engines = EnginePool(await fleet.start_engines())
        info = await fleet.wait_until_up(say)
        yield EngineWorkers(engines=engines, processes=fleet.processes, info=info["engine-0"])


@contextlib.asynccontextmanager
async def started_fine_tuner(
    plan: Plan, logs: Path, say: Callable[[str], None], on_message: Callable[[Message], None]
) -> AsyncIterator[WorkerProcess]:
    """Start a worker that fine-tunes, on the learner's device; see `started_workers`."""
    async with _WorkerFleet(plan, logs) as fleet:
        channel = WorkerChannel(fleet.router, "sft", on_message)
        await fleet.start(
            fleet.make("unstable_lite.sft.worker", channel, plan.learner_devices[:1], plan.learner_threads)
        )
        await fleet.wait_until_up(say)
        yield fleet.processes[0]


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


class _WorkerFleet:
    """The worker processes on one router. It starts without workers, and stops every worker on exit."""

    def __init__(self, plan: Plan, logs: Path, is_restart: bool = False) -> None:
        self.processes: list[WorkerProcess] = []
        self._sockets = make_socket_directory()
        self.router = Router(self._sockets)
        self._plan = plan
        self._logs = logs
        self._is_restart = is_restart

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(process.stop() for process in self.processes))
        self.router.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def start_engines(self) -> list[EngineClient]:
        plan = self._plan
        names = [f"engine-{index}" for index in range(len(plan.devices_by_engine))]
        engines = [EngineClient(self.router, name, plan.config.engine) for name in names]
        keys = server_keys() if plan.config.engine.kind == VLLM_SERVER else None
        used: set[int | str] = set()
        for engine, devices in zip(engines, plan.devices_by_engine, strict=True):
            if used & {device for device in devices if isinstance(device, int)}:
                # vLLM measures the memory of the whole GPU while it starts, so the others there must be up.
                await self.engines_ready()
            used.update(devices)
            await self.start(
                self.make("unstable_lite.engines.worker", engine.channel, devices, plan.engine_threads, keys)
            )
        return engines

    async def engines_ready(self) -> None:
        """Wait until the engines that were started are up."""
        for process in self.processes:
            await process.ready(self._plan.config.engine.start_timeout_s)

    async def start_learner(self, channel: WorkerChannel) -> None:
        """Start the learner's ranks; rank 0 answers as `channel`."""
        plan = self._plan
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

    async def wait_until_up(
        self, say: Callable[[str], None], may_servers_be_late: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Return the facts of each worker that is up, by name.

        That is every worker; with `may_servers_be_late` one vLLM server is enough, and the others may come later.
        """
        config = self._plan.config
        names = [process.channel.name for process in self.processes]
        has_engines = any(name.startswith("engine-") for name in names)
        engine = f" ({config.engine.kind}: {self._plan.engine_reason})" * has_engines
        say(f"waiting for {', '.join(names)}{engine}")
        of_servers: list[WorkerProcess] = []
        if may_servers_be_late and config.engine.kind == VLLM_SERVER:
            of_servers = [process for process in self.processes if process.channel.name.startswith("engine-")]
        info = await self._first_servers(of_servers, say) if of_servers else {}
        for name, process in zip(names, self.processes, strict=True):
            if process not in of_servers:
                section = config.engine if name.startswith("engine-") else config.learner
                info[name] = await process.ready(section.start_timeout_s)
                say(f"{name} is up: {shown(info[name])}")
        return info

    async def _first_servers(
        self, processes: Sequence[WorkerProcess], say: Callable[[str], None]
    ) -> dict[str, dict[str, Any]]:
        """Wait until a server is up, and a little longer for the others.

        Raises WorkerDied if a server cannot be used at all, or if none is up in time.
        """
        timeout_s = self._plan.config.engine.start_timeout_s
        starting = {asyncio.ensure_future(process.ready(timeout_s)): process.channel.name for process in processes}
        pending, info, away = set(starting), dict[str, dict[str, Any]](), []
        try:
            while pending:
                patience_s = LATE_SERVER_S if info else None
                done, pending = await asyncio.wait(pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    error = task.exception()
                    if isinstance(error, WorkerDied) and error.is_away:
                        away.append(error)
                        continue
                    info[starting[task]] = task.result()
                    say(f"{starting[task]} is up: {shown(task.result())}")
        finally:
            for task in pending:
                task.cancel()
        if not info:
            raise away[0]
        if late := [process.channel for process in processes if process.channel.name not in info]:
            for channel in late:
                channel.mark_late()
            names = ", ".join(channel.name for channel in late)
            say(f"starting without {names}: the run uses each server as soon as it is up")
        return info


def shown(info: Mapping[str, Any]) -> str:
    """Return a worker's facts as one line."""
    return ", ".join(f"{key} {value}" for key, value in info.items() if not isinstance(value, (dict, list)))


def environment(devices: Sequence[int | str], threads: int) -> dict[str, str]:
    """Return the environment of a worker: its own devices and no other, and its number of threads."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    own = [names[device].strip() if names else str(device) for device in devices if isinstance(device, int)]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(own),
        # CUDA's default order is the fastest first; nvidia-smi, and so `check` and `top`, count by bus.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
