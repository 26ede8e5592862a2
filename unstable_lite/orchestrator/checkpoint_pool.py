"""A policy that learns, and its pool: a bounded set of checkpoints that may be opponents beside the current one.

Owns the pool's pins in the adapter table, the copies on disk, and the ids under which adapters return. The samplers
choose the opponents. A checkpoint leaves for new games at once, and its slot is free when its last game is over; one
returns in the background, in a slot that no new adapter needs, so that training waits for neither.

Frozen players have copies in the run directory, too. A copy is made when the run first meets the player, and used ever
after: a resumed run plays the same weights, although the other run made further checkpoints or was deleted.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import COPIES, keep_copy, members, slug, source_of
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import IDS_OF_POLICY, AdapterTable, Origin
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, RequestError, UnstableError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.ratings import ModelMeta
from unstable_lite.learner.client import LearnerClient
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.planning.defaults import adapter_slots_needed
from unstable_lite.planning.plan import Plan
from unstable_lite.planning.validation import frozen_problems
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.types import Batch, policy_of

log = logging.getLogger(__name__)

FIRST_RETURNED_VERSION = 1 << 30
"""First id of adapters that return. Those of updates count from 1, so the two never meet, and both fit the 32 bits that
engines have for them."""


class CheckpointPool:
    def __init__(
        self,
        policy: TrainedPolicy,
        size: int,
        table: AdapterTable,
        store: AdapterStore,
        adapter_sync: AdapterSync,
        directory: Path,
        alarm: Callable[[str], None],
    ) -> None:
        """Create a policy's pool, of at most `size` checkpoints with the current one; `directory`: of copies by uid."""
        self.num_returned = 0
        """Number of checkpoints that returned."""
        self._config = policy.config.league
        self._size = size
        self._registry = policy.registry
        self._table = table
        self._store = store
        self._adapter_sync = adapter_sync
        self._directory = directory
        self._alarm = alarm
        self._left: set[str] = set()
        """Uids whose copies are too old to return."""
        self._needed: deque[set[str]] = deque(maxlen=2)
        """Uids that had a copy at each of the last two checkpoints, from which a run may resume."""
        self._saving: set[str] = set()
        """Uids that had a copy when the checkpoint began that is being written."""
        self._to_store: deque[tuple[str, int]] = deque()
        """Uid and version of checkpoints that have a pin and need a copy."""
        self._next_version = FIRST_RETURNED_VERSION + policy.number * IDS_OF_POLICY
        self._policy = policy.name
        self._kept: Mapping[str, None] = getattr(policy.registry, "population", {})
        """Uids of the population."""
        self._admitted: asyncio.Queue[None] = asyncio.Queue()
        """An entry for each new policy whose work is not done."""

    def admit(self, uid: str, version: int, update: int, inherit: bool = True) -> None:
        """Make a checked version the current policy, and let the surplus checkpoint leave.

        inherit: whether its rating begins with that of the one before.
        """
        self._table.offer(version)
        self._registry.add_policy(uid, adapter_version=version, iteration=update, inherit=inherit)
        self._store_later(uid, version)
        self._trim()
        self._admitted.put_nowait(None)

    def evict_if_needed(self) -> None:
        """Let an opponent leave that no game uses, if the next adapter would have to wait for a slot."""
        if self._table.has_free_slot or self._table.retiring():
            return
        for meta in reversed(self._ranked(self._others())):
            if meta.adapter_version and self._table.adapters[meta.adapter_version].num_users == 1:
                self._leave(meta)
                return

    async def run(self) -> None:
        """Copy to disk and reload, until cancelled. Raises AdapterError if an engine computes a checkpoint wrongly."""
        while True:
            await self._admitted.get()
            while self._to_store:
                await self._copy_to_disk(*self._to_store.popleft())
            await self._adapter_sync.retired()
            await self._rotate()
            for uid, origin in self._stored().items():  # give up copies that are too old to return
                if self._registry.lag(uid) > self._config.opponent_lag[1] and not self._is_kept(uid):
                    self._table.discard(origin)
                    self._left.add(uid)
            await self._remove_unneeded()
            self._admitted.task_done()

    def state_dict(self) -> dict[str, Any]:
        return {"next_version": self._next_version, "num_returned": self.num_returned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_version = state["next_version"]
        self.num_returned = state["num_returned"]

    async def resume(self) -> None:
        """Reload the active checkpoints, after the states of registry, table and pool were loaded.

        The current policy is on the engines already. Another active checkpoint returns under the id that it had, if it
        has a copy on disk.
        """
        num_returned, stored = self.num_returned, self._stored()
        self._needed.append(set(stored))
        for path in (self._directory / self._policy).glob("*"):
            if path not in [self._directory / uid for uid in stored]:
                shutil.rmtree(path)
        current = self._registry.current
        if current.adapter_version:
            self._table.offer(current.adapter_version)
            if current.uid not in stored:
                self._store_later(current.uid, current.adapter_version)
        for meta in self._others():
            self._registry.set_active(meta.uid, False)
            if not self._can_play(meta):
                self._alarm(f"{meta.uid} was an opponent, and its adapter was not stored: it does not return")
            elif not await self._return(meta, meta.adapter_version or 0):
                self._alarm(f"{meta.uid} was an opponent, and the engines have no slot left for it: it waits for one")
        self.num_returned = num_returned

    def tell_saving(self) -> None:
        """Note that a checkpoint begins, which will need the copies that are on disk now."""
        self._saving = set(self._stored())

    async def tell_saved(self) -> None:
        """Note that it was written, and remove copies that only older ones than the last two needed."""
        self._needed.append(self._saving)
        await self._remove_unneeded()

    async def settled(self) -> None:
        """Wait until the work of the last `admit` is done, so that every copy is on disk."""
        await self._admitted.join()

    def _stored(self) -> dict[str, Origin]:
        """Return the origins of the policy's adapters that can return, by uid."""
        return {uid: origin for uid, origin in self._table.stored().items() if policy_of(uid) == self._policy}

    def _others(self) -> list[ModelMeta]:
        """Return the active checkpoints except the current policy."""
        current = self._registry.get_current_ckpt()
        return [meta for meta in self._registry.checkpoints() if meta.uid != current]

    def _is_kept(self, uid: str) -> bool:
        update, every = self._registry.get(uid).iteration or 0, self._config.keep_every
        is_of_config = update in self._config.keep_checkpoints or (every is not None and update % every == 0)
        return is_of_config or uid in self._kept

    def _is_candidate(self, meta: ModelMeta) -> bool:
        if meta.uid in self._kept:
            return True
        least, most = self._config.opponent_lag
        lag = self._registry.lag(meta.uid)
        return lag >= max(least, 1) and (lag <= most or self._is_kept(meta.uid))

    def _ranked(self, metas: list[ModelMeta]) -> list[ModelMeta]:
        """Return the most wanted first, those of the population before all others; among equals the newest."""
        registry, current = self._registry, self._registry.get_current_ckpt()
        mu = registry.get(current).rating.mu
        metas = sorted(metas, key=lambda meta: -(meta.iteration or 0))
        match self._config.active_checkpoints_by:
            case "match-quality":
                metas.sort(key=lambda meta: -registry.match_quality(current, meta.uid))
            case "nearest-rating":
                metas.sort(key=lambda meta: abs(meta.rating.mu - mu))
        return sorted(metas, key=lambda meta: meta.uid not in self._kept)

    def _trim(self) -> None:
        """Let surplus checkpoints leave. If none is a candidate yet, the oldest stays, because it is not the policy."""
        others = self._others()
        staying = self._ranked([meta for meta in others if self._is_candidate(meta)]) or others[:1]
        for meta in others:
            if meta not in staying[: self._size - 1]:
                self._leave(meta)

    def _leave(self, meta: ModelMeta) -> None:
        self._registry.set_active(meta.uid, False)
        if meta.adapter_version:
            self._table.unpin(meta.adapter_version)

    async def _rotate(self) -> None:
        """Reload checkpoints that are wanted more than the active ones, best first, as far as there are slots."""
        for _ in range(self._size - 1):
            models = self._registry.get_all_models().values()
            known = [meta for meta in models if meta.kind == "checkpoint" and policy_of(meta.uid) == self._policy]
            candidates = [meta for meta in known if self._is_candidate(meta) and self._can_play(meta)]
            absent = [meta for meta in self._ranked(candidates)[: self._size - 1] if not meta.active]
            if not absent or not await self._return(absent[0], self._next_version):
                return
            self._next_version += 1
            self._trim()

    def _can_play(self, meta: ModelMeta) -> bool:
        return meta.active or not meta.adapter_version or meta.uid in self._stored()

    async def _return(self, meta: ModelMeta, id: int) -> bool:
        """Reload a checkpoint as `id`, which is new to these engines; return False if it has to wait for a slot."""
        uid, table = meta.uid, self._table
        if not meta.adapter_version:
            self._registry.bring_back(uid, 0)
            return True
        if not table.has_spare_slot:
            return False
        origin = self._stored()[uid]
        table.reserve(id, origin)
        try:
            await _in_thread(shutil.copytree, self._directory / uid, self._store.path(id))
            await self._adapter_sync.reload(id)
        except (OSError, RequestError) as error:
            self._alarm(f"{uid} cannot return as an opponent: {error}")
            table.discard(origin)
            self._store.unlink(id)
            table.remove(id)
            return True
        table.offer(id)
        self._registry.bring_back(uid, id)
        self.num_returned += 1
        log.info("%s is back as an opponent, as adapter %d", uid, id)
        return True

    def _store_later(self, uid: str, version: int) -> None:
        if self._size > 1 or self._is_kept(uid):
            self._table.pin(version)
            self._to_store.append((uid, version))

    async def _copy_to_disk(self, uid: str, version: int) -> None:
        place = self._directory / uid
        partial = place.with_name(f".{place.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            await _in_thread(shutil.copytree, self._store.path(version), partial)
            partial.rename(place)
            self._table.store(self._table.origin(version), uid)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            self._alarm(f"{uid} is not kept on disk and cannot return as an opponent: {error}")
        finally:
            self._table.unpin(version)

    async def _remove_unneeded(self) -> None:
        for uid in self._left.difference(self._saving, *self._needed):
            self._left.discard(uid)
            await _in_thread(shutil.rmtree, self._directory / uid, True)


@dataclass(slots=True, kw_only=True)
class TrainedPolicy:
    """A policy that learns in a run, with every part that is its own. Most runs have one, whose name is ""."""

    name: str
    number: int
    """Place among the policies of the config, from which the ids of its adapters follow."""
    config: Config
    """Config of the run as if it had only this policy."""
    registry: ModelRegistry
    """View of the registry."""
    buffer: StepBuffer | EpisodeBuffer
    learner: LearnerClient = field(init=False)
    pool: CheckpointPool = field(init=False)
    updates: int = 0
    """Number of updates so far."""
    skipped: int = 0
    """Number of batches that made no update."""
    skipped_in_a_row: int = 0
    """Number of them since the last update, or since the process began."""
    lineage: int = 1
    """Number of the present lineage; a restart begins the next one."""
    began: int = 0
    """Number of updates before this lineage."""
    results: list[tuple[int, float]] = field(default_factory=list)
    """Deal and mean points of the lineage in each of its newest games that count for a restart."""

    @property
    def version(self) -> int:
        """Id of its newest adapter; 0 is the base."""
        return self.registry.current.adapter_version or 0

    @property
    def next_version(self) -> int:
        return max(self.version, self.number * IDS_OF_POLICY) + 1

    @property
    def has_batch(self) -> bool:
        """Return whether a batch can be drawn now."""
        return self.buffer.has_batch(self.config.learner.batch_size, self.version)

    async def next_batch(self) -> Batch:
        """Wait for the next batch; if cancelled, take none."""
        return await self.buffer.get_batch(self.config.learner.batch_size, self.version)

    def state(self) -> dict[str, Any]:
        """Return the policy's own part of a checkpoint, beside those of its parts."""
        numbers = {name: getattr(self, name) for name in ("updates", "skipped", "lineage", "began")}
        return numbers | {"results": [*self.results], "current": self.registry.get_current_ckpt()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.updates, self.skipped = state["updates"], state.get("skipped", 0)
        self.lineage, self.began = state.get("lineage", 1), state.get("began", 0)
        self.results.extend((deal, points) for deal, points in state.get("results", ()))

    def make_room(self, policies: Iterable[TrainedPolicy]) -> None:
        """Let an opponent leave, one of its own if possible, if its next adapter would have to wait for a slot."""
        for policy in (self, *policies):
            policy.pool.evict_if_needed()

    def admit(self, version: int) -> None:
        """Let games use the adapter of an update, which every engine holds."""
        self.updates += 1
        self.pool.admit(f"{self.name}/ckpt-{self.updates}".removeprefix("/"), version, self.updates)


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> None:
    """Run `function` in a thread, and end after the thread even if cancelled: the directories are removed next."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def keep_frozen(
    plan: Plan, registry: ModelRegistry, directory: Path, say: Callable[[str], None]
) -> tuple[tuple[int, str, Path], ...]:
    """Copy the adapter of each frozen player in the registry into the run directory, unless there is a copy.

    Returns the id of each adapter, the player's name and the copy. The adapters are those of `plan.copies`, if the
    config is that of another run. `say` gets a line for each name.
    Raises ConfigError for players that do not fit the run or its adapter slots, as those added by hand may do,
    AdapterError, NoRoomError or UnstableError if a copy cannot be written.
    """
    config, copies, metas = plan.config, directory / COPIES, registry.frozen_adapters()
    names = {
        (meta.adapter_version or 0) + number: name
        for meta in metas
        for number, name in enumerate(members(meta.name or ""))
    }
    problems = [*frozen_problems(dict.fromkeys(names.values()), config, copies, plan.copies)]
    if (needed := adapter_slots_needed(config, len(names))) > config.engine.max_loras:
        problems.append(
            f"engine.max_loras = {config.engine.max_loras}: with {len(names)} frozen players this league needs at "
            f"least {needed} adapter slots; raise it"
        )
    if problems:
        raise ConfigError(*problems)
    try:
        kept = {id: keep_copy(name, copies, plan.copies).path for id, name in names.items()}
    except OSError as error:
        raise UnstableError(f"cannot make {copies} for the copies of frozen players: {error.strerror}") from error
    for name in dict.fromkeys(names.values()):
        say(f"frozen player {name} is {source_of(name, copies)}, as copied into {COPIES}/{slug(name)}")
    return tuple((id, names[id], path) for id, path in kept.items())
