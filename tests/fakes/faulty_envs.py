"""Envs that break one promise each: who is to move, a turn, games that the seed determines, a bare id, a board."""

from __future__ import annotations

import itertools
from typing import Any

from textarena.envs.Nim.env import NimEnv
from textarena.envs.registration import ENV_REGISTRY, register
from textarena.wrappers import LLMObservationWrapper

NUMBERS = itertools.count()
TURNS: dict[str, Any] = {
    "Beyond": lambda turn: (2, turn[1]),
    "Negative": lambda turn: (-1, turn[1]),
    "Fraction": lambda turn: (0.7, turn[1]),
    "Named": lambda turn: ("zero", turn[1]),
    "Nothing": lambda turn: None,
    "Counting": lambda turn: (turn[0], f"Game {next(NUMBERS)}"),
}

nim = ENV_REGISTRY["Nim-v0-train"]
for name, change in TURNS.items():

    class Faulty(NimEnv):
        change = staticmethod(change)

        def get_observation(self) -> Any:
            return self.change(super().get_observation())

    register(id=f"{name}-v0", entry_point=Faulty, **nim.kwargs)

register("Wrapped-v0", NimEnv, [LLMObservationWrapper], piles=[3, 4])
for name in ("Quiet-v0", "Quiet-v0-raw"):
    register(name, "textarena.envs.IteratedRockPaperScissors.env:IteratedRockPaperScissorsEnv", [], num_rounds=2)
