"""Transforms of one turn's reward: `(player_traj, step_index, reward) -> float`, once per step.

A transform with a parameter named `context` also gets the turn's `StepContext`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unstable_lite.reward_transformations.compose import Compose
from unstable_lite.types import PlayerTrajectory

StepRewardTransform = Callable[..., float]
"""`(player_traj, step_index, reward) -> float`, or `(player_traj, step_index, reward, context) -> float`."""


class ComposeStepRewardTransforms(Compose[StepRewardTransform]):
    """Applies its transforms in order."""

    ARGUMENTS = ("player_traj", "step_index", "reward")

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        for transform, with_context in self._calls:
            keywords = {"context": player_traj.steps[step_index].context} if with_context else {}
            reward = transform(player_traj, step_index, reward, **keywords)
        return reward


@dataclass
class RewardForFormat:
    """Adds `reward` if the answer has the form that the template asks for, else `penalty` (usually negative)."""

    reward: float = 0
    penalty: float = 0

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        is_right = player_traj.steps[step_index].format_feedback["correct_answer_format"]
        return reward + (self.reward if is_right else self.penalty)


@dataclass
class PenaltyForInvalidMove:
    """Adds `penalty` (usually negative) to an invalid move, `reward` to any other."""

    reward: float = 0
    penalty: float = 0

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        is_invalid = player_traj.steps[step_index].format_feedback["invalid_move"]
        return reward + (self.penalty if is_invalid else self.reward)


@dataclass
class PenaltyForCutOff:
    """Adds `penalty` (usually negative) to an answer that a limit on tokens ended."""

    penalty: float = 0

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        context = player_traj.steps[step_index].context
        return reward + (self.penalty if context is not None and context.is_cut_off else 0)


STEP: dict[str, Callable[..., StepRewardTransform]] = {
    "RewardForFormat": RewardForFormat,
    "PenaltyForCutOff": PenaltyForCutOff,
    "PenaltyForInvalidMove": PenaltyForInvalidMove,
}
"""Transforms by their names in `step_reward_transformation`."""
