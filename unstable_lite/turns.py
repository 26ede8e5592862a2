"""Engines and learner on one device, in turns: while the learner learns, the engines that share its device sleep.

Owns who may use the device now. What an engine must show before it plays again is the caller's to know.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager

from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import WorkerDied


class Turns:
    def __init__(
        self,
        engines: Sequence[EngineClient],
        restore: Callable[[EngineClient], Awaitable[None]],
        learning: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`engines`: those that share the learner's device. `restore`: give one back what it should hold, and try it;
        then it plays. `learning`: entered while they do not play."""
        self.engines = engines
        self._restore = restore
        self._learning = learning
        self._device = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def learner(self) -> AsyncIterator[None]:
        """The device is the learner's: every engine that shares it is asleep or dead."""
        if not self.engines:
            yield
            return
        async with self._device:
            with self._learning():
                asleep = await asyncio.gather(*(_put_to_sleep(engine) for engine in self.engines))
                yield  # where it raises the run is over, and nobody needs to wake
                await asyncio.gather(*(self._wake_up(engine) for engine in asleep if engine is not None))

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """An engine that died takes memory again: not while the learner learns."""
        async with self._device:
            yield

    async def restore(self, engine: EngineClient) -> None:
        """After that, unless it has slept and been tried between the two."""
        async with self._device:
            if not engine.is_up:
                await self._restore(engine)

    async def _wake_up(self, engine: EngineClient) -> None:
        with contextlib.suppress(WorkerDied):  # its supervisor starts it again
            await engine.wake_up()
            await self._restore(engine)


async def _put_to_sleep(engine: EngineClient) -> EngineClient | None:
    """None if it is dead."""
    try:
        await engine.sleep()
    except WorkerDied:
        return None
    return engine
