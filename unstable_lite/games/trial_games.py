"""Play a few random games before a run, to estimate how long the games of an env are, and whether they repeat."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Any

from unstable_lite.config.env_ids import is_questions
from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import EnvError
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_start import environment_of, start_environment
from unstable_lite.games.hang_guard import hang_guard
from unstable_lite.games.players.scripted import lists_actions, random_legal_action

GAMES = 12
TIMEOUT_S = 5.0


def trial_lengths(spec: EnvSpec) -> list[int]:
    """Return the number of turns of each of `GAMES` games of random legal moves.

    The list is empty if no scripted player knows the env's moves, if the env is isolated, or if it fails.
    """
    return _lengths(spec.env_id, spec.num_players, spec.max_turns, spec.isolated, spec.env_kwargs)


def repeat_problem(spec: EnvSpec) -> str | None:
    """Return how the env differs when a seed and the actions are repeated, or None if it did not in a few games.

    Not tried if the env is isolated: the run compares each turn that it repeats.
    """
    if is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated, spec.env_kwargs):
        return None
    # The moves may be no moves of a custom env, which may then raise anything; its games report that.
    with contextlib.suppress(Exception), hang_guard(TIMEOUT_S):
        for seed in range(GAMES):
            turns = _turns(spec, seed)
            again = _turns(spec, seed, [action for _, _, action in turns])
            if again != turns:
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turns, again, strict=False)))
                return f"does not repeat: with the same seed and actions, a game differs from its turn {same} on"
    return None


def _turns(spec: EnvSpec, seed: int, actions: Sequence[str] = ()) -> list[tuple[int, str, str]]:
    """Play `actions`, and then random ones; return player, observation and action of each turn."""
    rng, environment, turns = random.Random(seed), environment_of(spec, seed), list[tuple[int, str, str]]()
    turn: tuple[int, str] | None = environment.observe()
    while turn is not None and len(turns) < spec.max_turns:
        if len(turns) < len(actions):
            action = actions[len(turns)]
        else:
            action = random_legal_action(spec.env_id, turn[1], rng) if lists_actions(spec.env_id) else "[0]"
        turns.append((*turn, action))
        turn = environment.play(action)
    return turns


@cache
def _lengths(
    env_id: str, num_players: int, max_turns: int, isolated: bool | None, env_kwargs: tuple[tuple[str, Any], ...]
) -> list[int]:
    if is_questions(env_id):
        return [1]
    if not lists_actions(env_id) or is_isolated(env_id, num_players, wanted=isolated, env_kwargs=env_kwargs):
        return []
    try:
        with hang_guard(TIMEOUT_S):
            return [_length(env_id, num_players, max_turns, seed, env_kwargs) for seed in range(GAMES)]
    except EnvError:
        return []


def _length(env_id: str, num_players: int, max_turns: int, seed: int, env_kwargs: tuple[tuple[str, Any], ...]) -> int:
    environment = start_environment(env_id, num_players, seed, env_kwargs=env_kwargs)
    rng, num_turns = random.Random(seed), 0
    turn: tuple[int, str] | None = environment.observe()
    while turn is not None and num_turns < max_turns:
        turn = environment.play(random_legal_action(env_id, turn[1], rng))
        num_turns += 1
    return num_turns
