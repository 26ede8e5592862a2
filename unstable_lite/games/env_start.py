"""Start the env of one game in this process: TextArena's or OpenSpiel's."""

from __future__ import annotations

from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.games.environments import Environment
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.types import Observation

LocalEnvironment = Environment | OpenSpielGame


def start_environment(
    env_id: str,
    num_players: int,
    seed: int,
    observation: Observation = "env",
    reward_scale: float | None = None,
) -> LocalEnvironment:
    """Return a new game. `reward_scale`: factor of OpenSpiel's utilities; default: 1 / the largest size of one.

    Passes through the exceptions of TextArena. Raises ConfigError for a game of OpenSpiel that cannot be loaded.
    """
    if is_openspiel(env_id):
        return OpenSpielGame(env_id, num_players, seed, reward_scale)
    return Environment(env_id, num_players, seed, observation)
