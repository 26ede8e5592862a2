"""The games that have a rules text, and prompts of random games of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from unstable_lite.games.env_start import start_environment
from unstable_lite.games.players.scripted import random_legal_action
from unstable_lite.rng import derive_seed

LISTED = (
    "openspiel:kuhn_poker",
    "openspiel:leduc_poker",
    "openspiel:matrix_rps",
    "openspiel:matrix_brps",
    "openspiel:matrix_mp",
    "openspiel:nim(is_misere=False,pile_sizes=3;4;5)",
    "openspiel:tic_tac_toe",
    "openspiel:connect_four",
    "openspiel:liars_dice",
    "openspiel:liars_dice(dice_sides=3)",
    "openspiel:pig",
    "openspiel:goofspiel",
    "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)",
)
"""Env ids of games of two, one or two variants of each game with a rules text."""
MOST_TURNS = 200


def random_observations(env_id: str, games: int, seed: int = 0) -> Iterator[str]:
    """Yield each observation of seeded games of two between random legal players, as the player to move sees it."""
    for number in range(games):
        rng = random.Random(derive_seed(seed, "positions", env_id, number))
        environment = start_environment(env_id, 2, rng.getrandbits(31))
        turn: tuple[int, str] | None = environment.observe()
        for _ in range(MOST_TURNS):
            if turn is None:
                break
            yield turn[1]
            turn = environment.play(random_legal_action(env_id, turn[1], rng))
