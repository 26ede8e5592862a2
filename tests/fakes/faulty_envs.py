"""Envs that break one promise each: who is to move, a turn, or games that the seed determines."""

from __future__ import annotations

import itertools
from typing import Any

from textarena.envs.Nim.env import NimEnv
from textarena.envs.registration import ENV_REGISTRY, register

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
