"""An env whose first observation depends on the order of a set, and so on the hash seed of the process."""

import random

import textarena as ta
from textarena.envs.Nim.env import NimEnv
from textarena.envs.registration import ENV_REGISTRY, register

WORDS = {f"word {number}" for number in range(50)}


class WordNim(NimEnv):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        super().reset(num_players=num_players, seed=seed)
        word = random.choice(list(WORDS))
        self.state.add_observation(message=f"The word is {word}.", observation_type=ta.ObservationType.GAME_MESSAGE)


nim = ENV_REGISTRY["Nim-v0-train"]
register(id="WordNim-v0", entry_point=WordNim, default_wrappers=nim.default_wrappers, **nim.kwargs)
