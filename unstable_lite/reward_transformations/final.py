"""Transforms of one player's reward for a game: `(reward, pid, env_id) -> float`, once per trajectory.

A transform with a parameter named `context` also gets the `StepContext` of the player's last turn.
Knows nothing of steps or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.averages import RunningMeans, cell_of
from unstable_lite.reward_transformations.compose import Compose
from unstable_lite.types import StepContext

FinalRewardTransform = Callable[..., float]
"""`(reward, pid, env_id) -> float`, or `(reward, pid, env_id, context) -> float`."""


class ComposeFinalRewardTransforms(Compose[FinalRewardTransform]):
    """Applies its transforms in order."""

    ARGUMENTS = ("reward", "pid", "env_id")

    def __call__(self, reward: float, pid: int, env_id: str, context: StepContext | None = None) -> float:
        return self.stages(reward, pid, env_id, context)[1]

    def stages(self, reward: float, pid: int, env_id: str, context: StepContext | None) -> tuple[float, float]:
        """Return the reward before the first transform with `is_baseline`, and after all of them."""
        before: float | None = None
        for transform, with_context in self._calls:
            if before is None and getattr(transform, "is_baseline", False):
                before = reward
            keywords = {"context": context} if with_context else {}
            reward = transform(reward, pid, env_id, **keywords)
        return (reward if before is None else before), reward


class RoleAdvantageFormatter:
    """Subtracts the average reward of the player's seat against opponents of the same kinds, over all envs.

    The average is exponential with rate `tau`, and its initial bias is corrected. A reward is compared with the average
    of the earlier ones; the first reward is compared with `role_adv`.
    Source: Liu et al. 2025, "SPIRAL", arXiv:2506.24119 (role-conditioned advantage estimation, decay 0.95).
    """

    is_baseline = True

    def __init__(self, role_adv: float = 0.0, tau: float = 0.05) -> None:
        if not 0 <= tau <= 1:
            raise ConfigError(f"tau = {tau}: must be between 0 and 1")
        self._averages = RunningMeans(tau, role_adv)

    def __call__(self, reward: float, pid: int, env_id: str, context: StepContext | None = None) -> float:
        cell = cell_of(self._scope(env_id), pid, context)
        average = self._averages.mean(cell)
        self._averages.add(cell, reward)
        return reward - average

    def __repr__(self) -> str:
        return f"RoleAdvantageFormatter(role_adv={self._averages.initial}, tau={self._averages.rate})"

    def state_dict(self) -> dict[str, Any]:
        return self._averages.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages.load_state_dict(state)

    def _scope(self, env_id: str) -> str:  # noqa: ARG002
        """Return the key of the envs that share averages."""
        return ""


class RoleAdvantageByEnvFormatter(RoleAdvantageFormatter):
    """Subtracts the average reward of the player's seat in this env; see RoleAdvantageFormatter."""

    def __init__(self, default_role_adv: float = 0.0, tau: float = 0.05) -> None:
        super().__init__(default_role_adv, tau)

    def __repr__(self) -> str:
        return f"RoleAdvantageByEnvFormatter(default_role_adv={self._averages.initial}, tau={self._averages.rate})"

    def _scope(self, env_id: str) -> str:
        return env_id


@dataclass
class WinDrawLossFormatter:
    """Replaces a score by one of three values: above `draw_score` is a win, below it a loss."""

    win_reward: float = 1.0
    draw_reward: float = 0.0
    loss_reward: float = -1.0
    draw_score: float = 0.0

    def __call__(self, reward: float, pid: int, env_id: str) -> float:  # noqa: ARG002
        if reward == self.draw_score:
            return self.draw_reward
        return self.win_reward if reward > self.draw_score else self.loss_reward


FINAL: dict[str, Callable[..., FinalRewardTransform]] = {
    "RoleAdvantageFormatter": RoleAdvantageFormatter,
    "RoleAdvantageByEnvFormatter": RoleAdvantageByEnvFormatter,
    "WinDrawLossFormatter": WinDrawLossFormatter,
}
"""Transforms by their names in `final_reward_transformation`."""
