"""The current policy: the one that a run starts with, and how a version becomes the one that games ask for."""

from __future__ import annotations

from unstable_lite.orchestrator.checkpoint import Checkpoint
from unstable_lite.orchestrator.parts import RunParts
from unstable_lite.orchestrator.progress import Progress
from unstable_lite.orchestrator.saving import CheckpointSaver
from unstable_lite.tracking.run_directory import replace_config


class Policy:
    def __init__(self, parts: RunParts, progress: Progress, saver: CheckpointSaver) -> None:
        self._parts = parts
        self._progress = progress
        self._saver = saver

    async def start(self) -> None:
        """Check the base on every engine, and the adapter that training starts from, if there is one."""
        parts = self._parts
        canary = await parts.adapter_sync.canaries.check_base()
        if parts.resume_from is not None:
            canary = await self._resume(parts.resume_from)
        elif parts.plan.config.lora.initial_lora_path is not None:
            canary = await self._write_and_sync(1)
            self.promote("initial", 1)
        parts.terminal.say(
            f"engine and learner agree about {parts.registry.current.uid}: mean |Δ log p| "
            f"{canary['canary/mismatch']:.5f} over {canary['canary/n']:.0f} tokens"
        )

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
        canary = await self._write_and_sync(self._progress.version)
        await parts.pool.resume()
        with checkpoint.understood():
            parts.health.load_state_dict(checkpoint.state["guard"])
        replace_config(parts.directory, parts.plan.config, self._progress.updates)  # only now: all of the state fits
        return canary

    async def _write_and_sync(self, version: int) -> dict[str, float]:
        """Let the learner write its adapter as it is, and load it on every engine; return the canary's metrics."""
        digest = await self._parts.workers.learner.write_adapter(version, self._parts.store)
        return await self._parts.adapter_sync.sync(version, digest)
