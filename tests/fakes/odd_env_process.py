"""The process of isolated envs, with a Nim that reacts to six odd moves."""

import os
import signal
import time
from typing import Any

import textarena.envs.Nim.env as nim

from unstable_lite.games import env_worker
from unstable_lite.games.env_worker import NO_GAME, main

__all__ = ["main"]

HALF_A_CHARACTER = "\ud83d"
step = nim.NimEnv.step
write_game = env_worker.write_game


def odd_step(self: Any, action: str) -> Any:
    if action == "[9 1]":
        sleep_past_every_signal()
    if action == "[9 2]":
        raise ValueError("nine piles")
    if action == "[9 3]":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "[9 4]":
        self.state.game_state["piles"][2] = HALF_A_CHARACTER
        return step(self, "[0 1]")
    if action == "[9 5]":
        time.sleep(1.0)
        return step(self, "[0 1]")
    if action == "[9 6]":
        env_worker.write_game = write_slowly
        return step(self, "[0 1]")
    return step(self, action)


def write_slowly(file: int, game: int) -> None:
    if game == NO_GAME:
        time.sleep(1.0)
    write_game(file, game)


def sleep_past_every_signal() -> None:
    time.sleep(1000)


nim.NimEnv.step = odd_step
