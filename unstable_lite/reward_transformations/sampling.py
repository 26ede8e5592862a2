"""From the rewards of a batch to its advantages: `(steps) -> steps`, once per batch. Each step has its `context`.

A transform returns new Step objects in the same order and leaves those it was given as they are: whoever
still holds them (a transcript, a second sample) sees the rewards that the game gave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real

import numpy as np

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.compose import Compose
from unstable_lite.types import Step

SamplingRewardTransform = Callable[[Sequence[Step]], list[Step]]

_EPSILON = 1e-8


class ComposeSamplingRewardTransforms(Compose[SamplingRewardTransform]):
    """Apply in order."""

    ARGUMENTS = ("steps",)

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        """Raises ConfigError for a transform that does not return steps, or makes no number of a reward."""
        for transform in self.transforms:
            given, who = transform(steps), f"{transform!r} of the sampling reward transformations"
            is_empty = bool(steps) and isinstance(given, Sequence) and not given
            if not isinstance(given, Sequence) or is_empty or not all(isinstance(step, Step) for step in given):
                raise ConfigError(f"{who} returned no steps: {given!r:.99}")
            for step in given:
                if not isinstance(step.reward, Real) or not math.isfinite(step.reward):
                    raise ConfigError(f"{who} made {step.reward!r} of a reward; it must be a finite number")
            steps = given
        # One of numpy's, for example, is of no type that the learner is sent.
        return [step if type(step.reward) is float else replace(step, reward=float(step.reward)) for step in steps]


class NormalizeRewards:
    """Subtract the batch's mean; with `z_score` also divide by its standard deviation."""

    def __init__(self, z_score: bool = False) -> None:
        self.z_score = z_score

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        rewards = normalized([step.reward for step in steps], self.z_score)
        return [replace(step, reward=reward) for step, reward in zip(steps, rewards, strict=True)]

    def __repr__(self) -> str:
        return f"NormalizeRewards(z_score={self.z_score})"


class NormalizeRewardsByEnv:
    """NormalizeRewards within each env of the batch."""

    def __init__(self, z_score: bool = False) -> None:
        self.z_score = z_score

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        rows_of_env: dict[str, list[int]] = defaultdict(list)
        for row, step in enumerate(steps):
            rows_of_env[step.env_id].append(row)
        result = list(steps)
        for rows in rows_of_env.values():
            rewards = normalized([steps[row].reward for row in rows], self.z_score)
            for row, reward in zip(rows, rewards, strict=True):
                result[row] = replace(steps[row], reward=reward)
        return result

    def __repr__(self) -> str:
        return f"NormalizeRewardsByEnv(z_score={self.z_score})"


def normalized(rewards: Sequence[float], z_score: bool) -> list[float]:
    """Centred, optionally scaled. Equal rewards become zeros: rounding noise is not scaled up to a signal."""
    if not rewards:
        return []
    given = np.asarray(rewards, dtype=np.float64)
    centred = given - given.mean()
    if z_score:
        centred = centred / (centred.std() + _EPSILON * max(1.0, float(np.abs(given).max())))
    return [float(reward) for reward in centred]
