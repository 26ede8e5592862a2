"""Hold played steps until the learner takes them: bounded by back-pressure, bounded in age.

Owns the waiting steps and the order in which reward transforms are applied to them. Knows nothing of engines,
learners or trackers. No generated step is discarded to make room; instead, no new game starts (`wait_for_room`) while
the waiting steps and those expected from games in flight are as many as can be trained on in time (`back_pressure`).
Steps leave in three ways only, each counted: taken into a batch, the oldest first; dropped as too stale to learn from;
or drained. So at all times `added == taken + dropped_stale + drained + size()`.

`EpisodeBuffer` holds whole trajectories, step_buffer.py single steps.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any, ClassVar, Literal

from unstable_lite.config.reference import from_reference
from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.compose import Stateful
from unstable_lite.reward_transformations.final import ComposeFinalRewardTransforms, FinalRewardTransform
from unstable_lite.reward_transformations.sampling import SamplingRewardTransform, plain_weights, weight_problem
from unstable_lite.reward_transformations.step import ComposeStepRewardTransforms, StepRewardTransform
from unstable_lite.rng import restore, state_of
from unstable_lite.rollout.back_pressure import InFlight
from unstable_lite.types import GameRecord, GameSpec, PlayerTrajectory, Step

COUNTERS = ("added", "taken", "dropped_stale", "filtered")
"""Totals since the start of the run that a checkpoint keeps."""
LENGTHS = (4, 8, 16, 32, 64)
"""Largest number of turns in each class of game length; longer games form one more class."""
UNKNOWN_LENGTH = "unknown turns"
"""Class of steps that were added without their game."""


def length_class(num_turns: int) -> str:
    """Return the class of a game's length, as metrics name it: `9-16 turns`, `65+ turns`."""
    index = bisect_left(LENGTHS, num_turns)
    least = LENGTHS[index - 1] + 1 if index else 1
    return f"{least}-{LENGTHS[index]} turns" if index < len(LENGTHS) else f"{least}+ turns"


@dataclass(slots=True)
class StepCounts:
    """Fate of the collected steps of one env's games in one class of length, since the start of the run."""

    played: int = 0
    """Number of steps of games that ended and were not void."""
    trained: int = 0
    """Number of steps that the learner took."""
    dropped: int = 0
    """Number of steps that became too stale."""


