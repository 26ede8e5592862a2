"""Start the env of one game in this process: TextArena's, OpenSpiel's, or a question."""

from __future__ import annotations

from typing import Any, cast

from unstable_lite.config.env_ids import is_openspiel, is_questions
from unstable_lite.config.games import EnvSpec
from unstable_lite.games.environments import Environment
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.questions.game import QuestionGame
from unstable_lite.transport.messages import MakeEnv
from unstable_lite.types import GameSpec, Observation

LocalEnvironment = Environment | OpenSpielGame | QuestionGame


def start_environment(
    env_id: str,
    num_players: int,
    seed: int,
    observation: Observation = "env",
    reward_scale: float | None = None,
    env_kwargs: tuple[tuple[str, Any], ...] = (),
    error_allowance: int = 0,
) -> LocalEnvironment:
    """Return a new game. `reward_scale`: factor of OpenSpiel's utilities; default: 1 / the largest size of one.

    env_kwargs: keyword arguments of the class of a TextArena env. error_allowance: number of invalid moves in a row
    that a player may repeat.

    Passes through the exceptions of TextArena. Raises ConfigError for a game of OpenSpiel or a file of questions that
    cannot be loaded.
    """
    if is_questions(env_id):
        return QuestionGame(env_id, num_players, seed, error_allowance)
    if is_openspiel(env_id):
        return OpenSpielGame(env_id, num_players, seed, reward_scale, error_allowance)
    return Environment(env_id, num_players, seed, observation, env_kwargs, error_allowance)


def environment_of(spec: EnvSpec | GameSpec | MakeEnv, seed: int) -> LocalEnvironment:
    """Return a new game as `spec` describes it; see `start_environment`."""
    return start_environment(
        spec.env_id,
        spec.num_players,
        seed,
        cast(Observation, spec.observation),
        spec.reward_scale,
        tuple(dict(spec.env_kwargs).items()),
        spec.error_allowance,
    )
