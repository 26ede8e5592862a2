"""Weight sync: load a written adapter on every engine, check it there, and unload it when nothing uses it.

Identity first: the learner reports the digest of each adapter that it writes, and each engine the digest of the files
that it read, so another version, another adapter or a damaged file is refused, however small the difference. Then the
canary; see canary_checks.py. adapters/table.py owns the states; this module performs the transitions on the engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import AdapterTable, Origin
from unstable_lite.engines.client import EngineClient, EnginePool, all_of
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.orchestrator.canary_checks import CanaryChecks

log = logging.getLogger(__name__)

UNLOAD_RETRY_S = 1.0


class AdapterSync:
    def __init__(self, engines: EnginePool, store: AdapterStore, table: AdapterTable, canaries: CanaryChecks) -> None:
        self.num_waits = 0
        """Number of new adapters that had to wait for a slot."""
        self.canaries = canaries
        self._engines = engines
        self._store = store
        self._table = table
        self._changed = asyncio.Event()
        table.on_change = self._changed_now

    async def sync(self, version: int, digest: str) -> dict[str, float]:
        """Load a new version of the learner on every engine and check it; return the canary's metrics.

        `digest`: of the adapter that the learner wrote. Waits for a free adapter slot. Raises AdapterError if an engine
        read another adapter or the canary fails, RequestError if an engine cannot load it.
        """
        table = self._table
        table.add(version, Origin("update", str(version)), digest)
        if not table.has_free_slot:
            self.num_waits += 1
            log.warning("adapter %d waits: all %d slots (engine.max_loras) are in use", version, table.num_slots)
            await self._until(lambda: table.has_free_slot)
        return await self._load_everywhere(version)

    async def load_frozen(self, id: int, name: str, directory: Path) -> None:
        """Load a frozen player's adapter on every engine and check it; it then stays for the whole run.

        Raises AdapterError if an engine cannot load it, read another adapter, or fails the canary.
        """
        table = self._table
        table.add(id, Origin("file", name), await asyncio.to_thread(adapter_digest, directory))
        self._store.outside[id] = directory
        try:
            await self._load_everywhere(id, directory)
        except RequestError as error:
            raise AdapterError(f"frozen player {name} ({directory}): {error}") from error
        table.offer(id)

    async def _load_everywhere(self, id: int, directory: Path | None = None) -> dict[str, float]:
        """Load and check an adapter, for which a slot is free; `directory`: of one that the learner does not hold."""
        self._table.load(id)
        await self._engines.each(lambda engine: self._load(engine, id))
        metrics = await self.canaries.check_new(id, directory)
        self._table.check(id)
        return metrics

    async def reload(self, id: int) -> None:
        """Load weights that were on the engines before, as `id`, which has a reserved slot, and check them.

        Raises RequestError if no engine can load them, or if their files were damaged in the meantime; AdapterError if
        only some engines can, or if one does not answer as it did.
        """
        engines, path, expected = self._engines, self._store.path(id), self._table.weights_of(id).digest
        self._table.load(id)
        try:
            digests = {*await engines.each(lambda engine: engine.load_adapter(id, path))} - {None}
        except RequestError as error:
            if any(id in engine.adapters for engine in engines.engines):
                raise AdapterError(f"adapter {id} is loaded by some engines, not by others: {error}") from error
            raise
        if len(digests) == 1 and expected not in digests:
            await engines.unload_adapter(id)
            raise RequestError(f"its files were damaged: their digest is {digests.pop()}, the learner wrote {expected}")
        await engines.each(lambda engine: self._load(engine, id))
        await engines.each(lambda engine: self.canaries.check_returned(engine, id))
        self._table.check(id)

    async def restore(self, engine: EngineClient) -> None:
        """Load on a restarted engine the adapters that the others hold, and check them; then it may be asked again.

        Raises AdapterError if it does not answer as it did before its death.
        """
        table = self._table
        given: set[int] = set()
        checked: set[int] = set()
        # Adapters come and go while this engine loads. One that `sync` is loading has no answers yet: `sync` checks it.
        while True:
            # First, because a version that was retired while this engine loaded it takes up a slot.
            while retired := engine.adapters - table.held:
                await engine.unload_adapter(min(retired))
            new = sorted(id for id in table.held - checked if id not in given or table.is_answered(id))
            if not new:
                break
            given.update(new)
            checked.update(filter(table.is_answered, new))
            await all_of(self._give_back(engine, id) for id in new)
        self._engines.mark_ready(engine)

    async def run(self) -> None:
        """Unload adapters that nothing uses any more, until cancelled."""
        begun: set[int] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                retiring = set(self._table.retiring())
                for id in sorted(retiring - begun):
                    tasks.create_task(self._retire(id))
                begun = retiring
                await self._changed.wait()

    async def retired(self) -> None:
        """Wait until every adapter that nothing uses is unloaded, so that its slot is free."""
        await self._until(lambda: not self._table.retiring())

    def state_dict(self) -> dict[str, Any]:
        return {"num_waits": self.num_waits, "canaries": self.canaries.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_waits = state["num_waits"]
        self.canaries.load_state_dict(state["canaries"])

    async def _give_back(self, engine: EngineClient, id: int) -> None:
        table = self._table
        if id not in table.held:  # retired in the meantime
            return
        try:
            if id:
                await self._load(engine, id)
            if id in table.held and table.is_answered(id):
                await self.canaries.check_returned(engine, id)
        except RequestError:
            if id in table.held:  # else it was retired in the meantime
                raise

    async def _load(self, engine: EngineClient, id: int) -> None:
        """Load an adapter on an engine. Raises AdapterError if it now holds another one than the learner wrote."""
        found = await engine.load_adapter(id, self._store.path(id))
        if id not in self._table.adapters:  # retired in the meantime
            return
        origin, expected = self._table.origin(id), self._table.weights_of(id).digest
        if found != expected:
            whose = "the learner wrote" + f" as version {origin.name}" * (origin.name != str(id))
            if origin.kind == "file":
                whose = f"{self._store.path(id)} has, the copy of {origin.name}"
            raise AdapterError(
                f"{engine.channel.name} holds another adapter as version {id} than {whose}: the digest of the files "
                f"that it read is {found}, expected is {expected}. They are of another adapter, or damaged"
            )

    async def _retire(self, id: int) -> None:
        while any(id in engine.adapters for engine in self._engines.up):  # one may be restored in the meantime
            try:
                await self._engines.unload_adapter(id)
            except RequestError as error:
                # A game that was given up may still have a request in an engine.
                log.info("adapter %d stays a little longer: %s", id, error)
                await asyncio.sleep(UNLOAD_RETRY_S)
        self._store.unlink(id)
        self._table.remove(id)

    def _changed_now(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
