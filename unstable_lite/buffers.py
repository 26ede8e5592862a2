"""Hold what was played until the learner takes it: bounded by back-pressure, bounded in age.

Owns the waiting steps and the order in which the reward transforms meet them. Knows nothing of engines,
learners or trackers. Nothing generated is thrown away to make room: no new game starts (`wait_for_room`) while the
steps that wait and those that games in flight will bring are as many as can be trained on in time (`back_pressure`).
Steps leave in three ways only, each counted: taken into a batch, the oldest first; dropped as too stale to learn from;
or drained. So at all times `added == taken + dropped_stale + drained + size()`.

Games that are played in groups wait beside it until their group is whole, and fill it meanwhile as if they were in it.
The games of a group that is begun must therefore start even while it is full: then every group becomes whole, nothing
waits beside a full buffer for ever, and the learner finds what it needs.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from statistics import fmean
from typing import Any, Literal

from unstable_lite.back_pressure import InFlight
from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.compose import Stateful
from unstable_lite.reward_transformations.final import ComposeFinalRewardTransforms, FinalRewardTransform
from unstable_lite.reward_transformations.group import GroupBaseline, has_spread
from unstable_lite.reward_transformations.sampling import SamplingRewardTransform
from unstable_lite.reward_transformations.step import ComposeStepRewardTransforms, StepRewardTransform
from unstable_lite.rng import restore, state_of
from unstable_lite.types import GameRecord, GameSpec, PlayerTrajectory, Step

LENGTHS = (4, 8, 16, 32, 64)
"""Turns of the longest game of each class of game length; longer ones are a class of their own."""
UNKNOWN_LENGTH = "unknown turns"
"""The class of steps that were added without their game."""


def length_class(num_turns: int) -> str:
    """Return the class of a game's length, as metrics name it: `9-16 turns`, `65+ turns`."""
    index = bisect_left(LENGTHS, num_turns)
    least = LENGTHS[index - 1] + 1 if index else 1
    return f"{least}-{LENGTHS[index]} turns" if index < len(LENGTHS) else f"{least}+ turns"


@dataclass(slots=True)
class StepCounts:
    """What became of the collected steps of an env's games of one class of length, since the start of the run."""

    played: int = 0
    """Number of steps of games that ended and were not void."""
    trained: int = 0
    """Number of steps that the learner took."""
    dropped: int = 0
    """Number of steps that became too stale."""


def staleness(step: Step, current_version: int) -> int:
    """Updates made since the step was sampled; version n is the policy after n updates."""
    return current_version - step.generation.adapter_version


def most_dropped(counts: Mapping[tuple[str, str], StepCounts]) -> str | None:
    """Return the env and class of game length of which the largest share was dropped, with the share; or None."""
    shares = {key: c.dropped / c.played for key, c in counts.items() if c.dropped and c.played}
    if not shares:
        return None
    env_id, turns = max(shares, key=shares.__getitem__)
    return f"{env_id}, {turns}: {shares[env_id, turns]:.1%}"


