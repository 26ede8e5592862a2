"""Play a few random games before a run, to estimate how long the games of an env are."""

from __future__ import annotations

import random
from functools import cache

from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import EnvError
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_start import start_environment
from unstable_lite.games.hang_guard import hang_guard
from unstable_lite.games.players.scripted import lists_actions, random_legal_action

GAMES = 12
TIMEOUT_S = 5.0


def trial_lengths(spec: EnvSpec) -> list[int]:
    """Return the number of turns of each of `GAMES` games of random legal moves.

    The list is empty if no scripted player knows the env's moves, if the env is isolated, or if it fails.
    """
    return _lengths(spec.env_id, spec.num_players, spec.max_turns, spec.isolated)


@cache
def _lengths(env_id: str, num_players: int, max_turns: int, isolated: bool | None) -> list[int]:
    if not lists_actions(env_id) or is_isolated(env_id, num_players, wanted=isolated):
        return []
    try:
        with hang_guard(TIMEOUT_S):
            return [_length(env_id, num_players, max_turns, seed) for seed in range(GAMES)]
    except EnvError:
        return []


def _length(env_id: str, num_players: int, max_turns: int, seed: int) -> int:
    rng, environment, num_turns = random.Random(seed), start_environment(env_id, num_players, seed), 0
    turn: tuple[int, str] | None = environment.observe()
    while turn is not None and num_turns < max_turns:
        turn = environment.play(random_legal_action(env_id, turn[1], rng))
        num_turns += 1
    return num_turns
