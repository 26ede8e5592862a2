"""Keep a worker alive: restart it if it dies, kill it if it is stuck, within a budget of restarts.

Owns the budget. The caller restores a worker before it may work again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from unstable_lite.config.training import RunConfig
from unstable_lite.errors import WorkerDied
from unstable_lite.transport.processes import WorkerProcess

log = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""Deaths that are older do not count against the budget."""
BACKOFF_S = 1.0
"""Wait before the first restart; it doubles before each further one."""


@dataclass(slots=True)
class Supervisor:
    """Supervisor of one worker."""

    process: WorkerProcess
    config: RunConfig
    start_timeout_s: float
    stall_timeout_s: float
    restore: Callable[[], Awaitable[None]]
    """Gives a restarted worker its adapters or its state; then it may be asked."""
    alarm: Callable[[str], None]
    starting: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    """Context that is entered while the worker starts."""
    is_dispensable: Callable[[], bool] = lambda: False
    """Whether other workers do its work while the server that it speaks to is away."""
    restarts: int = 0
    _deaths: deque[tuple[float, str]] = field(default_factory=deque)
    """Time and place (`WorkerDied.place`) of each."""
    _is_waited_for: bool = False
    """Whether an alarm has said that the worker's server is away."""

    async def run(self) -> None:
        """Supervise until the worker is asked to stop.

        Raises WorkerDied if it dies more often than `run.max_restarts`, or if its successor would die in the same way.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as life:
                    companions = [life.create_task(self._kill_when_silent())]
                    if not self.process.channel.is_up:
                        companions.append(life.create_task(self._make_ready()))
                    await self.process.watch()
                    for companion in companions:
                        companion.cancel()
                return
            except* WorkerDied as deaths:
                death = deaths.exceptions[0]
                assert isinstance(death, WorkerDied)
            await self._restart(death)

    async def _make_ready(self) -> None:
        await self.process.ready(self.start_timeout_s)
        await self.restore()
        self._is_waited_for = False

    async def _restart(self, death: WorkerDied) -> None:
        while True:
            self._judge(death)
            await asyncio.sleep(BACKOFF_S * 2 ** max(len(self._deaths) - 1, 0))
            try:
                async with self.starting():
                    await self.process.start()
                    await self.process.ready(self.start_timeout_s)
            except WorkerDied as another:
                death = another
            else:
                self.restarts += 1
                return

    def _judge(self, death: WorkerDied) -> None:
        """Raise an alarm for a death after which the worker is restarted, or raise WorkerDied if it is not."""
        if death.is_final:
            raise death
        now, most, first_line = time.monotonic(), self.config.max_restarts, str(death).splitlines()[0].rstrip(".")
        if death.is_away and self.is_dispensable():
            log.warning("%s", death)
            if not self._is_waited_for:
                self._is_waited_for = True
                self.alarm(f"{first_line}. The run continues on the other engines and waits for it.")
            return
        while self._deaths and self._deaths[0][0] < now - WINDOW_S:
            self._deaths.popleft()
        if death.place and any(place == death.place for _, place in self._deaths):
            raise WorkerDied(f"{death}\n(the same error at the same line as before: it is not restarted again)")
        self._deaths.append((now, death.place))
        if most == 0:
            raise death
        if len(self._deaths) > most:
            raise WorkerDied(f"{death}\n({len(self._deaths)} deaths within the hour; run.max_restarts = {most})")
        log.warning("%s", death)
        self.alarm(f"{first_line}. It is restarted ({len(self._deaths)} of {most}).")

    async def _kill_when_silent(self) -> None:
        """Kill the worker if it owes an answer and says nothing; one that owes none does no harm."""
        channel = self.process.channel
        while True:
            silent_s = await channel.wait_for_stall(self.stall_timeout_s, look_every_s=self.stall_timeout_s / 10)
            self.alarm(f"{channel.name} owes an answer and has said nothing for {silent_s:.0f} s: it is killed")
            await self.process.kill_stuck()
