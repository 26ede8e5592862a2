"""Hold played steps until the learner takes them: bounded by back-pressure, bounded in age.

Owns the waiting steps and the order in which reward transforms are applied to them. No generated step is discarded to
make room; instead, no new game starts (`wait_for_room`) while the waiting steps and those expected from games in flight
are as many as can be trained on in time (`back_pressure`). Steps leave in four ways only, each counted: taken into a
batch, the oldest first; dropped as too stale to learn from; rejected for results that are all alike; or drained. So at
all times `added == taken + dropped_stale + rejected + drained + size()`.

`EpisodeBuffer` holds whole trajectories, `StepBuffer` single steps. Games that are played in groups wait outside a
`StepBuffer` until their group is complete, but count as if they were in it. Once a group has begun, its games must
therefore start even if the buffer is full. Then every group is completed, none waits beside a full buffer for ever, and
the learner gets its steps.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

from unstable_lite.config.reference import from_reference
from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.averages import Spread
from unstable_lite.reward_transformations.group import Group, GroupBaseline, compare, without_alike
from unstable_lite.reward_transformations.transforms import (
    ComposeFinalRewardTransforms,
    ComposeStepRewardTransforms,
    FinalRewardTransform,
    SamplingRewardTransform,
    Stateful,
    StepRewardTransform,
    set_rewards,
)
from unstable_lite.rng import restore, state_of
from unstable_lite.rollout.back_pressure import CountsByLength, InFlight, Room, length_class
from unstable_lite.rollout.rejection import Rejection, chunks_that_hold
from unstable_lite.types import GameRecord, GameSpec, PlayerTrajectory, Step

COUNTERS = ("added", "taken", "dropped_stale", "filtered")
"""Totals since the start of the run that a checkpoint keeps."""


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
    reject_zero_signal: bool = False
    """Whether steps whose results are all alike do not count towards a batch."""
    policy: str = ""
    """Name of the policy that learns from the steps, if several do; `share` is its share of the updates."""
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.max_buffer_size < 1:
            raise ConfigError(f"buffer_size must be at least 1, got {self.max_buffer_size}")
        self.added = self.taken = self.dropped_stale = self.drained = 0
        self.rejection = Rejection() if self.reject_zero_signal else None
        self.filtered = 0
        """Number of trajectories left out because of `filter_opponent_invalid`."""
        self.counts = CountsByLength()
        self.left_lately = 0
        """Number of steps that the last batch took, or that were rejected for it or dropped since the one before."""
        self.dropped_lately = 0  # of these steps, the number that were dropped
        self.in_flight: InFlight | None = None
        """Games that will bring more steps; None: they are not counted."""
        final, step = self.final_reward_transformation, self.step_reward_transformation
        self._use(final, step, self.sampling_reward_transformation)
        self.first_version = 0
        """Id of the first adapter whose steps are trained on."""
        self._rng = self.rng if isinstance(self.rng, random.Random) else random.Random(self.rng)
        self._chunks: list[list[Step]] = []
        self._size = self._dropped_at_last_batch = 0
        self.steps_in_groups = 0
        """Number of steps that wait for the rest of their group, if games are played in groups."""
        self._arrival = asyncio.Event()
        """Set when steps arrive. A waiter checks for a batch, clears the event, and checks again once it is set."""
        self.room = Room([self])

    def size(self) -> int:
        """Return the number of waiting steps."""
        return self._size + (self.rejection.size() if self.rejection is not None else 0)

    @property
    def rejected(self) -> int:
        """Number of steps rejected since the start of the run."""
        return 0 if self.rejection is None else self.rejection.rejected.total()

    @property
    def is_full(self) -> bool:
        """Whether no new game should start. Steps of games in flight are kept in any case."""
        held = self._size + self.steps_in_groups
        return held >= self.max_buffer_size or (self.in_flight is not None and not self.in_flight.has_room(held))

    @property
    def load(self) -> float:
        """Number of steps that wait or are in flight, divided by the policy's share and the size of the buffer."""
        flying = self.in_flight.steps if self.in_flight is not None else 0.0
        return (self._size + self.steps_in_groups + flying) / (self.share * self.max_buffer_size)

    def begin_game(self, spec: GameSpec) -> None:
        """Count the steps of a game that starts now as in flight until `add_game` gets its record."""
        if self.in_flight is not None:
            self.in_flight.begin(spec, self.policy)

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        """Apply the final transform once and the step transform to each step; `step_info` keeps both results.

        A player without a turn enters no average: its result says nothing about the policy.
        """
        if traj.steps:
            set_rewards(traj, self._final, self._step, self.batches)
            self._put([[step] for step in traj.steps] if self.batches == "steps" else [list(traj.steps)])

    def add_game(self, record: GameRecord) -> None:
        """Add the steps to learn from a finished game; a void game has none."""
        trajectories, born, num_steps = self._end_game(record)
        for trajectory in trajectories:
            self.add_player_trajectory(trajectory)
        if self.in_flight is not None:
            self.in_flight.arrive(born, num_steps)
        self.room.wake_if_free()

    def has_batch(self, n: int, current_version: int) -> bool:
        """Return whether a batch of `n` can be drawn now."""
        if self.rejection is not None or self.has_steps_for(n):  # without the stale steps there would be even fewer
            self._drop_stale(current_version)
        if self.rejection is None:
            return self.has_steps_for(n)
        while self.has_steps_for(n) and not self.rejection.has_batch(n):
            self.rejection.judge(self._oldest(n))
        return self.rejection.has_batch(n)

    def has_steps_for(self, n: int) -> bool:
        """Return whether enough steps wait for a batch of `n`, including stale ones."""
        return self._size >= math.ceil(self.batch_delay * n)

    async def wait_for_room(self, has_game: Callable[[], bool] = lambda: False) -> None:
        """Wait until a game may start or `has_game` returns True; see `Room.wait`."""
        await self.room.wait(has_game)

    def wake(self, num_callers: int) -> None:
        """Make `num_callers` callers of `wait_for_room` check again."""
        self.room.wake(num_callers)

    def drain(self) -> list[Step]:
        """Remove and return every step as stored, without the sampling transform."""
        steps = list(chain.from_iterable(self.contents()))
        self._chunks = []
        self._size = 0
        if self.rejection is not None:
            self.rejection.clear()
        self.drained += len(steps)
        self.room.wake_if_free()
        return steps

    def contents(self) -> list[list[Step]]:
        """Return the waiting chunks as stored."""
        return self._chunks + (self.rejection.contents() if self.rejection is not None else [])

    def refill(self, chunks: list[list[Step]]) -> None:
        """Put back, after `load_state_dict`, the chunks that waited when the state was saved."""
        self.drained -= sum(map(len, chunks))
        if self.rejection is not None:
            chunks = self.rejection.refill(chunks)
        self.added -= sum(map(len, chunks))
        self._put(chunks)

    def _use(self, final: Any, step: Any, sampling: SamplingRewardTransform | None) -> None:
        self._final, self._step = ComposeFinalRewardTransforms.of(final), ComposeStepRewardTransforms.of(step)
        self.sampling_reward_transformation = sampling
        self._transforms = self._final, self._step, sampling

    def begin_again(self, first_version: int, transforms: Sequence[Any]) -> None:
        """Drop the steps of earlier adapters, also those that games in flight will bring, and use these transforms."""
        self.first_version = first_version
        self._use(*transforms)
        if self.rejection is not None:
            self.rejection.spread = Spread()
        self.drain()

    def state_dict(self) -> dict[str, Any]:
        """Return totals, the random stream and the transforms' memory, but not the waiting steps."""
        return {
            **({"first_version": self.first_version} if self.first_version else {}),
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "counts": self.counts.state_dict(),
            "in_flight": None if self.in_flight is None else self.in_flight.state_dict(),
            "rng": state_of(self._rng),
            "transforms": [t.state_dict() if isinstance(t, Stateful) else {} for t in self._transforms],
            "rejection": None if self.rejection is None else self.rejection.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of an empty buffer; steps that waited when it was saved count as drained."""
        assert not self._chunks
        for name in COUNTERS:
            setattr(self, name, state["counters"][name])
        if self.rejection is not None and state.get("rejection") is not None:
            self.rejection.load_state_dict(state["rejection"])
        self.drained = self.added - self.taken - self.dropped_stale - self.rejected
        self._dropped_at_last_batch = self.dropped_stale
        self.counts = CountsByLength.of(state["counts"])
        if self.in_flight is not None and state["in_flight"] is not None:
            self.in_flight.load_state_dict(state["in_flight"])
        restore(self._rng, state["rng"])
        for transform, saved in zip(self._transforms, state["transforms"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)
        self.first_version = state.get("first_version", 0)

    def _end_game(self, record: GameRecord) -> tuple[list[PlayerTrajectory], int | None, int]:
        """Count a finished game; return the trajectories to learn from, its birth (see `InFlight`) and their steps."""
        own = [one for one in record.trajectories if one.model.policy == self.policy and record.end != "void"]
        trajectories = [one for one in own if (one.model.adapter_version or 0) >= self.first_version]
        ended = sum(len(one.steps) for one in own) - sum(len(one.steps) for one in trajectories)  # of ended lineages
        self.added, self.drained = self.added + ended, self.drained + ended
        turns = length_class(len(record.turns))
        for trajectory in trajectories:
            for step in trajectory.steps:
                step.step_info["game_length"] = turns
            self.counts.add(trajectory.steps, "played")
        if self.filter_opponent_invalid and record.end == "invalid":
            own = [trajectory for trajectory in trajectories if trajectory.pid in record.invalid_pids]
            self.filtered += len(trajectories) - len(own)
            trajectories = own
        num_steps = sum(len(trajectory.steps) for trajectory in trajectories)
        brought, flying = None if ended else num_steps, self.in_flight
        return trajectories, flying.end(record.spec.game_idx, brought) if flying is not None else 0, num_steps

    def _put(self, chunks: list[list[Step]]) -> None:
        new_steps = sum(map(len, chunks))
        self._chunks.extend(chunks)
        self._size, self.added = self._size + new_steps, self.added + new_steps
        self._arrival.set()

    async def _take(self, n: int, current_version: int) -> list[list[Step]]:
        """Wait for `n` steps, then take the oldest chunks that hold them, at random within a version.

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
        rejected = self.rejected
        chunks = self._oldest(n) if self.rejection is None else self.rejection.take(n)
        self.taken += (num_steps := sum(map(len, chunks)))
        self.counts.add(chain.from_iterable(chunks), "trained")
        self.dropped_lately = self.dropped_stale - self._dropped_at_last_batch
        self.left_lately = num_steps + self.dropped_lately + self.rejected - rejected
        self._dropped_at_last_batch = self.dropped_stale
        if self.in_flight is not None:
            self.in_flight.measure()
        return chunks

    def _oldest(self, n: int) -> list[list[Step]]:
        """Remove the oldest chunks that hold `n` steps, and return them."""
        self._rng.shuffle(self._chunks)
        self._chunks.sort(key=_version)
        chunks = self._chunks[: chunks_that_hold(self._chunks, n)]
        del self._chunks[: len(chunks)]
        self._size -= sum(map(len, chunks))
        self.room.wake_if_free()
        return chunks

    def _drop_stale(self, current_version: int) -> None:
        least = self.first_version if self.max_staleness is None else current_version - self.max_staleness
        oldest = max(least, self.first_version)
        stale = [chunk for chunk in self._chunks if _version(chunk) < oldest]
        if stale:
            self._chunks = [chunk for chunk in self._chunks if _version(chunk) >= oldest]
            self._size -= sum(map(len, stale))
        if self.rejection is not None:
            stale += self.rejection.remove(lambda chunk: _version(chunk) < oldest)
        if stale:
            self.dropped_stale += sum(map(len, stale))
            self.counts.add(chain.from_iterable(stale), "dropped")
            self.room.wake_if_free()


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


@from_reference(unused={"tracker"})
@dataclass(eq=False, repr=False)
class StepBuffer(Buffer):
    """Buffer of single steps; each carries its player's final reward, or its advantage within its group."""

    batches = "steps"
    group_size: int = 1
    group_baseline: GroupBaseline | None = None
    """Baseline of a player's rewards at one seat."""
    is_duplicate: bool = False
    """Whether the games of a group are one deal played from both seats, which `across_seats` compares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group_counts = {"whole": 0, "without_spread": 0, "of_one": 0}
        """Numbers of completed groups of one player, or of one deal: all; with equal rewards; those of which games were
        left out because none is left to compare them with."""
        self._groups: dict[int, Group] = {}
        self._spread = Spread()
        """Newest results of earlier batches, if games are duplicates."""

    def add_game(self, record: GameRecord) -> None:
        """Add a finished game's steps once its group is complete; a void game makes its group smaller."""
        if record.spec.group_idx is None or not (self.group_baseline or self.is_duplicate):
            super().add_game(record)
            return
        group = self._groups.setdefault(record.spec.group_idx, Group())
        group.num_games += 1
        trajectories, born, _ = self._end_game(record)
        group.born = min((each for each in (group.born, born) if each is not None), default=None)
        for trajectory in trajectories:
            if trajectory.steps:  # a player without a turn has no step rewards to compare
                set_rewards(trajectory, self._final, self._step, self.batches)
                compared_with = 0 if self.is_duplicate else trajectory.pid
                group.trajectories.setdefault(compared_with, []).append(trajectory)
                self.steps_in_groups += len(trajectory.steps)
        if group.num_games == self.group_size:
            del self._groups[record.spec.group_idx]
            before, baseline = self.added, None if self.is_duplicate else self.group_baseline
            for compared in group.trajectories.values():
                self.steps_in_groups -= sum(len(trajectory.steps) for trajectory in compared)
                self._put([[step] for step in compare(compared, baseline, self.group_counts)])
            if self.in_flight is not None:
                self.in_flight.arrive(group.born, self.added - before)
        self.room.wake_if_free()

    def begin_again(self, first_version: int, transforms: Sequence[Any]) -> None:
        self._spread = Spread()
        self.added, self.drained = self.added + self.steps_in_groups, self.drained + self.steps_in_groups
        self.steps_in_groups = 0
        for group in self._groups.values():
            group.trajectories, group.born = {}, None
        super().begin_again(first_version, transforms)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"groups": dict(self.group_counts), "spread": self._spread.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.group_counts |= state["groups"]
        if "spread" in state:  # a checkpoint from before there were duplicates has none
            self._spread.load_state_dict(state["spread"])

    async def get_batch(self, n: int, current_version: int) -> list[Step]:
        """Wait for `n` fresh steps; return exactly `n`: the oldest, at random among those of one version."""
        steps = list(chain.from_iterable(await self._take(n, current_version)))
        if self.is_duplicate:
            steps = without_alike(steps, self._spread)
        return steps if self.sampling_reward_transformation is None else self.sampling_reward_transformation(steps)
