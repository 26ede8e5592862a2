"""Baselines that turn one group's rewards into advantages: `(rewards) -> advantages`, once per group and player.

A group is one start (env, seed, seats, opponents) played several times. The comparison within a group cancels the
effects that all its games share, which are not the policy's merit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

GroupBaseline = Callable[[Sequence[float]], list[float]]

_FLOOR = 1e-6
"""Standard deviation, relative to the largest reward, up to which differences count as rounding errors."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of the group differ."""
    given = np.asarray(rewards, dtype=np.float64)
    return bool(given.std() > _FLOOR * max(1.0, float(np.abs(given).max())))


def standardized(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean, divided by their standard deviation (`grpo`).

    Source: Shao et al. 2024, "DeepSeekMath", outcome supervision.
    """
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    given = np.asarray(rewards, dtype=np.float64)
    return [float(advantage) for advantage in (given - given.mean()) / given.std()]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the others (`rloo`).

    Sources: Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics".
    """
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


GROUP_BASELINES: dict[str, GroupBaseline] = {"grpo": standardized, "rloo": leave_one_out}
