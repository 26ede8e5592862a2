"""Hold played steps until the learner takes them: bounded by back-pressure, bounded in age.

Owns the waiting steps and the order in which reward transforms are applied to them. Knows nothing of engines,
learners or trackers. No generated step is discarded to make room; instead, no new game starts (`wait_for_room`) while
the waiting steps and those expected from games in flight are as many as can be trained on in time (`back_pressure`).
Steps leave in three ways only, each counted: taken into a batch, the oldest first; dropped as too stale to learn from;
or drained. So at all times `added == taken + dropped_stale + drained + size()`.

step_buffer.py and episode_buffer.py define the contents of a batch.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.compose import Stateful
from unstable_lite.reward_transformations.final import ComposeFinalRewardTransforms, FinalRewardTransform
from unstable_lite.reward_transformations.sampling import SamplingRewardTransform
from unstable_lite.reward_transformations.step import ComposeStepRewardTransforms, StepRewardTransform
from unstable_lite.reward_transformations.weights import plain_weights, weight_problem
from unstable_lite.rng import restore, state_of
from unstable_lite.rollout.back_pressure import InFlight
from unstable_lite.rollout.step_counts import CountsByLength, length_class
from unstable_lite.types import GameRecord, GameSpec, PlayerTrajectory, Step

COUNTERS = ("added", "taken", "dropped_stale", "filtered")
"""Totals since the start of the run that a checkpoint keeps."""


@dataclass(eq=False, repr=False)
class Buffer:
    """Chunks of steps that are added and taken whole: single steps in one buffer, episodes in the other."""

    max_buffer_size: int
    final_reward_transformation: FinalRewardTransform | None = None
    step_reward_transformation: StepRewardTransform | None = None
    sampling_reward_transformation: SamplingRewardTransform | None = None
    max_staleness: int | None = None
    rng: random.Random | int = 0
    """Random stream, or the seed of one."""
    batch_delay: float = 1.0
    """A batch of n is drawn once `batch_delay * n` steps wait."""
    filter_opponent_invalid: bool = False
    """Whether to leave out the trajectories of players whose game ended by another player's invalid move."""

    def __post_init__(self) -> None:
        if self.max_buffer_size < 1:
            raise ConfigError(f"buffer_size must be at least 1, got {self.max_buffer_size}")
        self.added = self.taken = self.dropped_stale = self.drained = 0
        self.filtered = 0
        """Number of trajectories left out because of `filter_opponent_invalid`."""
        self.counts = CountsByLength()
        self.left_lately = 0
        """Number of steps that the last batch took or that were dropped since the batch before it."""
        self.dropped_lately = 0
        """Number of these steps that were dropped."""
        self.in_flight: InFlight | None = None
        """Games that will bring more steps; None: they are not counted."""
        self._final = ComposeFinalRewardTransforms.of(self.final_reward_transformation)
        self._step = ComposeStepRewardTransforms.of(self.step_reward_transformation)
        self._rng = self.rng if isinstance(self.rng, random.Random) else random.Random(self.rng)
        self._chunks: list[list[Step]] = []
        self._size = 0
        self.steps_in_groups = 0
        """Number of steps that wait for the rest of their group, if games are played in groups."""
        self._dropped_at_last_batch = 0
        self._arrival = asyncio.Event()
        """Set when steps arrive. A waiter checks for a batch, clears the event, and checks again once it is set."""
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()

    def size(self) -> int:
        """Return the number of waiting steps."""
        return self._size

    @property
    def is_full(self) -> bool:
        """Whether no new game should start. Steps of games in flight are kept in any case."""
        held = self.steps_held()
        return held >= self.max_buffer_size or (self.in_flight is not None and not self.in_flight.has_room(held))

    def steps_held(self) -> int:
        """Return the number of steps that wait for the learner or for the rest of their group."""
        return self._size + self.steps_in_groups

    def begin_game(self, spec: GameSpec) -> None:
        """Count the steps of a game that starts now as in flight until `add_game` gets its record."""
        if self.in_flight is not None:
            self.in_flight.begin(spec)

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        raise NotImplementedError

    def add_game(self, record: GameRecord) -> None:
        """Add the steps to learn from a finished game; a void game has none."""
        trajectories, born, num_steps = self._end_game(record)
        for trajectory in trajectories:
            self.add_player_trajectory(trajectory)
        if self.in_flight is not None:
            self.in_flight.arrive(born, num_steps)
        self._make_room()

    def has_batch(self, n: int, current_version: int) -> bool:
        """Return whether a batch of `n` can be drawn now."""
        if not self.has_steps_for(n):  # without the stale steps there would be even fewer
            return False
        self._drop_stale(current_version)
        return self.has_steps_for(n)

    def has_steps_for(self, n: int) -> bool:
        """Return whether enough steps wait for a batch of `n`, including stale ones."""
        return self._size >= math.ceil(self.batch_delay * n)

    async def wait_for_room(self, has_game: Callable[[], bool] = lambda: False) -> None:
        """Wait until a game may start or `has_game` returns True; `wake` makes callers check again.

        The caller must start the game before it awaits anything else.
        """
        while self.is_full and not has_game():
            room = asyncio.get_running_loop().create_future()
            self._waiting_for_room.append(room)
            try:
                await room
            except asyncio.CancelledError:
                if room in self._waiting_for_room:
                    self._waiting_for_room.remove(room)
                self._make_room()  # if this caller was woken, wake another one instead
                raise
            self._make_room()  # the next caller checks after this one has started its game

    def wake(self, num_callers: int) -> None:
        """Make `num_callers` callers of `wait_for_room` check again."""
        while self._waiting_for_room and num_callers:
            room = self._waiting_for_room.popleft()
            if not room.done():
                room.set_result(None)
                num_callers -= 1

    def _make_room(self) -> None:
        """Wake one caller of `wait_for_room` if a game may start."""
        if self._waiting_for_room and not self.is_full:
            self.wake(1)

    def drain(self) -> list[Step]:
        """Remove and return every step as stored, without the sampling transform."""
        steps = list(chain.from_iterable(self._chunks))
        self._chunks = []
        self._size = 0
        self.drained += len(steps)
        self._make_room()
        return steps

    def contents(self) -> list[list[Step]]:
        """Return the waiting chunks as stored."""
        return list(self._chunks)

    def refill(self, chunks: list[list[Step]]) -> None:
        """Put back, after `load_state_dict`, the chunks that waited when the state was saved."""
        self.drained -= sum(map(len, chunks))
        self.added -= sum(map(len, chunks))
        self._put(chunks)

    def state_dict(self) -> dict[str, Any]:
        """Return totals, the random stream and the transforms' memory, but not the waiting steps."""
        transforms = [t.state_dict() if isinstance(t, Stateful) else {} for t in self._transforms]
        return {
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "counts": self.counts.state_dict(),
            "in_flight": None if self.in_flight is None else self.in_flight.state_dict(),
            "rng": state_of(self._rng),
            "transforms": transforms,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an empty buffer; steps that waited when it was saved count as drained."""
        assert not self._chunks
        for name in COUNTERS:
            setattr(self, name, state["counters"][name])
        self.drained = self.added - self.taken - self.dropped_stale
        self._dropped_at_last_batch = self.dropped_stale
        self.counts = CountsByLength.of(state["counts"])
        if self.in_flight is not None and state["in_flight"] is not None:
            self.in_flight.load_state_dict(state["in_flight"])
        restore(self._rng, state["rng"])
        for transform, saved in zip(self._transforms, state["transforms"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)

    @property
    def _transforms(self) -> tuple[object, object, object]:
        return self._final, self._step, self.sampling_reward_transformation

    def _end_game(self, record: GameRecord) -> tuple[list[PlayerTrajectory], int, int]:
        """Count a finished game; return the trajectories to learn from, its birth (see `InFlight`) and their steps."""
        turns = length_class(len(record.turns))
        if record.end != "void":
            for trajectory in record.trajectories:
                for step in trajectory.steps:
                    step.step_info["game_length"] = turns
                self.counts.add(trajectory.steps, "played")
        trajectories = self._trajectories_to_learn_from(record)
        num_steps = sum(len(trajectory.steps) for trajectory in trajectories)
        born = self.in_flight.end(record.spec.game_idx, num_steps) if self.in_flight is not None else 0
        return trajectories, born, num_steps

    def _trajectories_to_learn_from(self, record: GameRecord) -> list[PlayerTrajectory]:
        if record.end == "void":
            return []
        if not self.filter_opponent_invalid or record.end != "invalid":
            return record.trajectories
        own = [trajectory for trajectory in record.trajectories if trajectory.pid in record.invalid_pids]
        self.filtered += len(record.trajectories) - len(own)
        return own

    def _final_reward(self, trajectory: PlayerTrajectory) -> tuple[float, float]:
        """Return the game's reward after the final transforms, and the baseline that they subtracted."""
        before, reward = self._final.stages(
            trajectory.final_reward, trajectory.pid, trajectory.env_id, trajectory.steps[-1].context
        )
        if not isinstance(reward, Real):
            raise ConfigError(f"{trajectory.env_id}: {self._final!r} returned {reward!r}; a reward must be a number")
        # A message to the learner cannot hold every type of number, such as NumPy's.
        return float(reward), float(before - reward)

    def _set_reward(self, trajectory: PlayerTrajectory, index: int, env_reward: float, baseline: float) -> None:
        """Set one step's reward. `env_reward`, `baseline`: this step's part of the result of `_final_reward`."""
        reward = self._step(trajectory, index, env_reward)
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ConfigError(
                f"{trajectory.env_id}: player {trajectory.pid}: reward {trajectory.final_reward} became {reward} "
                f"in the final ({self._final!r}) and step ({self._step!r}) reward transformations"
            )
        step = trajectory.steps[index]
        if reason := weight_problem(step.weight, step.token_weights, step.generation.completion_ids):
            raise ConfigError(f"{trajectory.env_id}: {self._step!r} of the step reward transformations set {reason}")
        step.weight, step.token_weights = plain_weights(step)
        step.reward = reward = float(reward)
        step.step_info.update(
            raw_reward=trajectory.final_reward, env_reward=env_reward, baseline=baseline, step_reward=reward
        )

    def _put(self, chunks: list[list[Step]]) -> None:
        new_steps = sum(map(len, chunks))
        self._chunks.extend(chunks)
        self._size += new_steps
        self.added += new_steps
        self._arrival.set()

    async def _take(self, n: int, current_version: int) -> list[list[Step]]:
        """Wait for `n` steps, then take the oldest chunks that hold them, at random among those of one version.

        If cancelled, take none.
        """
        enough = math.ceil(self.batch_delay * n)
        if not 1 <= n <= enough <= self.max_buffer_size:
            raise ConfigError(
                f"batch_size {n}, times batch_delay_buffer {self.batch_delay:g}, must be between 1 and buffer_size "
                f"{self.max_buffer_size}: a full buffer starts no new game, so a larger batch would never be complete"
            )
        while not self.has_batch(n, current_version):
            self._arrival.clear()
            await self._arrival.wait()
        self._rng.shuffle(self._chunks)
        self._chunks.sort(key=_version)
        num_chunks = num_steps = 0
        while num_steps < n:
            num_steps += len(self._chunks[num_chunks])
            num_chunks += 1
        chunks = self._chunks[:num_chunks]
        del self._chunks[:num_chunks]
        self._size -= num_steps
        self.taken += num_steps
        self.counts.add(chain.from_iterable(chunks), "trained")
        self.dropped_lately = self.dropped_stale - self._dropped_at_last_batch
        self.left_lately = num_steps + self.dropped_lately
        self._dropped_at_last_batch = self.dropped_stale
        if self.in_flight is not None:
            self.in_flight.measure()
        self._make_room()
        return chunks

    def _drop_stale(self, current_version: int) -> None:
        limit = self.max_staleness
        if limit is None:
            return
        oldest = current_version - limit
        stale = [chunk for chunk in self._chunks if _version(chunk) < oldest]
        if stale:
            self._chunks = [chunk for chunk in self._chunks if _version(chunk) >= oldest]
            dropped = sum(map(len, stale))
            self._size -= dropped
            self.dropped_stale += dropped
            self.counts.add(chain.from_iterable(stale), "dropped")
            self._make_room()


def _version(chunk: list[Step]) -> int:
    """Return the oldest adapter version of a chunk's steps."""
    return min(step.generation.adapter_version for step in chunk)
