"""Scripted players of OpenSpiel's games are strong, repeatable, and blind to what their seat is not shown."""

import numpy as np
import pytest

from unstable_lite.games.openspiel.game import OpenSpielGame, load_game
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.games.openspiel.players import solved
from unstable_lite.games.players.factory import _player_class, is_remote, opponent_problem
from unstable_lite.games.players.scripted import ScriptedPlayer
from unstable_lite.types import ModelRef

KUHN = "openspiel:kuhn_poker"
NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"
GOOFSPIEL = "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)"


def player(name: str, env_id: str, seed: int) -> ScriptedPlayer:
    made = _player_class(name)(env_id=env_id, seed=seed)
    assert isinstance(made, ScriptedPlayer)
    return made


def rewards(env_id: str, names: tuple[str, str], games: int) -> list[float]:
    """Return the reward of the first player of each game; the seats alternate."""
    found = []
    for number in range(games):
        seat = number % 2
        seated = names if seat == 0 else names[::-1]
        game = OpenSpielGame(env_id, 2, number)
        players = [player(name, env_id, 100 * number + pid) for pid, name in enumerate(seated)]
        turn: tuple[int, str] | None = game.observe()
        while turn is not None:
            turn = game.play(players[turn[0]].action(turn[1]))
            assert not game.was_invalid
        found.append(game.close()[0][seat])
    return found


@pytest.mark.parametrize(
    ("env_id", "playouts", "opponent", "games", "least"),
    [
        ("openspiel:tic_tac_toe", 100, "random", 30, 24), ("openspiel:connect_four", 50, "random", 30, 24),
        (NIM, 200, "random", 30, 24), ("openspiel:breakthrough(columns=4,rows=5)", 50, "random", 30, 24),
        ("openspiel:pig(winscore=30)", 100, "random", 20, 8),  # the opponent may roll often before its turn ends
        ("openspiel:connect_four", 200, "mcts:10", 20, 8),
    ],
)  # fmt: skip
def test_tree_search_beats_random_play_and_fewer_playouts(env_id, playouts, opponent, games, least):
    assert sum(rewards(env_id, (f"scripted:mcts:{playouts}", f"scripted:{opponent}"), games)) >= least


def test_tree_search_with_the_same_seed_makes_the_same_moves():
    games = [rewards("openspiel:connect_four", ("scripted:mcts:20", "scripted:mcts:20"), games=4) for _ in range(2)]
    assert games[0] == games[1]
    observation = OpenSpielGame("openspiel:connect_four", 2, 0).observe()[1]
    first = {player("scripted:mcts:1", "openspiel:connect_four", seed).action(observation) for seed in range(40)}
    assert len(first) > 1


def test_tree_search_finds_a_state_that_it_did_not_play_itself():
    game = OpenSpielGame("openspiel:tic_tac_toe", 2, 0)
    for action in ("[0]", "[4]", "[1]", "[3]"):
        game.step(action)
    assert player("scripted:mcts:500", "openspiel:tic_tac_toe", 0).action(game.observe()[1]) == "[2]"


@pytest.mark.parametrize("env_id", [KUHN, GOOFSPIEL, "openspiel:matrix_brps", "openspiel:liars_dice(dice_sides=3)"])
def test_best_response_to_the_equilibrium_player_gains_next_to_nothing(env_id):
    tree, choices = flatten(env_id), {text: dict(choice) for text, choice in solved(env_id).items()}
    policy = [np.array([choices[s.observation].get(f"[{a}]", 0.0) for a in s.actions]) for s in tree.states]
    assert tree.exploitability(policy) < 0.01 * load_game(env_id).max_utility()


@pytest.mark.parametrize(
    ("name", "env_id", "says"),
    [
        ("scripted:mcts:10", KUHN, f"{KUHN} hides information, which the search would look at"),
        ("scripted:mcts:10", GOOFSPIEL, "hides information"),
        ("scripted:mcts:10", "openspiel:goofspiel", "has simultaneous moves"),
        ("scripted:mcts:10", "openspiel:2048", "pays before its end"),
        ("scripted:mcts:10", "openspiel:maedn", "cannot follow"),
        ("scripted:mcts:10", "Nim-v0-train", "plays games of OpenSpiel only"),
        ("scripted:mcts:0", NIM, "N playouts per move, from 1 to 10000"),
        ("scripted:mcts:many", NIM, "N playouts per move"),
        ("scripted:mcts:", NIM, "N playouts per move"),
        ("scripted:mcts", NIM, "scripted:mcts:N"),
        ("scripted:cfr", "openspiel:kuhn_poker(players=3)", "zero-sum games of two"),
        ("scripted:cfr", "openspiel:matrix_pd", "zero-sum games of two"),
        ("scripted:cfr", "openspiel:pig", "zero-sum games of two"),
        ("scripted:cfr", "openspiel:liars_dice", "more than 50000 decision histories"),
        ("scripted:cfr", "KuhnPoker-v0-train", "plays games of OpenSpiel only"),
        ("scripted:optimal", KUHN, "no optimal player"),
        ("scripted:greedy", "openspiel:tic_tac_toe", "no greedy player"),
    ],
)
def test_player_that_cannot_play_a_game_is_refused_by_name(name, env_id, says):
    observation = (
        OpenSpielGame(env_id, load_game(env_id).num_players(), 0).observe()[1] if "openspiel" in env_id else ""
    )
    problem = opponent_problem(name, env_id, observation)
    assert name in problem and says in problem


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("scripted:random", GOOFSPIEL), ("scripted:mcts:10", NIM), ("scripted:cfr", KUHN),
        ("scripted:blind-random", KUHN),
    ],
)  # fmt: skip
def test_player_that_can_play_has_no_problem(name, env_id):
    assert opponent_problem(name, env_id, OpenSpielGame(env_id, 2, 0).observe()[1]) is None
    assert not is_remote(ModelRef(uid=name, kind="fixed", name=name))
