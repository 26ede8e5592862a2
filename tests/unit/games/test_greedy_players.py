"""`scripted:greedy`, compared with the rules as TextArena plays them."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.greedy import GREEDY_GAMES, GreedyPlayer, greedy_actions
from unstable_lite.games.players.scripted import RandomLegalPlayer, legal_actions

VARIANTS = {
    "TicTacToe-v0-train": 60,
    "TicTacToe-v0": 10,
    "ConnectFour-v0-train": 25,
    "ConnectFour-v0": 5,
    "ConnectFour-v0-blind-train": 10,
    "ConnectFour-v0-large-train": 2,
    "SimpleTak-v0-train": 40,
    "SimpleTak-v0": 5,
    "SimpleTak-v0-large-train": 2,
}
"""Number of games by env id in which every position is checked."""


def winning_actions(env: Environment, mover: int, actions: list[str]) -> list[str]:
    """Return the actions that win for `mover`, tried in copies of the game under the env's own rules."""
    winning = []
    for action in actions:
        trial: Any = copy.deepcopy(env._unwrapped)
        trial.state.current_player_id = mover
        done, _ = trial.step(action)
        if done and trial.state.rewards is not None and trial.state.rewards[mover] == 1:
            winning.append(action)
    return winning


@pytest.mark.parametrize("env_id", VARIANTS)
def test_greedy_takes_every_win_or_else_every_block(env_id: str) -> None:
    rng, seen = random.Random(1), {"win": 0, "block": 0, "neither": 0}
    for seed in range(VARIANTS[env_id]):
        env = Environment(env_id, 2, seed)
        while True:
            pid, observation = env.observe()
            actions = legal_actions(env_id, observation)
            wins, blocks = winning_actions(env, pid, actions), winning_actions(env, 1 - pid, actions)
            assert greedy_actions(env_id, observation) == (wins or blocks or actions), observation
            seen["win" if wins else "block" if blocks else "neither"] += 1
            if env.step(rng.choice(actions)):
                break
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize(
    ("env_id", "least"), [("TicTacToe-v0-train", 0.8), ("ConnectFour-v0-train", 0.85), ("SimpleTak-v0-train", 0.68)]
)
def test_greedy_is_much_stronger_than_random_play(env_id: str, least: float) -> None:
    points = 0.0
    for seed in range(120):
        env, seat = Environment(env_id, 2, seed), seed % 2
        players = {seat: GreedyPlayer(env_id, seed), 1 - seat: RandomLegalPlayer(env_id, seed + 1)}
        while True:
            pid, observation = env.observe()
            if env.step(players[pid].action(observation)):
                break
        points += (1 + env.close()[0][seat]) / 2
    assert points / 120 >= least


@pytest.mark.parametrize("family", GREEDY_GAMES)
def test_greedy_refuses_other_envs_and_other_text(family: str) -> None:
    with pytest.raises(UnsupportedEnvError, match="ConnectFour, TicTacToe, SimpleTak"):
        greedy_actions("Nim-v0-train", "piles")
    with pytest.raises(EnvError):
        GreedyPlayer(f"{family}-v0-train", 0).action("Once upon a time")


def test_same_seed_makes_the_same_moves() -> None:
    _, observation = Environment("ConnectFour-v0-train", 2, 0).observe()
    draws = [
        [player.action(observation) for _ in range(30)] for player in (GreedyPlayer("ConnectFour-v0", 5) for _ in "ab")
    ]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) == 7
