"""Share devices between engines and learner: while the learner learns, the engines on its devices sleep.

Engines on other devices play all the time: new requests go to them while the others sleep. Owns the lock of the shared
devices. The caller restores an engine before it plays again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import WorkerDied


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
    _device: asyncio.Lock = field(default_factory=asyncio.Lock)
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
        async with self._device:
            is_any_up = any(engine.is_up for engine in self.others)
            with contextlib.nullcontext() if is_any_up else self.learning():
                asleep = await asyncio.gather(*(_put_to_sleep(engine) for engine in self.engines))
                yield  # if it raises the run is over, and no engine needs to wake
                await asyncio.gather(*(self._wake_up(engine) for engine in asleep if engine is not None))
        self._asleep_s = time.monotonic() - started

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Let an engine that died take memory again, but not while the learner learns."""
        async with self._device:
            yield

    async def restore(self, engine: EngineClient) -> None:
        """Restore an engine after its start, unless it slept and was restored since."""
        async with self._device:
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
