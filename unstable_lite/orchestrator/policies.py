"""A policy that learns in a run, with every part that is its own. Most runs have one, whose name is ""."""

from __future__ import annotations

from dataclasses import dataclass, field

from unstable_lite.adapters.frozen import IDS_OF_POLICY
from unstable_lite.config import Config
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.learner.client import LearnerClient
from unstable_lite.orchestrator.checkpoint_pool import CheckpointPool
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.types import Batch, uid_of


@dataclass(slots=True, kw_only=True)
class TrainedPolicy:
    name: str
    number: int
    """Place among the policies of the config, from which the ids of its adapters follow."""
    config: Config
    """Config of the run as if it had only this policy."""
    share: float
    """Share of the run's updates."""
    registry: ModelRegistry
    """Its view of the registry."""
    buffer: StepBuffer | EpisodeBuffer
    learner: LearnerClient = field(init=False)
    pool: CheckpointPool = field(init=False)
    updates: int = 0
    """Number of its updates."""

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

    def admit(self, version: int) -> None:
        """Let games use the adapter of an update, which every engine holds."""
        self.updates += 1
        self.pool.admit(uid_of(self.name, f"ckpt-{self.updates}"), version, self.updates)
