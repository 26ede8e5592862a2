"""Orchestrator side of the learner: sends steps, receives metrics and a new adapter version."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unstable_lite.adapters.store import AdapterStore
from unstable_lite.errors import NoRoomError, WorkerDied
from unstable_lite.learner import UPDATE_TIMEOUT_S, UPDATED
from unstable_lite.reward_transformations.transforms import plain_weights
from unstable_lite.transport.messages import (
    AdapterDigest,
    AnswersScored,
    LoadLearner,
    Message,
    SaveLearner,
    Score,
    ScoreAnswers,
    Scored,
    Update,
    Updated,
    WriteAdapter,
)
from unstable_lite.transport.rpc import WorkerChannel
from unstable_lite.types import Batch, Generation, LearnerLogprobs, Logprobs, TrainItem

SAVE_TIMEOUT_S = 600.0
DEADLINE_FACTOR = 2
"""Number of time-outs that a request outlives, because a hung learner is killed and its replacement asked again."""


class LearnerClient:
    """Client of one policy's learner, whose process has those of the other policies too.

    After the process dies it repeats the request once a replacement has restored the state.
    """

    def __init__(self, channel: WorkerChannel, policy: str = "") -> None:
        self.channel = channel
        self._policy = policy
        self._state: Path | None = None
        """Newest saved state."""
        self._being_saved: set[Path] = set()
        """States that stay until they are copied."""
        self._unsaved: Callable[[], Awaitable[Any]] | None = None
        """Request whose result is not saved yet, which a replacement therefore repeats."""
        self._origin: Path | None = None
        """Checkpoint from which the learner resumed."""

    async def update(self, batch: Batch, version: int, store: AdapterStore, saves_at_once: bool = False) -> Updated:
        """Make an update on `batch`, steps or whole trajectories; unless it is skipped, `store` then holds `version`.

        Unless it `saves_at_once`, `save_state` must follow, and may run while engines load the adapter. Until then a
        learner that dies repeats the update, for which engines that sleep on its device must not have woken.
        """
        if self._state is None:  # an update that runs out of memory starts again from it
            await self.save_state(version - 1, store)
        timeout_s, place = UPDATE_TIMEOUT_S, partial(store.path, version)
        fields: dict[str, Any] = {"items": train_items(batch), "version": version}
        updated: Updated = await self._write(Update, timeout_s, place, store, **fields)
        if updated.skipped is None:
            fields |= {"path": str(place()), "is_published": True}
            self._unsaved = partial(self._ask_once, Update, DEADLINE_FACTOR * timeout_s, **fields)
            if saves_at_once:
                await self.save_state(version, store)
        return updated

    async def write_adapter(
        self, version: int, store: AdapterStore, seed: int | None = None, adapter: Path | None = None
    ) -> str:
        """Write the adapter that training starts from, as `version`, and return its digest.

        With a `seed`, a new training begins before, from a fresh adapter or from `adapter`, a PEFT directory that must
        stay until this returns. Raises RequestError if that does not fit the learner's base or section `lora`.
        """
        place = partial(store.path, version)
        fields: dict[str, Any] = {"version": version, "seed": seed, "adapter": adapter and str(adapter)}
        written: AdapterDigest = await self._write(WriteAdapter, SAVE_TIMEOUT_S, place, store, **fields)
        self._unsaved = partial(self._ask_once, WriteAdapter, SAVE_TIMEOUT_S, path=str(place()), **fields)
        await self.save_state(version, store)
        return written.digest

    async def save_state(self, version: int, store: AdapterStore) -> None:
        """Let the learner save its state, which is at `version`, in place of the one before."""
        place = partial(store.learner_state, version)
        await self._write(SaveLearner, SAVE_TIMEOUT_S, place, store)
        before, self._state, self._unsaved = self._state, place(), None
        if before is not None and before not in self._being_saved:
            shutil.rmtree(before, ignore_errors=True)

    async def score(
        self, generations: Sequence[Generation], adapter: Path | None = None
    ) -> tuple[LearnerLogprobs, ...]:
        """Return the learner's log-probabilities of sampled tokens, in the same order.

        adapter: PEFT directory of the adapter to compute with; None: the one that is trained. Raises RequestError if it
        does not fit the learner's base or rank.
        """
        items = tuple(_train_item(one, index, reward=0.0) for index, one in enumerate(generations))
        scored: Scored = await self._ask(Score, UPDATE_TIMEOUT_S, items=items, adapter=adapter and str(adapter))
        return scored.logprobs

    async def score_answers(
        self, questions: Sequence[tuple[str, tuple[str, ...]]], stop: tuple[str, ...]
    ) -> tuple[Logprobs, ...]:
        """Return the log-probability of each answer to each prompt under the newest adapter."""
        asked = {"questions": tuple(questions), "stop": stop}
        scored: AnswersScored = await self._ask(ScoreAnswers, UPDATE_TIMEOUT_S, **asked)
        return scored.logprobs

    async def save(self, directory: Path) -> None:
        """Copy the newest saved adapter and optimiser state into `directory`, while the learner continues.

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
        """Load the policy's saved state into the process that replaces a dead one."""
        if (state := self._state or self._origin) is not None:
            await self._ask_once(LoadLearner, SAVE_TIMEOUT_S, path=str(state))
        if self._unsaved is not None:
            await self._unsaved()

    async def _write(
        self,
        message_type: Callable[..., Message],
        timeout_s: float,
        place: Callable[[], Path],
        store: AdapterStore,
        **fields: Any,
    ) -> Any:
        """Let the learner write to `place()`; again, on disk, if shared memory is full."""
        while True:
            try:
                return await self._ask(message_type, timeout_s, path=str(place()), **fields)
            except NoRoomError as error:
                if not store.fall_back(str(error)):
                    raise

    async def _ask(self, message_type: Callable[..., Message], timeout_s: float, **fields: Any) -> Any:
        while True:
            await self.channel.until_ready()
            with contextlib.suppress(WorkerDied):
                return await self._ask_once(message_type, DEADLINE_FACTOR * timeout_s, **fields)

    async def _ask_once(self, message_type: Callable[..., Message], timeout_s: float, **fields: Any) -> Any:
        return await self.channel.ask(message_type, timeout_s, policy=self._policy, **fields)


async def restore_all(learners: Sequence[LearnerClient]) -> None:
    """Give the replacement of a process that died the states of all policies, and mark it ready."""
    for learner in learners:
        await learner.restore()
    learners[0].channel.mark_ready()


def _copy_state(state: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for path in sorted(state.rglob("*")):
        copy = directory / path.relative_to(state)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        elif path.name != UPDATED:
            shutil.copyfile(path, copy)


def train_items(batch: Batch) -> tuple[TrainItem, ...]:
    """Return the learner's view of each step; a single step is its own trajectory."""
    trajectories = [entry if isinstance(entry, list) else [entry] for entry in batch]
    items = []
    for index, steps in enumerate(trajectories):
        for step in steps:
            weight, token_weights = plain_weights(step)
            own = {"reward": step.reward, "context": step.context, "weight": weight, "token_weights": token_weights}
            items.append(_train_item(step.generation, index, **own))
    return tuple(items)


def _train_item(generation: Generation, trajectory: int, **of_step: Any) -> TrainItem:
    return TrainItem(
        prompt_ids=generation.prompt_ids,
        completion_ids=generation.completion_ids,
        logprobs=generation.logprobs,
        adapter_version=generation.adapter_version,
        trajectory=trajectory,
        forced=generation.forced,
        **of_step,
    )
