"""Play a few random games before a run, to estimate how long the games of an env are, and whether they repeat."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from functools import cache
from itertools import takewhile

from unstable_lite.config.env_ids import is_questions
from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import EnvError
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.hang_guard import hang_guard
from unstable_lite.games.players.scripted import lists_actions, random_legal_action

GAMES = 12
TIMEOUT_S = 5.0


@cache
def trial_lengths(spec: EnvSpec) -> list[int]:
    """Return the number of turns of each of `GAMES` games of random legal moves.

    The list is empty if no scripted player knows the env's moves, if the env is isolated, or if it fails.
    """
    if is_questions(spec.env_id):
        return [1]
    if not lists_actions(spec.env_id) or _is_isolated(spec):
        return []
    try:
        with hang_guard(TIMEOUT_S):
            return [len(_turns(spec, seed)) for seed in range(GAMES)]
    except EnvError:
        return []


def repeat_problem(spec: EnvSpec) -> str | None:
    """Return how the env differs when a seed and the actions are repeated, or None if it did not in a few games.

    Not tried if the env is isolated: the run compares each turn that it repeats.
    """
    if _is_isolated(spec):
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


def _is_isolated(spec: EnvSpec) -> bool:
    return is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated, spec.env_kwargs)
