"""Keep a worker alive: start it again where it dies, kill it where it is stuck; so often, and no more.

Owns the budget. What a worker must be given back before it may work again is the caller's to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from unstable_lite.config import RunConfig
from unstable_lite.errors import AdapterError, RequestError, WorkerDied
from unstable_lite.transport.door import RemoteWorker
from unstable_lite.transport.processes import WorkerProcess

log = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""Deaths longer ago do not count."""


class Attendant:
    """Of one place for workers from other machines: they come and go, and nobody counts."""

    def __init__(
        self,
        worker: RemoteWorker,
        restore: Callable[[], Awaitable[None]],
        alarm: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """`restore`: give a worker that has come what the others hold; from then on it may be asked."""
        self._worker = worker
        self._restore = restore
        self._alarm = alarm
        self._say = say

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                if self._worker.peer.is_dead:
                    await self._worker.take_one(self._alarm)
                async with asyncio.TaskGroup() as life:
                    if not self._worker.peer.is_up:
                        life.create_task(self._give_back())
                    life.create_task(self._worker.watch())
            except* WorkerDied as deaths:
                self._alarm(f"{deaths.exceptions[0]}; what it owed is asked of others, and its place is free")

    async def _give_back(self) -> None:
        try:
            await self._restore()
        except AdapterError as error:  # what it has for the base or an adapter is something else
            self._worker.stop()
            raise WorkerDied(f"{error}; it was sent away") from error
        except RequestError as error:
            self._worker.give_up(f"could not be given what the others hold: {error}")
        self._say(f"{self._worker.peer.name} ({self._worker.where}) is up")


class Supervisor:
    """One worker's."""

    def __init__(
        self,
        process: WorkerProcess,
        config: RunConfig,
        start_timeout_s: float,
        stall_timeout_s: float,
        restore: Callable[[], Awaitable[None]],
        alarm: Callable[[str], None],
        starting: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`restore`: give a worker that started again what it held; from then on it may be asked. `starting`: entered
        while it starts again."""
        self.restarts = 0
        self._process = process
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._restore = restore
        self._alarm = alarm
        self._starting = starting
        self._deaths: deque[float] = deque()

    async def run(self) -> None:
        """Until the worker is asked to stop.

        Raises WorkerDied where it dies more often than `run.max_restarts`, or of what its successor would die of too.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as life:
                    companions = [life.create_task(self._kill_when_silent())]
                    if self.restarts:
                        companions.append(life.create_task(self._restore()))  # type: ignore[arg-type]
                    await self._process.watch()
                    for companion in companions:
                        companion.cancel()
                return
            except* WorkerDied as deaths:
                death = deaths.exceptions[0]
                assert isinstance(death, WorkerDied)
            await self._start_again(death)

    async def _start_again(self, death: WorkerDied) -> None:
        while True:
            self._count(death)
            await asyncio.sleep(self._config.restart_backoff_s * 2 ** (len(self._deaths) - 1))
            try:
                async with self._starting():
                    await self._process.start()
                    await self._process.ready(self._start_timeout_s)
            except WorkerDied as another:
                death = another
            else:
                self.restarts += 1
                return

    def _count(self, death: WorkerDied) -> None:
        if death.is_final:
            raise death
        now, most = time.monotonic(), self._config.max_restarts
        while self._deaths and self._deaths[0] < now - WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > most:
            if most == 0:
                raise death
            raise WorkerDied(f"{death}\n({len(self._deaths)} deaths within the hour; run.max_restarts = {most})")
        log.warning("%s", death)
        self._alarm(f"{str(death).splitlines()[0]} It is started again ({len(self._deaths)} of {most}).")

    async def _kill_when_silent(self) -> None:
        """A worker that waits for nothing and says nothing does no harm; one that is waited for does."""
        peer = self._process.peer
        while True:
            silent_s = await peer.fall_silent(self._stall_timeout_s, look_every_s=self._stall_timeout_s / 10)
            self._alarm(f"{peer.name} is waited for and has said nothing for {silent_s:.0f} s: it is killed")
            await self._process.kill_stuck()
