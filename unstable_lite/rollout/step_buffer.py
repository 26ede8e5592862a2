"""Buffer of single steps, for algorithms that treat each step alike.

Games that are played in groups wait outside the buffer until their group is complete, but count as if they were in it.
Once a group has begun, its games must therefore start even if the buffer is full. Then every group is completed, none
waits beside a full buffer for ever, and the learner gets its steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, stdev
from typing import Any

import numpy as np

from unstable_lite.config.reference import from_reference
from unstable_lite.reward_transformations.averages import Spread, cell_of, differ
from unstable_lite.reward_transformations.group import GroupBaseline, SeatReward, across_seats
from unstable_lite.rollout.buffer import Buffer
from unstable_lite.types import GameRecord, PlayerTrajectory, Step


@dataclass(slots=True)
class _Group:
    """Finished games of one group."""

    num_games: int = 0
    """Number of finished games, including void ones."""
    trajectories: dict[int, list[PlayerTrajectory]] = field(default_factory=dict)
    """Trajectories that are compared with each other: by player, or all of them under one key."""
    born: int | None = None
    """Earliest birth of these games (see `InFlight`)."""


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
        self._groups: dict[int, _Group] = {}
        self._spread = Spread()
        """Newest results of earlier batches, if games are duplicates."""

    def add_game(self, record: GameRecord) -> None:
        """Add a finished game's steps once its group is complete; a void game makes its group smaller."""
        if record.spec.group_idx is None or not (self.group_baseline or self.is_duplicate):
            super().add_game(record)
            return
        group = self._groups.setdefault(record.spec.group_idx, _Group())
        group.num_games += 1
        trajectories, born, _ = self._end_game(record)
        group.born = born if group.born is None else min(group.born, born)
        for trajectory in trajectories:
            if trajectory.steps:  # a player without a turn has no step rewards to compare
                self._set_rewards(trajectory)
                compared_with = 0 if self.is_duplicate else trajectory.pid
                group.trajectories.setdefault(compared_with, []).append(trajectory)
                self.steps_in_groups += len(trajectory.steps)
        if group.num_games == self.group_size:
            del self._groups[record.spec.group_idx]
            before = self.added
            for compared in group.trajectories.values():
                self.steps_in_groups -= sum(len(trajectory.steps) for trajectory in compared)
                self._add_compared(compared)
            if self.in_flight is not None:
                self.in_flight.arrive(group.born, self.added - before)
        self._make_room()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"groups": dict(self.group_counts), "spread": self._spread.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.group_counts |= state["groups"]
        if "spread" in state:  # a checkpoint from before there were duplicates has none
            self._spread.load_state_dict(state["spread"])

    def _add_compared(self, trajectories: Sequence[PlayerTrajectory]) -> None:
        """Compare the final rewards of trajectories; each step gets its trajectory's advantage.

        The reward that step transforms added stays with its own step, minus the group's mean: an invalid move costs the
        turn that made it, regardless of the game's length.
        """
        self.group_counts["whole"] += 1
        finals = [trajectory.steps[0].step_info["env_reward"] for trajectory in trajectories]
        advantages: Sequence[float | None] = [None]  # there is none to compare it with
        if self.is_duplicate:
            of_games = zip(trajectories, finals, strict=True)
            advantages = across_seats([SeatReward(one.game_idx, one.pid, final) for one, final in of_games])
        elif self.group_baseline is not None and len(finals) > 1:
            advantages = self.group_baseline(finals)
        advantage_of = zip(trajectories, advantages, strict=True)
        compared = [(trajectory, advantage) for trajectory, advantage in advantage_of if advantage is not None]
        self.group_counts["of_one"] += len(compared) < len(trajectories)
        if not compared:
            return
        steps = [step for trajectory, _ in compared for step in trajectory.steps]
        if not self.is_duplicate:
            error = stdev(finals) / math.sqrt(len(finals))
            for step in steps:
                step.step_info["return_std_error"] = error
        added = [step.step_info["step_reward"] - step.step_info["env_reward"] for step in steps]
        usual = fmean(added)
        is_alike = not differ(added)
        self.group_counts["without_spread"] += is_alike and not differ(finals)
        of_steps = chain.from_iterable([advantage] * len(trajectory.steps) for trajectory, advantage in compared)
        for step, advantage, reward in zip(steps, of_steps, added, strict=True):
            step.reward = advantage + (0.0 if is_alike else reward - usual)
        self._put([[step] for step in steps])

    async def get_batch(self, n: int, current_version: int) -> list[Step]:
        """Wait for `n` fresh steps; return exactly `n`: the oldest, at random among those of one version."""
        steps = list(chain.from_iterable(await self._take(n, current_version)))
        if self.is_duplicate:
            steps = self._without_alike(steps)
        return steps if self.sampling_reward_transformation is None else self.sampling_reward_transformation(steps)

    def _without_alike(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps with advantage 0 where all results of an env, seat and kind of opponents are alike.

        Such results show nothing about actions, but their sum across seats is not 0.
        """
        results = np.array([step.step_info["step_reward"] for step in steps], np.float64)
        cells = [cell_of(step.env_id, step.pid, step.context) for step in steps]
        is_different = self._spread.tells_apart(results, cells).tolist()
        return [
            step if differs else replace(step, reward=0.0) for step, differs in zip(steps, is_different, strict=True)
        ]
