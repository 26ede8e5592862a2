"""Buffer of whole trajectories, for algorithms with a critic."""

from __future__ import annotations

from itertools import chain
from typing import ClassVar, Literal

from unstable_lite.errors import ConfigError
from unstable_lite.rollout.buffer import Buffer
from unstable_lite.types import PlayerTrajectory, Step


class EpisodeBuffer(Buffer):
    """Buffer of whole trajectories; only the last step gets the final reward, so that returns count it once."""

    batches: ClassVar[Literal["episodes"]] = "episodes"

    def add_player_trajectory(self, traj: PlayerTrajectory) -> None:
        if not traj.steps:
            return
        env_reward, baseline = self._final_reward(traj)
        last = len(traj.steps) - 1
        for index in range(len(traj.steps)):
            self._set_reward(traj, index, *((env_reward, baseline) if index == last else (0.0, 0.0)))
        self._put([list(traj.steps)])

    async def get_batch(self, n: int, current_version: int) -> list[list[Step]]:
        """Wait for `n` fresh steps; return the oldest episodes that hold them, at random among those of one version.

        An episode with one step that is too stale is dropped whole. The sampling transform gets the steps of all
        episodes in one list, and must keep their number and order.
        """
        episodes, sampling = await self._take(n, current_version), self.sampling_reward_transformation
        if sampling is None:
            return episodes
        steps = list(chain.from_iterable(episodes))
        transformed = sampling(steps)
        if len(transformed) != len(steps):
            raise ConfigError(f"{sampling!r} returned {len(transformed)} of {len(steps)} steps; it must keep all")
        remaining = iter(transformed)
        return [[next(remaining) for _ in episode] for episode in episodes]
