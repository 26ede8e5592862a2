"""Baselines that turn one group's rewards into advantages: `(rewards) -> advantages`, once per group and player.

A group is one start (env, seed, seats, opponents) played several times. The comparison within a group cancels the
effects that all its games share, which are not the policy's merit. `across_seats` is for groups that change seats.
`compare` gives each step of a complete group its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from unstable_lite.reward_transformations.averages import Spread, cell_of, differ
from unstable_lite.types import PlayerTrajectory, Step

GroupBaseline = Callable[[Sequence[float]], list[float]]


def standardized(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean, divided by their standard deviation (`grpo`).

    Source: Shao et al. 2024, "DeepSeekMath", outcome supervision.
    """
    if not differ(rewards):
        return [0.0] * len(rewards)
    given = np.asarray(rewards, dtype=np.float64)
    return [float(advantage) for advantage in (given - given.mean()) / given.std()]


def centred(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean (`mean`).

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO), arXiv:2503.20783.
    """
    mean = fmean(rewards)
    return [reward - mean for reward in rewards] if differ(rewards) else [0.0] * len(rewards)


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the others (`rloo`).

    Sources: Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics".
    """
    if not differ(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


class SeatReward(NamedTuple):
    """Reward of one player in a game of a group whose games are one deal, played from both seats."""

    game_idx: int
    pid: int
    reward: float


def across_seats(rewards: Sequence[SeatReward]) -> list[float | None]:
    """Return each reward plus the mean reward at the other seat in the group's other games (`duplicate`).

    The luck of a deal has opposite signs at both seats of a zero-sum game, so it cancels in the sum. The other games do
    not depend on this game's actions, so adding their rewards does not bias the policy gradient. None for a reward
    without such a game. The mean is not 0: it is the sum of the policy's values at both seats.
    """
    advantages: list[float | None] = []
    for own in rewards:
        others = [other.reward for other in rewards if other.pid != own.pid and other.game_idx != own.game_idx]
        advantages.append(own.reward + fmean(others) if others else None)
    return advantages


GROUP_BASELINES: dict[str, GroupBaseline] = {"grpo": standardized, "mean": centred, "rloo": leave_one_out}


@dataclass(slots=True)
class Group:
    """Finished games of one group."""

    num_games: int = 0
    """Number of finished games, including void ones."""
    trajectories: dict[int, list[PlayerTrajectory]] = field(default_factory=dict)
    """Trajectories that are compared with each other: by player, or all of them under one key."""
    born: int | None = None
    """Earliest birth of these games (see `InFlight`)."""


def compare(
    trajectories: Sequence[PlayerTrajectory], baseline: GroupBaseline | None, counts: dict[str, int]
) -> list[Step]:
    """Compare the final rewards of trajectories; return their steps, each with its trajectory's advantage.

    The reward that step transforms added stays with its own step, minus the group's mean: an invalid move costs the
    turn that made it, regardless of the game's length. baseline: None if the games are one deal, played from both
    seats. counts: `StepBuffer.group_counts`.
    """
    counts["whole"] += 1
    finals = [trajectory.steps[0].step_info["env_reward"] for trajectory in trajectories]
    advantages: Sequence[float | None] = [None]  # there is none to compare it with
    if baseline is None:
        of_games = zip(trajectories, finals, strict=True)
        advantages = across_seats([SeatReward(one.game_idx, one.pid, final) for one, final in of_games])
    elif len(finals) > 1:
        advantages = baseline(finals)
    advantage_of = zip(trajectories, advantages, strict=True)
    compared = [(trajectory, advantage) for trajectory, advantage in advantage_of if advantage is not None]
    counts["of_one"] += len(compared) < len(trajectories)
    if not compared:
        return []
    steps = [step for trajectory, _ in compared for step in trajectory.steps]
    added = [step.step_info["step_reward"] - step.step_info["env_reward"] for step in steps]
    usual = fmean(added)
    is_alike = not differ(added)
    group_is_alike = is_alike and not differ(finals)
    counts["without_spread"] += group_is_alike
    if baseline is not None:
        error = stdev(finals) / math.sqrt(len(finals))
        for step in steps:
            step.step_info.update(return_std_error=error, group_is_alike=group_is_alike)
    of_steps = chain.from_iterable([advantage] * len(trajectory.steps) for trajectory, advantage in compared)
    for step, advantage, reward in zip(steps, of_steps, added, strict=True):
        step.reward = advantage + (0.0 if is_alike else reward - usual)
    return steps


def without_alike(steps: Sequence[Step], spread: Spread) -> list[Step]:
    """Return the steps with advantage 0 where all results of an env, seat and kind of opponents are alike.

    Such results show nothing about actions, but their sum across seats is not 0. spread: of earlier batches.
    """
    results = np.array([step.step_info["step_reward"] for step in steps], np.float64)
    cells = [cell_of(step.env_id, step.pid, step.context) for step in steps]
    is_different = spread.tells_apart(results, cells).tolist()
    return [step if differs else replace(step, reward=0.0) for step, differs in zip(steps, is_different, strict=True)]
