"""A role average over all opponents, as SPIRAL's.

`final_reward_transformation = ["bench.role_average:RoleAverage"]` in a study run from this repository.
"""

from __future__ import annotations

from unstable_lite.reward_transformations import RoleAdvantageByEnvFormatter
from unstable_lite.types import StepContext


class RoleAverage(RoleAdvantageByEnvFormatter):
    """Subtracts the average reward of a seat in its env over all opponents."""

    def __call__(self, reward: float, pid: int, env_id: str, context: StepContext | None = None) -> float:  # noqa: ARG002
        return super().__call__(reward, pid, env_id)
