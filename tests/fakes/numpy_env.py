"""A Nim env that keeps the state of a game in arrays, so that its numbers are NumPy's, and that prints the time."""

import time
from typing import Any

import numpy as np
from textarena.envs.Nim.env import NimEnv
from textarena.envs.registration import ENV_REGISTRY, register


class NumpyNim(NimEnv):
    def get_observation(self) -> Any:
        pid, seen = super().get_observation()
        print(time.time_ns())  # noqa: T201
        return np.int64(pid), seen

    def close(self) -> Any:
        rewards, game_info = super().close()
        remarks = {
            np.int64(pid): about | {"invalid_move": np.bool_(about["invalid_move"]), "piles": np.int64(3)}
            for pid, about in game_info.items()
        }
        return {np.int64(pid): np.float32(reward) for pid, reward in rewards.items()}, remarks


register(
    id="NumpyNim-v0",
    entry_point="fakes.numpy_env:NumpyNim",
    default_wrappers=ENV_REGISTRY["Nim-v0-train"].default_wrappers,
    **ENV_REGISTRY["Nim-v0-train"].kwargs,
)
