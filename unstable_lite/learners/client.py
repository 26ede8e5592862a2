"""The learner as the orchestrator sees it: steps go in, metrics and a new adapter version come out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unstable_lite.config import LearnerConfig
from unstable_lite.transport.messages import Publish, SaveLearner, Score, Scored, Update, Updated
from unstable_lite.transport.sockets import Peer, Router
from unstable_lite.types import Generation, Step, TrainItem

SAVE_TIMEOUT_S = 600.0


class LearnerClient:
    def __init__(self, router: Router, config: LearnerConfig) -> None:
        self.peer = Peer(router, "learner")
        self._config = config

    async def update(self, batch: Sequence[Step], version: int, path: Path) -> Updated:
        """One optimiser step on `batch`; unless it was skipped, `path` then holds adapter `version`."""
        items = tuple(
            TrainItem(
                prompt_ids=step.generation.prompt_ids,
                completion_ids=step.generation.completion_ids,
                logprobs=step.generation.logprobs,
                advantage=step.reward,
                adapter_version=step.generation.adapter_version,
            )
            for step in batch
        )
        updated: Updated = await self.peer.ask(
            Update, self._config.update_timeout_s, items=items, version=version, path=str(path)
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
