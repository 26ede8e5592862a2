"""Baselines that turn one group's rewards into advantages: `(rewards) -> advantages`, once per group and player.

A group is one start (env, seed, seats, opponents) played several times. The comparison within a group cancels the
effects that all its games share, which are not the policy's merit. `across_seats` is for groups that change seats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from unstable_lite.reward_transformations.averages import differ

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
