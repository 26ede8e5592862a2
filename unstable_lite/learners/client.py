"""The learner as the orchestrator sees it: steps go in, metrics and a new adapter version come out."""

from __future__ import annotations

from pathlib import Path

from unstable_lite.config import LearnerConfig
from unstable_lite.transport.messages import Publish, SaveLearner, Score, Scored, Update, Updated
from unstable_lite.transport.sockets import Peer, Router
from unstable_lite.types import Batch, Generation, TrainItem

SAVE_TIMEOUT_S = 600.0


class LearnerClient:
    def __init__(self, router: Router, config: LearnerConfig) -> None:
        self.peer = Peer(router, "learner")
        self._config = config

    async def update(self, batch: Batch, version: int, path: Path) -> Updated:
        """One update on `batch`, steps or whole trajectories; unless it was skipped, `path` then holds `version`."""
        updated: Updated = await self.peer.ask(
            Update, self._config.update_timeout_s, items=train_items(batch), version=version, path=str(path)
        )
        return updated

    async def publish(self, version: int, path: Path) -> None:
        """Write the adapter that training starts from, as `version`."""
        await self.peer.ask(Publish, SAVE_TIMEOUT_S, version=version, path=str(path))

    async def score(self, generation: Generation) -> Scored:
        """The learner's own log-probabilities of the tokens that an engine sampled."""
        scored: Scored = await self.peer.ask(
            Score,
            self._config.update_timeout_s,
            prompt_ids=generation.prompt_ids,
            completion_ids=generation.completion_ids,
        )
        return scored

    async def save(self, directory: Path) -> None:
        """Write adapter and optimiser state into `directory`."""
        await self.peer.ask(SaveLearner, SAVE_TIMEOUT_S, path=str(directory))


def train_items(batch: Batch) -> tuple[TrainItem, ...]:
    """What the learner needs of each step; a step that comes alone is a trajectory of its own."""
    trajectories = [entry if isinstance(entry, list) else [entry] for entry in batch]
    return tuple(
        TrainItem(
            prompt_ids=step.generation.prompt_ids,
            completion_ids=step.generation.completion_ids,
            logprobs=step.generation.logprobs,
            reward=step.reward,
            adapter_version=step.generation.adapter_version,
            trajectory=index,
        )
        for index, steps in enumerate(trajectories)
        for step in steps
    )
