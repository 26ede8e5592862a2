"""Buffer of single steps, for algorithms that treat each step alike.

Games that are played in groups wait outside the buffer until their group is complete, but count as if they were in it.
Once a group has begun, its games must therefore start even if the buffer is full. Then every group is completed, none
waits beside a full buffer for ever, and the learner gets its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

from unstable_lite.reward_transformations.group import GroupBaseline
from unstable_lite.reward_transformations.spread import differ
from unstable_lite.rollout.buffer import Buffer
from unstable_lite.types import GameRecord, PlayerTrajectory, Step


@dataclass(slots=True)
class _Group:
    """Finished games of one group."""

    num_games: int = 0
    """Number of finished games, including void ones."""
    trajectories: dict[int, list[PlayerTrajectory]] = field(default_factory=dict)
    """Trajectories by player."""
    born: int | None = None
    """Earliest birth of these games (see `InFlight`)."""


@dataclass(eq=False, repr=False)
class StepBuffer(Buffer):
    """Buffer of single steps; each carries its player's final reward, or its advantage within its group."""

    group_size: int = 1
    group_baseline: GroupBaseline | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group_counts = {"whole": 0, "without_spread": 0, "of_one": 0}
        """Numbers of one player's completed groups: all; with equal rewards (advantage 0); of one game (left out)."""
        self._groups: dict[int, _Group] = {}

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        """Apply the final transform once and the step transform to each step; `step_info` keeps both results.

        A player without a turn enters no average: its result says nothing about the policy.
        """
        if not traj.steps:
            return
        self._set_rewards(traj)
        self._put([[step] for step in traj.steps])

    def add_game(self, record: GameRecord) -> None:
        """Add a finished game's steps once its group is complete; a void game makes its group smaller."""
        if record.spec.group_idx is None or self.group_baseline is None:
            super().add_game(record)
            return
        group = self._groups.setdefault(record.spec.group_idx, _Group())
        group.num_games += 1
        trajectories, born, _ = self._end_game(record)
        group.born = born if group.born is None else min(group.born, born)
        for trajectory in trajectories:
            if trajectory.steps:  # a player without a turn has no step rewards to compare
                self._set_rewards(trajectory)
                group.trajectories.setdefault(trajectory.pid, []).append(trajectory)
                self.steps_in_groups += len(trajectory.steps)
        if group.num_games == self.group_size:
            del self._groups[record.spec.group_idx]
            before = self.added
            for of_player in group.trajectories.values():
                self.steps_in_groups -= sum(len(trajectory.steps) for trajectory in of_player)
                self._add_compared(of_player, self.group_baseline)
            if self.in_flight is not None:
                self.in_flight.arrive(group.born, self.added - before)
        self._make_room()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"groups": dict(self.group_counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.group_counts |= state["groups"]

    def _add_compared(self, trajectories: list[PlayerTrajectory], baseline: GroupBaseline) -> None:
        """Compare the final rewards of one player's group; each step gets its trajectory's advantage.

        The reward that step transforms added stays with its own step, minus the group's mean: an invalid move costs the
        turn that made it, regardless of the game's length.
        """
        self.group_counts["whole"] += 1
        if len(trajectories) == 1:
            self.group_counts["of_one"] += 1
            return
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        finals = [trajectory.steps[0].step_info["env_reward"] for trajectory in trajectories]
        added = [step.step_info["step_reward"] - step.step_info["env_reward"] for step in steps]
        usual = fmean(added)
        is_alike = not differ(added)
        self.group_counts["without_spread"] += is_alike and not differ(finals)
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
        """Wait for `n` fresh steps; return exactly `n`: the oldest, at random among those of one version."""
        steps = list(chain.from_iterable(await self._take(n, current_version)))
        return steps if self.sampling_reward_transformation is None else self.sampling_reward_transformation(steps)