class CountsByLength(dict[tuple[str, str], StepCounts]):
    """Counts by env id and class of game length."""

    @classmethod
    def of(cls, state: Iterable[Iterable[Any]]) -> CountsByLength:
        """Return the counts that `state_dict` returned."""
        return cls({(env_id, turns): StepCounts(*counts) for env_id, turns, *counts in state})

    def state_dict(self) -> list[list[Any]]:
        return [[*key, c.played, c.trained, c.dropped] for key, c in self.items()]

    def add(self, steps: Iterable[Step], fate: Literal["played", "trained", "dropped"]) -> None:
        for step in steps:
            key = step.env_id, step.step_info.get("game_length", UNKNOWN_LENGTH)
            counts = self.get(key)
            if counts is None:
                counts = self[key] = StepCounts()
            setattr(counts, fate, getattr(counts, fate) + 1)

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics, of each class of length and of all."""
        metrics: dict[str, float] = {}
        for (env_id, turns), counts in self.items():
            of_class = {"Played": counts.played, "Trained": counts.trained, "Dropped": counts.dropped}
            for fate, count in of_class.items():
                total = f"collection-{env_id}/Steps {fate}"
                metrics[total] = metrics.get(total, 0) + count
                metrics[f"{total} ({turns})"] = count
        return metrics

    def most_dropped(self) -> str | None:
        """Return the env and class of game length with the largest share of dropped steps, and that share; or None."""
        shares = {key: c.dropped / c.played for key, c in self.items() if c.dropped and c.played}
        if not shares:
            return None
        env_id, turns = max(shares, key=shares.__getitem__)
        return f"{env_id}, {turns}: {shares[env_id, turns]:.1%}"


@from_reference(unused={"tracker"})
@dataclass(eq=False, repr=False)
class Buffer:
    """Chunks of steps that are added and taken whole: single steps in one buffer, episodes in the other."""

    batches: ClassVar[Literal["steps", "episodes"]]
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
        """Apply the final transform once and the step transform to each step; `step_info` keeps both results.

        A player without a turn enters no average: its result says nothing about the policy.
        """
        if traj.steps:
            self._set_rewards(traj)
            self._put([[step] for step in traj.steps] if self.batches == "steps" else [list(traj.steps)])

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
        trajectories, turns = [] if record.end == "void" else record.trajectories, length_class(len(record.turns))
        for trajectory in trajectories:
            for step in trajectory.steps:
                step.step_info["game_length"] = turns
            self.counts.add(trajectory.steps, "played")
        if self.filter_opponent_invalid and record.end == "invalid":
            own = [trajectory for trajectory in trajectories if trajectory.pid in record.invalid_pids]
            self.filtered += len(trajectories) - len(own)
            trajectories = own
        num_steps = sum(len(trajectory.steps) for trajectory in trajectories)
        born = self.in_flight.end(record.spec.game_idx, num_steps) if self.in_flight is not None else 0
        return trajectories, born, num_steps

    def _set_rewards(self, trajectory: PlayerTrajectory) -> None:
        """Set the rewards of all steps; each gets the final reward, or in an episode the last one only."""
        before, reward = self._final.stages(
            trajectory.final_reward, trajectory.pid, trajectory.env_id, trajectory.steps[-1].context
        )
        if not isinstance(reward, Real):
            raise ConfigError(f"{trajectory.env_id}: {self._final!r} returned {reward!r}; a reward must be a number")
        # A message to the learner cannot hold every type of number, such as NumPy's.
        final, subtracted = float(reward), float(before - reward)
        for index, step in enumerate(trajectory.steps):
            is_paid = step is trajectory.steps[-1] or self.batches == "steps"
            env_reward, baseline = (final, subtracted) if is_paid else (0.0, 0.0)
            reward = self._step(trajectory, index, env_reward)
            step = trajectory.steps[index]  # a transform may replace it
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise ConfigError(
                    f"{trajectory.env_id}: player {trajectory.pid}: reward {trajectory.final_reward} became {reward} "
                    f"in the final ({self._final!r}) and step ({self._step!r}) reward transformations"
                )
            if reason := weight_problem(step.weight, step.token_weights, step.generation.completion_ids):
                raise ConfigError(
                    f"{trajectory.env_id}: {self._step!r} of the step reward transformations set {reason}"
                )
            step.weight, step.token_weights = plain_weights(step)
            step.reward = float(reward)
            step.step_info.update(
                raw_reward=trajectory.final_reward, env_reward=env_reward, baseline=baseline, step_reward=step.reward
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
        if self.max_staleness is None:
            return
        oldest = current_version - self.max_staleness
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


@from_reference(unused={"tracker"})
class EpisodeBuffer(Buffer):
    """Buffer of whole trajectories; only the last step gets the final reward, so that returns count it once."""

    batches = "episodes"

    async def get_batch(self, n: int, current_version: int) -> list[list[Step]]:
        """Wait for `n` fresh steps; return the oldest episodes that hold them, at random among those of one version.

        An episode with one step that is too stale is dropped whole. The sampling transform gets the steps of all
        episodes in one list, and must keep their number and order.
        """
        episodes, sampling = await self._take(n, current_version), self.sampling_reward_transformation
        if sampling is None:
            return episodes
        steps = list(chain.from_iterable(episodes))
        transformed = sampling(steps)
        if len(transformed) != len(steps):
            raise ConfigError(f"{sampling!r} returned {len(transformed)} of {len(steps)} steps; it must keep all")
        remaining = iter(transformed)
        return [[next(remaining) for _ in episode] for episode in episodes]
