"""Save the state of a run as checkpoints, and restore it from one."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from unstable_lite.errors import UnstableError
from unstable_lite.orchestrator.checkpoint import Checkpoint, save_checkpoint
from unstable_lite.orchestrator.custom_parts import lasting_state
from unstable_lite.orchestrator.evaluations import Evaluations
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.tracking.run_directory import replace_config


class CheckpointSaver:
    def __init__(self, parts: RunParts, progress: Progress, evaluations: Evaluations) -> None:
        self.newest: Path | None = None
        """The newest checkpoint."""
        self.saved_update = 0
        """Update of the newest checkpoint."""
        self.in_background: asyncio.Task[None] | None = None
        """Writes a checkpoint beside the updates; the last of such tasks."""
        self._parts = parts
        self._progress = progress
        self._evaluations = evaluations
        self._is_due = False
        self._has_failed = False
        """Whether the last attempt to write a checkpoint failed."""

    async def resume(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Restore the state of `checkpoint` in every process; return the canary's metrics."""
        parts = self._parts
        self._restore(checkpoint)
        await parts.workers.learner.load(checkpoint.directory)
        canary = await sync_unchanged(parts, self._progress.version)
        await parts.pool.resume()
        replace_config(parts.directory, parts.plan.config, self._progress.updates)  # only now: all of the state fits
        return canary

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Load the orchestrator's state. Games that were in flight when it was saved are lost."""
        parts, progress, state = self._parts, self._progress, checkpoint.state
        with checkpoint.understood():
            progress.updates, progress.version = state["updates"], state["version"]
            progress.skipped = state["skipped_updates"]
            parts.registry.load_state_dict(state["registry"])
            for left_out in parts.scheduler.load_state_dict(state["scheduler"]):
                parts.terminal.say(left_out)
            parts.buffer.load_state_dict(state["buffer"])
            parts.adapter_sync.load_state_dict(state["adapter_sync"])
            parts.collector.load_state_dict(state["collector"])
            parts.collector.seats.load_state_dict(state["seats"])
            parts.pool.load_state_dict(state["pool"])
            parts.health.load_state_dict(state["health"])
        self.newest, self.saved_update = checkpoint.directory, progress.updates
        parts.buffer.refill(checkpoint.waiting)

    def mark_due(self) -> None:
        """Decide after an update whether a checkpoint of it is to be written; a failed one stays due."""
        run, updates = self._parts.plan.config.run, self._progress.updates
        self._is_due = (self._is_due or updates % run.checkpoint_every == 0) and updates < run.learning_steps

    async def save_if_due(self) -> None:
        """Write a checkpoint if one is due, and wait for it."""
        if self._is_due:
            await self._save()

    def save_in_background_if_due(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to write a checkpoint if one is due and none is being written."""
        if self._is_due and (self.in_background is None or self.in_background.done()):
            self.in_background = tasks.create_task(self._write(self._progress.updates, self._checkpoint()))

    async def save_newest(self, is_last: bool = False) -> tuple[Path | None, int]:
        """Save the last update unless it is saved; return the newest checkpoint, if there is one, and its update."""
        if self.in_background is not None:
            await self.in_background
        if self._progress.updates != self.saved_update:
            await self._save(is_last)
        return self.newest, self.saved_update

    async def _save(self, is_last: bool = False) -> None:
        await self._parts.pool.settled()
        await self._write(self._progress.updates, self._checkpoint(), is_last)

    def _checkpoint(self) -> Coroutine[Any, Any, Path]:
        """Take everything that has to survive as it is at this moment; awaiting the result writes it."""
        parts, progress = self._parts, self._progress
        state = {
            "updates": progress.updates,
            "version": progress.version,
            "skipped_updates": progress.skipped,
            "evaluated": self._evaluations.done(),
            "registry": lasting_state("registry", parts.registry),
            "scheduler": lasting_state("scheduler", parts.scheduler),
            "buffer": lasting_state("buffer", parts.buffer),
            "adapter_sync": parts.adapter_sync.state_dict(),
            "pool": parts.pool.state_dict(),
            "tracker": lasting_state("tracker", parts.tracker),
            "collector": lasting_state("collector", parts.collector),
            "seats": parts.collector.seats.state_dict(),
            "health": parts.health.state_dict(),
        }
        parts.pool.tell_saving()
        self._is_due = False
        contents, learner = parts.buffer.contents(), parts.workers.learner
        return save_checkpoint(parts.directory / "checkpoints", progress.updates, state, contents, learner.save)

    async def _write(self, update: int, checkpoint: Coroutine[Any, Any, Path], is_last: bool = False) -> None:
        """Write the checkpoint of `update`. If that fails, the previous one stays and the next update tries again.

        Raises UnstableError if there is no next update.
        """
        try:
            path = await checkpoint
        except UnstableError as error:
            newest = f"the newest is {self.newest.name}" if self.newest else "there is none yet"
            if is_last:
                raise UnstableError(
                    f"the last checkpoint, of update {update}, could not be written, and {newest}: {error}\n"
                    f"(free some space, then: run --resume {shlex.quote(str(self._parts.directory))})"
                ) from error
            if not self._has_failed:
                self._parts.alarm(
                    f"a checkpoint could not be written, and {newest}; each update will try again until one can: "
                    f"{error}"
                )
            self._has_failed = self._is_due = True
            return
        if self._has_failed:
            self._parts.alarm(f"checkpoints are written again: {path.name}")
        self._has_failed = False
        self.newest, self.saved_update = path, update
        await self._parts.pool.tell_saved()


async def sync_unchanged(parts: RunParts, version: int) -> dict[str, float]:
    """Sync the learner's adapter, as it is, to every engine as `version`; return the canary's metrics."""
    digest = await parts.workers.learner.write_adapter(version, parts.store)
    return await parts.adapter_sync.sync(version, digest)
