"""Hold what was played until the learner takes it: bounded by back-pressure, bounded in age.

Owns the waiting steps and the order in which the reward transforms meet them. Knows nothing of engines,
learners or trackers. Nothing generated is thrown away to make room: while the buffer is full no new game
starts (`wait_for_room`), and what the games in flight still bring is kept. Steps leave in three ways only, each
counted: taken into a batch, dropped as too stale to learn from, or drained. So at all times
`added == taken + dropped_stale + drained + size()`.

Games that are played in groups wait beside it until their group is whole, and fill it meanwhile as if they were in it.
The games of a group that is begun must therefore start even while it is full: then every group becomes whole, nothing
waits beside a full buffer for ever, and the learner finds what it needs.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from statistics import fmean
from typing import Any

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.compose import Stateful
from unstable_lite.reward_transformations.final import ComposeFinalRewardTransforms, FinalRewardTransform
from unstable_lite.reward_transformations.group import GroupBaseline, has_spread
from unstable_lite.reward_transformations.sampling import SamplingRewardTransform
from unstable_lite.reward_transformations.step import ComposeStepRewardTransforms, StepRewardTransform
from unstable_lite.rng import restore, state_of
from unstable_lite.types import GameRecord, PlayerTrajectory, Step


def staleness(step: Step, current_version: int) -> int:
    """Updates made since the step was sampled; version n is the policy after n updates."""
    return current_version - step.generation.adapter_version


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
        self._final = ComposeFinalRewardTransforms.of(final_reward_transformation)
        self._step = ComposeStepRewardTransforms.of(step_reward_transformation)
        self._sampling = sampling_reward_transformation
        self._rng = rng if isinstance(rng, random.Random) else random.Random(rng)
        self._chunks: list[list[Step]] = []
        self._size = 0
        self._arrival = asyncio.Event()
        self._room = asyncio.Event()
        """Who waits for either looks first, clears it, and looks again when it is set."""

    def size(self) -> int:
        """Steps that wait."""
        return self._size

    @property
    def is_full(self) -> bool:
        """No new game should start; what games in flight still bring is kept all the same."""
        return self._size >= self.max_buffer_size

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        raise NotImplementedError

    def add_game(self, record: GameRecord) -> None:
        """Add what is to be learnt from a finished game; nothing from a void one."""
        for trajectory in self._learnt_from(record):
            self.add_player_trajectory(trajectory)

    def has_batch(self, n: int, current_version: int) -> bool:
        """Whether a batch of `n` could be drawn now."""
        if not self.has_steps_for(n):  # nothing to look for: what is stale among them only makes them fewer
            return False
        self._drop_stale(current_version)
        return self.has_steps_for(n)

    def has_steps_for(self, n: int) -> bool:
        """Whether enough steps wait for a batch of `n`, the stale ones among them."""
        return self._size >= math.ceil(self.batch_delay * n)

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    def drain(self) -> list[Step]:
        """Take out every step, as it waits, without the sampling transform."""
        steps = list(chain.from_iterable(self._chunks))
        self._chunks = []
        self._size = 0
        self.drained += len(steps)
        self._room.set()
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
        restore(self._rng, state["rng"])
        for transform, saved in zip(self._transforms, state["transforms"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)

    @property
    def _transforms(self) -> tuple[object, object, object]:
        return self._final, self._step, self._sampling

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
        """Wait for `n` steps, then draw chunks uniformly until they hold them; cancelled, take none."""
        enough = math.ceil(self.batch_delay * n)
        if not 1 <= n <= enough <= self.max_buffer_size:
            raise ConfigError(
                f"batch_size {n}, times batch_delay_buffer {self.batch_delay:g}, must be between 1 and buffer_size "
                f"{self.max_buffer_size}: a full buffer starts no new game, so a larger batch would never come"
            )
        while not self.has_batch(n, current_version):
            self._arrival.clear()
            await self._arrival.wait()
        chunks: list[list[Step]] = []
        num_steps = 0
        while num_steps < n:
            chunks.append(self._pop_random())
            num_steps += len(chunks[-1])
        self._size -= num_steps
        self.taken += num_steps
        self._room.set()
        return chunks

    def _pop_random(self) -> list[Step]:
        index = self._rng.randrange(len(self._chunks))
        self._chunks[index], self._chunks[-1] = self._chunks[-1], self._chunks[index]
        return self._chunks.pop()

    def _drop_stale(self, current_version: int) -> None:
        limit = self.max_staleness
        if limit is None:
            return
        oldest = current_version - limit
        fresh = [chunk for chunk in self._chunks if min(s.generation.adapter_version for s in chunk) >= oldest]
        dropped = self._size - sum(map(len, fresh))
        if dropped:
            self._chunks = fresh
            self._size -= dropped
            self.dropped_stale += dropped
            self._room.set()


@dataclass(slots=True)
class _Group:
    """The games of one group that are over."""

    num_games: int = 0
    """Void ones too."""
    trajectories: dict[int, list[PlayerTrajectory]] = field(default_factory=dict)
    """By player."""


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

    @property
    def is_full(self) -> bool:
        return self._size + self._size_of_groups >= self.max_buffer_size

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
        for trajectory in self._learnt_from(record):
            if trajectory.steps:  # a player without a turn has no rewards of steps to compare
                self._set_rewards(trajectory)
                group.trajectories.setdefault(trajectory.pid, []).append(trajectory)
                self._size_of_groups += len(trajectory.steps)
        if group.num_games == self._group_size:
            del self._groups[record.spec.group_idx]
            for trajectories in group.trajectories.values():
                self._size_of_groups -= sum(len(trajectory.steps) for trajectory in trajectories)
                self._add_compared(trajectories, self._group_baseline)
            self._room.set()

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
        """Wait for `n` fresh steps; exactly `n`, drawn uniformly without replacement."""
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
