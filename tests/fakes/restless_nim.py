"""A Nim env whose piles differ from game to game, with any seed."""

import itertools
from typing import Any

from textarena.envs.Nim.env import NimEnv
from textarena.envs.registration import ENV_REGISTRY, register

_games = itertools.count(3)


class RestlessNim(NimEnv):
    def reset(self, num_players: int, seed: int | None = None) -> Any:
        self.initial_piles = [next(_games), 2]
        return super().reset(num_players, seed)


register(
    id="RestlessNim-v0",
    entry_point="fakes.restless_nim:RestlessNim",
    default_wrappers=ENV_REGISTRY["Nim-v0-train"].default_wrappers,
    **ENV_REGISTRY["Nim-v0-train"].kwargs,
)
