"""The current policy: how its versions are written, and how one becomes the policy that games ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from unstable_lite.errors import NoRoomError
from unstable_lite.orchestrator.checkpoint import Checkpoint
from unstable_lite.orchestrator.parts import RunParts
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.orchestrator.saving import CheckpointSaver
from unstable_lite.tracking.run_directory import replace_config
from unstable_lite.transport.messages import Updated
from unstable_lite.types import Batch

T = TypeVar("T")


class Policy:
    def __init__(self, parts: RunParts, progress: Progress, saver: CheckpointSaver) -> None:
        self._parts = parts
        self._progress = progress
        self._saver = saver

    async def start(self) -> None:
        """Check the base on every engine, and the adapter that training starts from, if there is one."""
        parts = self._parts
        canary = await parts.adapter_sync.check_base()
        if parts.resume_from is not None:
            canary = await self._resume(parts.resume_from)
        elif parts.plan.config.lora.initial_lora_path is not None:
            canary = await parts.adapter_sync.sync(1, await self._write_adapter(1))
            self.promote("initial", 1)
        parts.terminal.say(
            f"engine and learner agree about {parts.registry.current.uid}: mean |Δ log p| "
            f"{canary['canary/mismatch']:.5f} over {canary['canary/n']:.0f} tokens"
        )

    async def update(self, batch: Batch, version: int) -> Updated:
        """Let the learner learn from a batch and write the new adapter as `version`, unless it skips the batch."""
        return await self._write(version, partial(self._parts.workers.learner.update, batch, version))

    def promote(self, uid: str, version: int) -> None:
        """Make a synced version the current policy."""
        self._progress.version = version
        self._parts.pool.admit(uid, version, self._progress.updates)
        self._parts.collector.tell_new_checkpoint()

    async def _resume(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Restore the state of `checkpoint` in every process; return the canary's metrics."""
        parts = self._parts
        self._saver.restore(checkpoint)
        await parts.workers.learner.load(checkpoint.directory)
        canary = await parts.adapter_sync.sync(
            self._progress.version, await self._write_adapter(self._progress.version)
        )
        await parts.pool.resume()
        with checkpoint.understood():
            parts.health.load_state_dict(checkpoint.state["guard"])
        replace_config(parts.directory, parts.plan.config, self._progress.updates)  # only now: all of the state fits
        return canary

    async def _write_adapter(self, version: int) -> str:
        """Let the learner write its adapter as it is; return the digest."""
        return await self._write(version, partial(self._parts.workers.learner.write_adapter, version))

    async def _write(self, version: int, write: Callable[[Path, Path], Awaitable[T]]) -> T:
        """Let the learner write an adapter and its own state; again, on disk, if shared memory is full."""
        store = self._parts.store
        try:
            return await write(store.path(version), store.learner_state(version))
        except NoRoomError as error:
            if not store.fall_back():
                raise
            self._progress.alarm(f"{error}. From now on adapters go through {store.directory}")
            return await write(store.path(version), store.learner_state(version))
