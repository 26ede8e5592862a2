"""Baselines that turn one group's rewards into advantages: `(rewards) -> advantages`, once per group and player.

A group is one start (env, seed, seats, opponents) played several times. The comparison within a group cancels the
effects that all its games share, which are not the policy's merit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from unstable_lite.reward_transformations.spread import differ

GroupBaseline = Callable[[Sequence[float]], list[float]]


def standardized(rewards: Sequence[float]) -> list[float]:
    """Return the rewards minus their mean, divided by their standard deviation (`grpo`).

    Source: Shao et al. 2024, "DeepSeekMath", outcome supervision.
    """
    if not differ(rewards):
        return [0.0] * len(rewards)
    given = np.asarray(rewards, dtype=np.float64)
    return [float(advantage) for advantage in (given - given.mean()) / given.std()]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the mean of the others (`rloo`).

    Sources: Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics".
    """
    if not differ(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


GROUP_BASELINES: dict[str, GroupBaseline] = {"grpo": standardized, "rloo": leave_one_out}
