"""Games of OpenSpiel that have a rules text, and observations of random games of them."""

from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.evaluation.probing import random_positions

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


def random_observations(env_id: str, games: int, seed: int = 0) -> list[str]:
    """Return each observation of seeded games of two between random legal players."""
    env = EvalEnvSpec(env_id=env_id, num_players=2)
    return [position.observation for position in random_positions(env, games, seed)]
