"""From the rewards of one group to advantages: `(rewards) -> advantages`, once per group and player.

A group is one start (env, seed, seats, opponents) played several times; what the games of a group have in common
is no merit of the policy, and falls away in the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

GroupBaseline = Callable[[Sequence[float]], list[float]]

_FLOOR = 1e-6
"""Of the standard deviation, relative to the largest reward: what is nearer to 0 is rounding."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the group tells one of its games from another."""
    given = np.asarray(rewards, dtype=np.float64)
    return bool(given.std() > _FLOOR * max(1.0, float(np.abs(given).max())))


def standardized(rewards: Sequence[float]) -> list[float]:
    """`grpo`: less the mean, over the standard deviation (Shao et al. 2024, "DeepSeekMath", outcome supervision)."""
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    given = np.asarray(rewards, dtype=np.float64)
    return [float(advantage) for advantage in (given - given.mean()) / given.std()]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """`rloo`: less the mean of the others (Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics")."""
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


GROUP_BASELINES: dict[str, GroupBaseline] = {"grpo": standardized, "rloo": leave_one_out}
