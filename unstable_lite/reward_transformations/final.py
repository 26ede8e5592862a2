"""What a game's outcome is worth to one player: `(reward, pid, env_id) -> float`, once per trajectory.

A transform with a parameter named `context` is also given the `StepContext` of the player's last turn.
Owns the running averages behind role advantages. Knows nothing of steps or batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.compose import Compose
from unstable_lite.types import StepContext

K = TypeVar("K", int, str)

FinalRewardTransform = Callable[..., float]
"""`(reward, pid, env_id) -> float`, or `(reward, pid, env_id, context) -> float`."""


class ComposeFinalRewardTransforms(Compose[FinalRewardTransform]):
    """Apply in order."""

    ARGUMENTS = ("reward", "pid", "env_id")

    def __call__(self, reward: float, pid: int, env_id: str, context: StepContext | None = None) -> float:
        for transform, with_context in self._calls:
            keywords = {"context": context} if with_context else {}
            reward = transform(reward, pid, env_id, **keywords)
        return reward


class RoleAdvantageFormatter:
    """Subtract what this player's seat earns on average, over all envs.

    The average is exponential with rate `tau`, starts at `role_adv`, and is updated before it is subtracted.
    """

    def __init__(self, role_adv: float = 0.0, tau: float = 0.001) -> None:
        _check_tau(tau)
        self.initial = role_adv
        self.tau = tau
        self.role_advantage: dict[int, float] = {}

    def __call__(self, reward: float, pid: int, env_id: str) -> float:  # noqa: ARG002
        average = _towards(self.role_advantage.get(pid, self.initial), reward, self.tau)
        self.role_advantage[pid] = average
        return reward - average

    def __repr__(self) -> str:
        return f"RoleAdvantageFormatter(role_adv={self.initial}, tau={self.tau})"

    def state_dict(self) -> dict[str, Any]:
        return {"role_advantage": _with_keys(str, self.role_advantage)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.role_advantage = _with_keys(int, state["role_advantage"])


class RoleAdvantageByEnvFormatter:
    """Subtract what this player's seat earns on average in this env; see RoleAdvantageFormatter."""

    def __init__(self, default_role_adv: float = 0.0, tau: float = 0.001) -> None:
        _check_tau(tau)
        self.initial = default_role_adv
        self.tau = tau
        self.role_advantage: dict[str, dict[int, float]] = {}

    def __call__(self, reward: float, pid: int, env_id: str) -> float:
        averages = self.role_advantage.setdefault(env_id, {})
        averages[pid] = _towards(averages.get(pid, self.initial), reward, self.tau)
        return reward - averages[pid]

    def __repr__(self) -> str:
        return f"RoleAdvantageByEnvFormatter(default_role_adv={self.initial}, tau={self.tau})"

    def state_dict(self) -> dict[str, Any]:
        by_env = {env: _with_keys(str, averages) for env, averages in self.role_advantage.items()}
        return {"role_advantage": by_env}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        by_env = state["role_advantage"].items()
        self.role_advantage = {env: _with_keys(int, averages) for env, averages in by_env}


class WinDrawLossFormatter:
    """Replace a score by one of three values: above `draw_score` is a win, below it a loss."""

    def __init__(
        self,
        win_reward: float = 1.0,
        draw_reward: float = 0.0,
        loss_reward: float = -1.0,
        draw_score: float = 0.0,
    ) -> None:
        self.win_reward = win_reward
        self.draw_reward = draw_reward
        self.loss_reward = loss_reward
        self.draw_score = draw_score

    def __call__(self, reward: float, pid: int, env_id: str) -> float:  # noqa: ARG002
        if reward == self.draw_score:
            return self.draw_reward
        return self.win_reward if reward > self.draw_score else self.loss_reward

    def __repr__(self) -> str:
        values = f"{self.win_reward}, {self.draw_reward}, {self.loss_reward}, draw_score={self.draw_score}"
        return f"WinDrawLossFormatter({values})"


def _check_tau(tau: float) -> None:
    if not 0 <= tau <= 1:
        raise ConfigError(f"tau = {tau}: must be between 0 and 1")


def _with_keys(key: Callable[[Any], K], averages: Mapping[Any, float]) -> dict[K, float]:
    """JSON has only strings for keys."""
    return {key(pid): average for pid, average in averages.items()}


def _towards(average: float, reward: float, tau: float) -> float:
    return (1 - tau) * average + tau * reward
