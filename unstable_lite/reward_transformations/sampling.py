"""Transforms of a batch's rewards into advantages: `(steps) -> steps`, once per batch. Each step has its `context`.

A transform may also set a step's `weight`, or the `token_weights` of its completion.

A transform returns new Step objects in the same order and leaves the given ones unchanged, because a transcript or a
second sample may still need the rewards that the game gave.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.averages import Spread, cell_of
from unstable_lite.reward_transformations.compose import Compose
from unstable_lite.types import Step, Weights

SamplingRewardTransform = Callable[[Sequence[Step]], list[Step]]


class ComposeSamplingRewardTransforms(Compose[SamplingRewardTransform]):
    """Applies its transforms in order."""

    ARGUMENTS = ("steps",)

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        """Apply the transforms. Raises ConfigError if one does not return steps with finite rewards and weights."""
        for transform in self.transforms:
            given, who = transform(steps), f"{transform!r} of the sampling reward transformations"
            is_empty = bool(steps) and isinstance(given, Sequence) and not given
            if not isinstance(given, Sequence) or is_empty or not all(isinstance(step, Step) for step in given):
                raise ConfigError(f"{who} returned no steps: {given!r:.99}")
            for step in given:
                if not isinstance(step.reward, Real) or not math.isfinite(step.reward):
                    raise ConfigError(f"{who} returned the reward {step.reward!r}; it must be a finite number")
                if reason := weight_problem(step.weight, step.token_weights, step.generation.completion_ids):
                    raise ConfigError(f"{who} returned {reason}")
            steps = given
        # A message to the learner cannot hold every type of number, such as NumPy's.
        return [step if type(step.reward) is float else replace(step, reward=float(step.reward)) for step in steps]


class NormalizeRewards:
    """Subtracts the batch's mean; with `z_score`, also divides by its standard deviation.

    A step is compared with those of its env, seat and kinds of opponents: if their rewards before the baseline are all
    alike, its advantage is 0 and it enters neither mean nor standard deviation. The standard deviation is at least a
    tenth of its running average over batches.
    """

    def __init__(self, z_score: bool = False) -> None:
        self.z_score = z_score
        self._spread = Spread()

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        rewards = np.array([step.reward for step in steps], np.float64)
        results = rewards + [step.step_info.get("baseline", 0.0) for step in steps]
        cells = [cell_of(step.env_id, step.pid, step.context) for step in steps]
        is_different = self._spread.tells_apart(results, cells)
        rows_of_group: dict[str, list[int]] = defaultdict(list)
        for row in np.flatnonzero(is_different).tolist():
            rows_of_group[self._group(steps[row])].append(row)
        advantages = np.zeros(len(steps))
        for group, rows in rows_of_group.items():
            given = rewards[rows]
            advantages[rows] = self._spread.standardized(group, given) if self.z_score else given - given.mean()
        return [replace(step, reward=reward) for step, reward in zip(steps, advantages.tolist(), strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(z_score={self.z_score})"

    def state_dict(self) -> dict[str, Any]:
        return self._spread.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spread.load_state_dict(state)

    def _group(self, step: Step) -> str:  # noqa: ARG002
        """Return the key of the steps that share mean and standard deviation."""
        return ""


class NormalizeRewardsByEnv(NormalizeRewards):
    """Normalizes rewards within each env of the batch; see NormalizeRewards."""

    def _group(self, step: Step) -> str:
        return step.env_id


SAMPLING: dict[str, Callable[..., SamplingRewardTransform]] = {
    "NormalizeRewards": NormalizeRewards,
    "NormalizeRewardsByEnv": NormalizeRewardsByEnv,
}
"""Transforms by their names in `sampling_reward_transformation`."""


def weight_problem(weight: object, token_weights: object, completion: Sized) -> str | None:
    """Return the reason why these cannot be the weights of a step with this completion; None if they can."""
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        return f"the weight {weight!r:.99}; it must be a finite number of at least 0"
    if token_weights is None:
        return None
    try:
        given = np.asarray(token_weights, np.float32)
    except (TypeError, ValueError) as error:
        return f"token_weights that are not numbers: {error}"
    if given.shape != (len(completion),):
        return f"token_weights of shape {given.shape} for a completion of {len(completion)} tokens"
    if not (np.isfinite(given) & (given >= 0)).all():
        return "token_weights that are not all finite numbers of at least 0"
    return None


def plain_weights(step: Step) -> tuple[float, Weights | None]:
    """Return the weights of a step and of its tokens in the types that a message and a checkpoint hold."""
    of_tokens = step.token_weights
    return float(step.weight), None if of_tokens is None else np.asarray(of_tokens, np.float32)
