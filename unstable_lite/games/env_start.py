"""Start the env of one game in this process: TextArena's, OpenSpiel's, or a question."""

from __future__ import annotations

import os
from pathlib import Path

from unstable_lite.config.env_ids import is_judged, is_openspiel
from unstable_lite.config.games import EnvSpec
from unstable_lite.games.environments import Environment
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.questions import QuestionGame
from unstable_lite.transport.messages import MakeEnv
from unstable_lite.types import GameSpec

LocalEnvironment = Environment | OpenSpielGame | QuestionGame
NO_GAME = -1
"""Content of the call file of an env process in which no call is running."""


def environment_of(spec: EnvSpec | GameSpec | MakeEnv, seed: int) -> LocalEnvironment:
    """Return a new game as `spec` describes it.

    Passes through the exceptions of TextArena. Raises ConfigError for a game of OpenSpiel or a file of questions that
    cannot be loaded.
    """
    env_id, num_players = spec.env_id, spec.num_players
    if is_judged(env_id):
        return QuestionGame(env_id, num_players, seed, spec.error_allowance)
    if is_openspiel(env_id):
        return OpenSpielGame(env_id, num_players, seed, spec.reward_scale, spec.error_allowance)
    env_kwargs = tuple(dict(spec.env_kwargs).items())
    return Environment(env_id, num_players, seed, spec.observation, env_kwargs, spec.error_allowance)


def file_of_call(endpoint: str, name: str) -> Path:
    """Return the file in which an env process records the game whose call is running, to be read after its death.

    It is in the socket's directory, which only this user can read.
    """
    return Path(endpoint.removeprefix("ipc://")).with_name(f"{name}.call")


def game_under_way(path: Path) -> int:
    """Return the game whose call is running, or was running when the process died."""
    return int.from_bytes(path.read_bytes(), "little", signed=True)


def write_game(file: int, game: int) -> None:
    os.pwrite(file, game.to_bytes(8, "little", signed=True), 0)
