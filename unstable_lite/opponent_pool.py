"""Which checkpoints may be opponents: a bounded pool beside the current policy, and the adapters behind it.

Owns the pool's references in the arena, the adapters on disk, and the versions under which they come back. Who plays
is for the samplers to say. A checkpoint leaves for new games at once, and its slot is free when its last game is over;
one comes back in the background, in a slot that no new adapter needs, so that training waits for neither.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unstable_lite.config import LeagueConfig
from unstable_lite.errors import RequestError
from unstable_lite.league.model_registry import ModelMeta, ModelRegistry
from unstable_lite.publisher import Publisher
from unstable_lite.transport.adapters import AdapterArena

log = logging.getLogger(__name__)

FIRST_RETURNED_VERSION = 1 << 30
"""Versions of adapters that come back count from here, those of updates from 1: they never meet, and both fit the 32
bits that engines have for them."""


class OpponentPool:
    def __init__(
        self,
        config: LeagueConfig,
        size: int,
        registry: ModelRegistry,
        arena: AdapterArena,
        publisher: Publisher,
        directory: Path,
        alarm: Callable[[str], None],
    ) -> None:
        """`size`: active checkpoints at most, the current one included; `directory`: for adapters that may return."""
        self.num_returned = 0
        self._config = config
        self._size = size
        self._registry = registry
        self._arena = arena
        self._publisher = publisher
        self._directory = directory
        self._alarm = alarm
        self._published_as: dict[str, int] = {}
        """By uid of those on disk: the version that they had when they were current."""
        self._left: set[str] = set()
        """Those on disk that are too old to come back."""
        self._needed: deque[set[str]] = deque(maxlen=2)
        """Who was on disk at the last two checkpoints: a run may go back to one of them."""
        self._saving: set[str] = set()
        """Who was on disk when the checkpoint was begun that is being written."""
        self._to_store: deque[tuple[str, int]] = deque()
        self._is_due = False
        self._next_version = FIRST_RETURNED_VERSION
        self._admitted = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    def admit(self, uid: str, version: int, update: int) -> None:
        """A new current policy, loaded everywhere; whoever is one too many leaves for new games."""
        self._arena.retain(version)
        self._registry.add_checkpoint(uid, adapter_version=version, iteration=update)
        if self._size > 1 or self._is_kept(update):
            self._arena.retain(version)
            self._to_store.append((uid, version))
        self._trim()
        self._is_due = self._is_due or update % self._config.rotate_checkpoints_every == 0
        self._admitted.set()
        self._settled.clear()

    def make_room(self) -> None:
        """Where the next adapter would have to wait for a slot: let an opponent go that nobody plays at the moment."""
        if self._publisher.has_slot:
            return
        for meta in reversed(self._ranked(self._others())):
            if meta.adapter_version and self._arena.references(meta.adapter_version) == 1:
                self._leave(meta)
                return

    async def run(self) -> None:
        """Store and bring back, until cancelled. Raises AdapterError for an engine that plays a checkpoint wrongly."""
        while True:
            if not self._admitted.is_set():
                self._settled.set()
            await self._admitted.wait()
            self._admitted.clear()
            while self._to_store:
                await self._store(*self._to_store.popleft())
            if self._is_due:
                self._is_due = False
                await self._publisher.retired()
                await self._rotate()
            await self._clear_out()

    def state_dict(self) -> dict[str, Any]:
        return {
            "published_as": self._published_as,
            "next_version": self._next_version,
            "num_returned": self.num_returned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._published_as = dict(state["published_as"])
        self._next_version = state["next_version"]
        self.num_returned = state["num_returned"]

    async def resume(self) -> None:
        """After `load_state_dict`: the registry knows who was active, `directory` has the adapters that were stored.

        The current policy is loaded already; who else was active comes back as the version that it was, if there is
        an adapter of it: these engines never heard of it.
        """
        num_returned = self.num_returned
        self._needed.append(set(self._published_as))
        for path in self._directory.glob("*"):
            if path.name not in self._published_as:
                shutil.rmtree(path)
        current = self._registry.current
        assert current.adapter_version is not None
        self._arena.retain(current.adapter_version)
        iteration = self._registry.get(current.uid).iteration
        if current.uid not in self._published_as and (self._size > 1 or self._is_kept(iteration or 0)):
            self._arena.retain(current.adapter_version)
            self._to_store.append((current.uid, current.adapter_version))
        for meta in self._others():
            self._registry.set_active(meta.uid, False)
            if not self._can_play(meta):
                self._alarm(f"{meta.uid} was an opponent, and its adapter was not stored: it does not come back")
            elif not await self._return(meta, meta.adapter_version or 0):
                self._alarm(f"{meta.uid} was an opponent, and the engines have no slot left for it: it waits for one")
        self.num_returned = num_returned

    def tell_saving(self) -> None:
        """A checkpoint is begun: what is on disk now is needed if it is written."""
        self._saving = set(self._published_as)

    async def tell_saved(self) -> None:
        """It was written: what only those before the last two needed is removed from disk."""
        self._needed.append(self._saving)
        await self._remove_unneeded()

    async def settled(self) -> None:
        """Wait until all that followed from the last `admit` is done, so that what is to be kept is on disk."""
        await self._settled.wait()

    def _others(self) -> list[ModelMeta]:
        """The active checkpoints but the current policy."""
        current = self._registry.get_current_ckpt()
        return [meta for meta in self._registry.checkpoints() if meta.uid != current]

    def _is_kept(self, update: int) -> bool:
        every = self._config.keep_every
        return update in self._config.keep_checkpoints or (every is not None and update % every == 0)

    def _is_candidate(self, meta: ModelMeta) -> bool:
        least, most = self._config.opponent_lag
        lag = self._registry.lag(meta.uid)
        assert meta.iteration is not None
        return lag > 0 and lag >= least and (lag <= most or self._is_kept(meta.iteration))

    def _ranked(self, metas: list[ModelMeta]) -> list[ModelMeta]:
        """The most wanted first; among equals the newest."""
        registry, current = self._registry, self._registry.get_current_ckpt()
        mu = registry.get(current).rating.mu
        keys: dict[str, Callable[[ModelMeta], float]] = {
            "recency": lambda meta: 0.0,  # noqa: ARG005
            "match-quality": lambda meta: -registry.match_quality(current, meta.uid),
            "nearest-rating": lambda meta: abs(meta.rating.mu - mu),
        }
        key = keys[self._config.active_checkpoints_by]
        return sorted(metas, key=lambda meta: (key(meta), -(meta.iteration or 0)))

    def _trim(self) -> None:
        """Where no candidate is there yet the oldest stays, as an opponent that is at least not the policy itself."""
        others = self._others()
        staying = self._ranked([meta for meta in others if self._is_candidate(meta)]) or others[:1]
        for meta in others:
            if meta not in staying[: self._size - 1]:
                self._leave(meta)

    def _leave(self, meta: ModelMeta) -> None:
        self._registry.set_active(meta.uid, False)
        if meta.adapter_version:
            self._arena.release(meta.adapter_version)

    async def _rotate(self) -> None:
        """Bring back who is wanted more than who is there, best first, as far as there are slots."""
        for _ in range(self._size - 1):
            known = [meta for meta in self._registry.get_all_models().values() if meta.kind == "checkpoint"]
            candidates = [meta for meta in known if self._is_candidate(meta) and self._can_play(meta)]
            absent = [meta for meta in self._ranked(candidates)[: self._size - 1] if not meta.active]
            if not absent or not await self._return(absent[0], self._next_version):
                return
            self._next_version += 1
            self._trim()

    def _can_play(self, meta: ModelMeta) -> bool:
        return meta.active or not meta.adapter_version or meta.uid in self._published_as

    async def _return(self, meta: ModelMeta, version: int) -> bool:
        """Whether it could be tried: there was a slot, or none was needed. `version`: a new one for these engines."""
        uid = meta.uid
        if not meta.adapter_version:
            self._registry.bring_back(uid, 0)
            return True
        if not self._publisher.reserve_spare_slot(version):
            return False
        try:
            await _in_thread(shutil.copytree, self._directory / uid, self._arena.path(version))
            await self._publisher.bring_back(version, self._published_as[uid])
        except (OSError, RequestError) as error:
            self._alarm(f"{uid} cannot come back as an opponent: {error}")
            self._publisher.forget(self._published_as.pop(uid))
            self._arena.unlink(version)
            await self._publisher.give_slot_back(version)
            return True
        self._arena.retain(version)
        self._registry.bring_back(uid, version)
        self.num_returned += 1
        log.info("%s is back as an opponent, as adapter %d", uid, version)
        return True

    async def _store(self, uid: str, version: int) -> None:
        partial = self._directory / f".{uid}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            await _in_thread(shutil.copytree, self._arena.path(version), partial)
            partial.rename(self._directory / uid)
            self._published_as[uid] = version
            self._publisher.keep(version)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            self._alarm(f"{uid} is not kept on disk and cannot come back as an opponent: {error}")
            self._publisher.forget(version)
        finally:
            self._arena.release(version)

    async def _clear_out(self) -> None:
        """Forget whoever is too old to come back; who is to be kept stays."""
        most = self._config.opponent_lag[1]
        for uid in [uid for uid in self._published_as if self._registry.lag(uid) > most]:
            iteration = self._registry.get(uid).iteration
            assert iteration is not None
            if not self._is_kept(iteration):
                self._publisher.forget(self._published_as.pop(uid))
                self._left.add(uid)
        await self._remove_unneeded()

    async def _remove_unneeded(self) -> None:
        for uid in self._left.difference(self._saving, *self._needed):
            self._left.discard(uid)
            await _in_thread(shutil.rmtree, self._directory / uid, True)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> None:
    """In a thread, and not over before the thread is: whoever cancels removes the directories next."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
