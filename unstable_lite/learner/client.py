"""Orchestrator side of the learner: sends steps, receives metrics and a new adapter version."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unstable_lite.adapters.store import AdapterStore
from unstable_lite.config.training import LearnerConfig
from unstable_lite.errors import NoRoomError, WorkerDied
from unstable_lite.learner import UPDATED
from unstable_lite.transport.messages import (
    AdapterDigest,
    LoadLearner,
    Message,
    Score,
    Scored,
    Update,
    Updated,
    WriteAdapter,
)
from unstable_lite.transport.rpc import Router, WorkerChannel
from unstable_lite.types import Batch, Generation, LearnerLogprobs, StepContext, TrainItem

SAVE_TIMEOUT_S = 600.0
DEADLINE_FACTOR = 2
"""Number of time-outs that a request outlives, because a hung learner is killed and its replacement asked again."""


class LearnerClient:
    """Client of the learner. After a death it repeats the request once a replacement has restored the state."""

    def __init__(self, router: Router, config: LearnerConfig) -> None:
        self.channel = WorkerChannel(router, "learner")
        self._config = config
        self._state: Path | None = None
        """State of the newest version."""
        self._being_saved: set[Path] = set()
        """States that stay until they are copied."""
        self._next_state: Path | None = None
        """State of the version in progress."""
        self._origin: Path | None = None
        """Checkpoint from which the learner resumed."""

    async def update(self, batch: Batch, version: int, store: AdapterStore) -> Updated:
        """Make an update on `batch`, steps or whole trajectories; unless it is skipped, `store` then holds `version`.

        The learner's state after it replaces the one before.
        """
        items, timeout_s = train_items(batch), self._config.update_timeout_s
        updated: Updated = await self._write(Update, timeout_s, version, store, items=items)
        if updated.skipped is None:
            self._go_on_from_next_state()
        return updated

    async def write_adapter(self, version: int, store: AdapterStore) -> str:
        """Write the adapter that training starts from, as `version`, and return its digest."""
        written: AdapterDigest = await self._write(WriteAdapter, SAVE_TIMEOUT_S, version, store)
        self._go_on_from_next_state()
        return written.digest

    async def score(self, generations: Sequence[Generation]) -> tuple[LearnerLogprobs, ...]:
        """Return the learner's log-probabilities of sampled tokens, in the same order."""
        items = tuple(
            _train_item(generation, reward=0.0, trajectory=index) for index, generation in enumerate(generations)
        )
        scored: Scored = await self._ask(Score, self._config.update_timeout_s, items=items)
        return scored.logprobs

    async def save(self, directory: Path) -> None:
        """Copy the newest version's adapter and optimiser state into `directory`, while the learner continues.

        An adapter must have been written. Raises OSError if they cannot be copied.
        """
        state = self._state
        assert state is not None
        self._being_saved.add(state)
        try:
            await asyncio.to_thread(_copy_state, state, directory)
        finally:
            self._being_saved.discard(state)
            if state != self._state:
                shutil.rmtree(state, ignore_errors=True)

    async def load(self, checkpoint: Path) -> None:
        """Load a state that `save` wrote."""
        self._origin = checkpoint
        await self._ask(LoadLearner, SAVE_TIMEOUT_S, path=str(checkpoint))

    async def restore(self) -> None:
        """Give a replacement the state of the learner that died, and mark it ready."""
        candidates = [
            path for path in (self._next_state, self._state, self._origin) if path is not None and path.is_dir()
        ]
        if candidates:
            await self.channel.ask(LoadLearner, SAVE_TIMEOUT_S, path=str(candidates[0]))
        self.channel.mark_ready()

    async def _write(
        self, message_type: Callable[..., Message], timeout_s: float, version: int, store: AdapterStore, **fields: Any
    ) -> Any:
        """Let the learner write an adapter and its own state; again, on disk, if shared memory is full."""
        while True:
            path, self._next_state = str(store.path(version)), store.learner_state(version)
            fields |= {"version": version, "path": path, "state_path": str(self._next_state)}
            try:
                return await self._ask(message_type, timeout_s, **fields)
            except NoRoomError as error:
                if not store.fall_back(str(error)):
                    raise

    async def _ask(self, message_type: Callable[..., Message], timeout_s: float, **fields: Any) -> Any:
        while True:
            await self.channel.until_ready()
            with contextlib.suppress(WorkerDied):
                return await self.channel.ask(message_type, DEADLINE_FACTOR * timeout_s, **fields)

    def _go_on_from_next_state(self) -> None:
        if self._state is not None and self._state not in self._being_saved:
            shutil.rmtree(self._state, ignore_errors=True)
        self._state = self._next_state


def _copy_state(state: Path, directory: Path) -> None:
    for path in sorted(state.rglob("*")):
        copy = directory / path.relative_to(state)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        elif path.name != UPDATED:
            shutil.copyfile(path, copy)


def train_items(batch: Batch) -> tuple[TrainItem, ...]:
    """Return the learner's view of each step; a single step is its own trajectory."""
    trajectories = [entry if isinstance(entry, list) else [entry] for entry in batch]
    return tuple(
        _train_item(step.generation, step.reward, trajectory=index, context=step.context)
        for index, steps in enumerate(trajectories)
        for step in steps
    )


def _train_item(
    generation: Generation, reward: float, trajectory: int, context: StepContext | None = None
) -> TrainItem:
    return TrainItem(
        prompt_ids=generation.prompt_ids,
        completion_ids=generation.completion_ids,
        logprobs=generation.logprobs,
        reward=reward,
        adapter_version=generation.adapter_version,
        trajectory=trajectory,
        context=context,
    )