class _Waiting:
    """Chunks of steps that come and go whole: single steps for one buffer, episodes for the other."""

    def __init__(
        self,
        max_buffer_size: int,
        final_reward_transformation: FinalRewardTransform | None = None,
        step_reward_transformation: StepRewardTransform | None = None,
        sampling_reward_transformation: SamplingRewardTransform | None = None,
        max_staleness: int | None = None,
        rng: random.Random | int = 0,
        batch_delay: float = 1.0,
        filter_opponent_invalid: bool = False,
    ) -> None:
        """`batch_delay`: a batch of n is drawn once `batch_delay * n` steps wait."""
        if max_buffer_size < 1:
            raise ConfigError(f"buffer_size must be at least 1, got {max_buffer_size}")
        self.max_buffer_size = max_buffer_size
        self.max_staleness = max_staleness
        self.batch_delay = batch_delay
        self.filter_opponent_invalid = filter_opponent_invalid
        self.added = self.taken = self.dropped_stale = self.drained = 0
        self.filtered = 0
        """Trajectories left out because another player's invalid move ended the game."""
        self.counts: dict[tuple[str, str], StepCounts] = {}
        """By env id and class of game length."""
        self.left_lately = 0
        """Steps that were taken by the last batch or dropped since the one before it."""
        self.dropped_lately = 0
        """Those of them that were dropped."""
        self.in_flight: InFlight | None = None
        """The games that will bring more steps; None: they are not counted."""
        self._final = ComposeFinalRewardTransforms.of(final_reward_transformation)
        self._step = ComposeStepRewardTransforms.of(step_reward_transformation)
        self._sampling = sampling_reward_transformation
        self._rng = rng if isinstance(rng, random.Random) else random.Random(rng)
        self._chunks: list[list[Step]] = []
        self._size = 0
        self._dropped_at_last_batch = 0
        self._arrival = asyncio.Event()
        """Whoever waits for it looks first, clears it, and looks again when it is set."""
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()

    def size(self) -> int:
        """Steps that wait."""
        return self._size

    @property
    def is_full(self) -> bool:
        """Whether no new game should start; what games in flight still bring is kept all the same."""
        held = self.steps_held()
        return held >= self.max_buffer_size or (self.in_flight is not None and not self.in_flight.has_room(held))

    def steps_held(self) -> int:
        """Return the number of steps that wait for the learner or for the rest of their group."""
        return self._size

    def begin_game(self, spec: GameSpec) -> None:
        """Count the steps of a game that starts now as in flight until `add_game` gets its record."""
        if self.in_flight is not None:
            self.in_flight.begin(spec)

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        raise NotImplementedError

    def add_game(self, record: GameRecord) -> None:
        """Add what is to be learnt from a finished game: nothing from a void one."""
        trajectories, born, num_steps = self._end_game(record)
        for trajectory in trajectories:
            self.add_player_trajectory(trajectory)
        if self.in_flight is not None:
            self.in_flight.arrive(born, num_steps)
        self._make_room()

    def has_batch(self, n: int, current_version: int) -> bool:
        """Whether a batch of `n` could be drawn now."""
        if not self.has_steps_for(n):  # nothing to look for: what is stale among them only makes them fewer
            return False
        self._drop_stale(current_version)
        return self.has_steps_for(n)

    def has_steps_for(self, n: int) -> bool:
        """Whether enough steps wait for a batch of `n`, the stale ones among them."""
        return self._size >= math.ceil(self.batch_delay * n)

    async def wait_for_room(self, has_game: Callable[[], bool] = lambda: False) -> None:
        """Wait until a game may start, or `has_game` says that one has to; `wake` makes callers look again.

        The caller starts the game before it awaits anything else.
        """
        while self.is_full and not has_game():
            room = asyncio.get_running_loop().create_future()
            self._waiting_for_room.append(room)
            try:
                await room
            except asyncio.CancelledError:
                if room in self._waiting_for_room:
                    self._waiting_for_room.remove(room)
                self._make_room()  # for another one, if it was this one's turn
                raise
            self._make_room()  # the next one looks when this one's game has started

    def wake(self, num_callers: int) -> None:
        """Let so many callers of `wait_for_room` look again."""
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
        """Take out every step, as it waits, without the sampling transform."""
        steps = list(chain.from_iterable(self._chunks))
        self._chunks = []
        self._size = 0
        self.drained += len(steps)
        self._make_room()
        return steps

    def clear(self) -> None:
        self.drain()

    def counters(self) -> dict[str, int]:
        """Running totals since the start, in steps."""
        return {
            "added": self.added,
            "taken": self.taken,
            "dropped_stale": self.dropped_stale,
            "drained": self.drained,
        }

    def step_metrics(self) -> dict[str, float]:
        """Return what became of the collected steps, by env and by class of game length, as metrics."""
        metrics: dict[str, float] = {}
        for (env_id, turns), counts in self.counts.items():
            of_class = {"Played": counts.played, "Trained": counts.trained, "Dropped": counts.dropped}
            for what, count in of_class.items():
                total = f"collection-{env_id}/Steps {what}"
                metrics[total] = metrics.get(total, 0) + count
                metrics[f"{total} ({turns})"] = count
        return metrics

    def contents(self) -> list[list[Step]]:
        """The chunks that wait, as they are."""
        return list(self._chunks)

    def refill(self, chunks: list[list[Step]]) -> None:
        """After `load_state_dict`: the chunks that waited when the state was saved."""
        self.drained -= sum(map(len, chunks))
        self.added -= sum(map(len, chunks))
        self._put(chunks)

    def state_dict(self) -> dict[str, Any]:
        """Totals, the random stream and the transforms' memory; the waiting steps are not part of it."""
        transforms = [t.state_dict() if isinstance(t, Stateful) else {} for t in self._transforms]
        return {
            "counters": self.counters() | {"filtered": self.filtered},
            "counts": [[*key, c.played, c.trained, c.dropped] for key, c in self.counts.items()],
            "in_flight": None if self.in_flight is None else self.in_flight.state_dict(),
            "rng": state_of(self._rng),
            "transforms": transforms,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into an empty buffer; steps that waited when the state was saved count as drained."""
        assert not self._chunks
        counters = state["counters"]
        self.added, self.taken = counters["added"], counters["taken"]
        self.dropped_stale, self.filtered = counters["dropped_stale"], counters["filtered"]
        self.drained = self.added - self.taken - self.dropped_stale
        self._dropped_at_last_batch = self.dropped_stale
        self.counts = {(env_id, turns): StepCounts(*counts) for env_id, turns, *counts in state["counts"]}
        if self.in_flight is not None and state["in_flight"] is not None:
            self.in_flight.load_state_dict(state["in_flight"])
        restore(self._rng, state["rng"])
        for transform, saved in zip(self._transforms, state["transforms"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)

    @property
    def _transforms(self) -> tuple[object, object, object]:
        return self._final, self._step, self._sampling

    def _end_game(self, record: GameRecord) -> tuple[list[PlayerTrajectory], int, int]:
        """Count a finished game; return what is learnt from it, when it was born, and how many steps it brings."""
        turns = length_class(len(record.turns))
        if record.end != "void":
            for trajectory in record.trajectories:
                for step in trajectory.steps:
                    step.step_info["game_length"] = turns
                self._count(trajectory.steps, "played")
        trajectories = self._learnt_from(record)
        num_steps = sum(len(trajectory.steps) for trajectory in trajectories)
        born = self.in_flight.end(record.spec.game_idx, num_steps) if self.in_flight is not None else 0
        return trajectories, born, num_steps

    def _count(self, steps: Iterable[Step], what: Literal["played", "trained", "dropped"]) -> None:
        for step in steps:
            key = step.env_id, step.step_info.get("game_length", UNKNOWN_LENGTH)
            counts = self.counts.get(key)
            if counts is None:
                counts = self.counts[key] = StepCounts()
            setattr(counts, what, getattr(counts, what) + 1)

    def _learnt_from(self, record: GameRecord) -> list[PlayerTrajectory]:
        if record.end == "void":
            return []
        if not self.filter_opponent_invalid or record.end != "invalid":
            return record.trajectories
        own = [trajectory for trajectory in record.trajectories if trajectory.pid in record.invalid_pids]
        self.filtered += len(record.trajectories) - len(own)
        return own

    def _final_reward(self, trajectory: PlayerTrajectory) -> tuple[float, float]:
        """Return the game's reward after the final transforms, and how much of it they took off as a baseline."""
        before, reward = self._final.stages(
            trajectory.final_reward, trajectory.pid, trajectory.env_id, trajectory.steps[-1].context
        )
        if not isinstance(reward, Real):
            raise ConfigError(f"{trajectory.env_id}: {self._final!r} made {reward!r} of a reward; it must be a number")
        # One of numpy's, for example, is of no type that the learner is sent.
        return float(reward), float(before - reward)

    def _set_reward(self, trajectory: PlayerTrajectory, index: int, env_reward: float, baseline: float) -> None:
        """`env_reward`, `baseline`: what of the two figures of `_final_reward` falls to this step."""
        reward = self._step(trajectory, index, env_reward)
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ConfigError(
                f"{trajectory.env_id}: player {trajectory.pid}: reward {trajectory.final_reward} became {reward} "
                f"in the final ({self._final!r}) and step ({self._step!r}) reward transformations"
            )
        step = trajectory.steps[index]
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
        """Wait for `n` steps, then take the oldest chunks that hold them, by chance among those of one version.

        Cancelled, take none.
        """
        enough = math.ceil(self.batch_delay * n)
        if not 1 <= n <= enough <= self.max_buffer_size:
            raise ConfigError(
                f"batch_size {n}, times batch_delay_buffer {self.batch_delay:g}, must be between 1 and buffer_size "
                f"{self.max_buffer_size}: a full buffer starts no new game, so a larger batch would never come"
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
        self._count(chain.from_iterable(chunks), "trained")
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
            self._count(chain.from_iterable(stale), "dropped")
            self._make_room()


def _version(chunk: list[Step]) -> int:
    """Return the oldest adapter version of a chunk's steps."""
    return min(step.generation.adapter_version for step in chunk)


@dataclass(slots=True)
class _Group:
    """The games of one group that are over."""

    num_games: int = 0
    """Void ones too."""
    trajectories: dict[int, list[PlayerTrajectory]] = field(default_factory=dict)
    """By player."""
    born: int | None = None
    """When its first game to end started, as `InFlight` counts."""


class StepBuffer(_Waiting):
    """Single steps; each carries its player's final reward, or its advantage within its group."""

    def __init__(
        self,
        max_buffer_size: int,
        final_reward_transformation: FinalRewardTransform | None = None,
        step_reward_transformation: StepRewardTransform | None = None,
        sampling_reward_transformation: SamplingRewardTransform | None = None,
        max_staleness: int | None = None,
        rng: random.Random | int = 0,
        batch_delay: float = 1.0,
        filter_opponent_invalid: bool = False,
        group_size: int = 1,
        group_baseline: GroupBaseline | None = None,
    ) -> None:
        super().__init__(
            max_buffer_size,
            final_reward_transformation,
            step_reward_transformation,
            sampling_reward_transformation,
            max_staleness,
            rng,
            batch_delay,
            filter_opponent_invalid,
        )
        self.groups = self.groups_without_spread = self.groups_of_one = 0
        """Groups of one player's trajectories that became whole; all equal: advantage 0; a single one: left out."""
        self._group_size = group_size
        self._group_baseline = group_baseline
        self._groups: dict[int, _Group] = {}
        self._size_of_groups = 0

    def steps_held(self) -> int:
        return self._size + self._size_of_groups

    def steps_in_groups(self) -> int:
        """Steps that wait for the rest of their group."""
        return self._size_of_groups

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        """Apply the final transform once and the step transform to each step; both are kept in `step_info`.

        A player without a turn feeds no average: its result says nothing about the policy.
        """
        if not traj.steps:
            return
        self._set_rewards(traj)
        self._put([[step] for step in traj.steps])

    def add_game(self, record: GameRecord) -> None:
        """What is to be learnt from a finished game, once its group is whole; a void game makes its group smaller."""
        if record.spec.group_idx is None or self._group_baseline is None:
            super().add_game(record)
            return
        group = self._groups.setdefault(record.spec.group_idx, _Group())
        group.num_games += 1
        trajectories, born, _ = self._end_game(record)
        group.born = born if group.born is None else min(group.born, born)
        for trajectory in trajectories:
            if trajectory.steps:  # a player without a turn has no rewards of steps to compare
                self._set_rewards(trajectory)
                group.trajectories.setdefault(trajectory.pid, []).append(trajectory)
                self._size_of_groups += len(trajectory.steps)
        if group.num_games == self._group_size:
            del self._groups[record.spec.group_idx]
            before = self.added
            for of_player in group.trajectories.values():
                self._size_of_groups -= sum(len(trajectory.steps) for trajectory in of_player)
                self._add_compared(of_player, self._group_baseline)
            if self.in_flight is not None:
                self.in_flight.arrive(group.born, self.added - before)
        self._make_room()

    def group_counters(self) -> dict[str, int]:
        """Running totals since the start, in groups of one player's trajectories."""
        return {"whole": self.groups, "without_spread": self.groups_without_spread, "of_one": self.groups_of_one}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"groups": self.group_counters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        groups = state["groups"]
        self.groups, self.groups_without_spread, self.groups_of_one = (
            groups["whole"],
            groups["without_spread"],
            groups["of_one"],
        )

    def _add_compared(self, trajectories: list[PlayerTrajectory], baseline: GroupBaseline) -> None:
        """Compare one group of one player by the final rewards; each step gets its trajectory's advantage.

        What the step transforms added goes to its own step, less the group's mean: an invalid move costs the turn that
        made it, in any length of game.
        """
        self.groups += 1
        if len(trajectories) == 1:
            self.groups_of_one += 1
            return
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        finals = [trajectory.steps[0].step_info["env_reward"] for trajectory in trajectories]
        added = [step.step_info["step_reward"] - step.step_info["env_reward"] for step in steps]
        usual = fmean(added)
        is_alike = not has_spread(added)
        self.groups_without_spread += is_alike and not has_spread(finals)
        advantages = chain.from_iterable(
            [advantage] * len(trajectory.steps)
            for trajectory, advantage in zip(trajectories, baseline(finals), strict=True)
        )
        for step, advantage, reward in zip(steps, advantages, added, strict=True):
            step.reward = advantage + (0.0 if is_alike else reward - usual)
        self._put([[step] for step in steps])

    def _set_rewards(self, trajectory: PlayerTrajectory) -> None:
        env_reward, baseline = self._final_reward(trajectory)
        for index in range(len(trajectory.steps)):
            self._set_reward(trajectory, index, env_reward, baseline)

    async def get_batch(self, n: int, current_version: int) -> list[Step]:
        """Wait for `n` fresh steps; return exactly `n`, the oldest, by chance among those of one version."""
        steps = list(chain.from_iterable(await self._take(n, current_version)))
        return steps if self._sampling is None else self._sampling(steps)


class EpisodeBuffer(_Waiting):
    """Whole trajectories; the final reward falls to the last step alone, so that returns count it once."""

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        if not traj.steps:
            return
        env_reward, baseline = self._final_reward(traj)
        last = len(traj.steps) - 1
        for index in range(len(traj.steps)):
            self._set_reward(traj, index, *((env_reward, baseline) if index == last else (0.0, 0.0)))
        self._put([list(traj.steps)])

    async def get_batch(self, n: int, current_version: int) -> list[list[Step]]:
        """Shuffled episodes that hold `n` steps or more; an episode with one step too stale is dropped whole.

        The sampling transform sees all their steps in one list, and must keep their number and order.
        """
        episodes = await self._take(n, current_version)
        if self._sampling is None:
            return episodes
        steps = list(chain.from_iterable(episodes))
        transformed = self._sampling(steps)
        if len(transformed) != len(steps):
            raise ConfigError(f"{self._sampling!r} returned {len(transformed)} of {len(steps)} steps; it must keep all")
        remaining = iter(transformed)
        return [[next(remaining) for _ in episode] for episode in episodes]
