"""A control: rewards that say nothing about play.

`final_reward_transformation = ["bench.shuffled_rewards:ShuffledRewards", …]` in a study run from this repository.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

WINDOW = 1024
"""Earlier games of a seat from which a reward is drawn."""


class ShuffledRewards:
    """Gives a player the reward of a random earlier game at the same seat of the same env; 0 in a seat's first game.

    Each seat's rewards keep their mean and spread, and lose every relation to the turns that are trained on them and to
    the other seat's.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._earlier: dict[str, deque[float]] = {}

    def __call__(self, reward: float, pid: int, env_id: str) -> float:
        earlier = self._earlier.setdefault(f"{env_id} {pid}", deque(maxlen=WINDOW))
        drawn = self._random.choice(earlier) if earlier else 0.0
        earlier.append(reward)
        return drawn

    def state_dict(self) -> dict[str, Any]:
        version, internal, following = self._random.getstate()
        random_state = [version, list(internal), following]
        return {"random": random_state, "earlier": {cell: list(rewards) for cell, rewards in self._earlier.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, internal, following = state["random"]
        self._random.setstate((version, tuple(internal), following))
        self._earlier = {cell: deque(rewards, maxlen=WINDOW) for cell, rewards in state["earlier"].items()}
