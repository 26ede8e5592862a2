"""Values and best responses in a game tree are those of OpenSpiel, and forfeits cost what they cost in play."""

from typing import Any

import numpy as np
import pytest

from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel import game_tree
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.openspiel.game_tree import GameTree, Policy, flatten, renormalised, solved_moves, uniform
from unstable_lite.games.openspiel.prompts import action_names, prompt

pyspiel = pytest.importorskip("pyspiel")

SOLVED = (
    "kuhn_poker",
    "liars_dice(dice_sides=3)",
    "goofspiel(imp_info=True,num_cards=4,points_order=descending)",
    "matrix_rps",
    "matrix_mp",
    "nim(is_misere=False,pile_sizes=2;2)",
    "nim(pile_sizes=1;2)",
    pytest.param("leduc_poker", marks=pytest.mark.nightly),
)
NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"


def random_policy(tree: GameTree, seed: int = 0, rest: float = 0.0) -> Policy:
    rng = np.random.default_rng(seed)
    return [(1 - rest) * rng.dirichlet(np.ones(len(state.actions))) for state in tree.states]


def expected(name: str, tree: GameTree, policy: Policy) -> float:
    from open_spiel.python import policy as policies
    from open_spiel.python.algorithms import exploitability

    game = pyspiel.load_game(name)
    if game.get_type().dynamics.name == "SIMULTANEOUS":
        game = pyspiel.convert_to_turn_based(game)
    number = {(state.seat, state.observation): index for index, state in enumerate(tree.states)}

    class Tabular(policies.Policy):  # type: ignore[misc]
        def action_probabilities(self, state: Any, _player: int | None = None) -> dict[int, float]:
            pid = state.current_player()
            index = number[pid, prompt(state, pid)]
            names = tree.states[index].actions
            return {
                action: float(policy[index][names.index(name)]) for name, action in action_names(state, pid).items()
            }

    return float(exploitability.exploitability(game, Tabular(game, [0, 1])))


@pytest.mark.parametrize("name", SOLVED)
def test_exploitability_is_that_of_openspiel(name):
    tree = flatten(f"openspiel:{name}")
    for policy in (uniform(tree), random_policy(tree)):
        assert tree.exploitability(policy) == pytest.approx(expected(name, tree, policy), abs=1e-9)
        assert tree.exploitability(renormalised(policy)) == pytest.approx(expected(name, tree, policy), abs=1e-9)


def test_answers_that_are_not_listed_forfeit():
    tree = flatten("openspiel:kuhn_poker")
    silent = [np.zeros(2) for _ in tree.states]
    assert tree.exploitability(silent) == pytest.approx(2.0)  # each seat forfeits at once, for min_utility
    assert tree.exploitability(renormalised(silent)) == pytest.approx(11 / 24)
    half = random_policy(tree, rest=0.5)
    assert 11 / 24 < tree.exploitability(half) < 2.0
    played = tree.outcomes(half, 0, half)
    assert played.win + played.draw + played.loss == pytest.approx(1.0)


@pytest.mark.parametrize(("seat", "rest"), [(0, 0.0), (1, 0.3)])
def test_computed_outcomes_are_those_of_played_games(seat, rest):
    tree = flatten("openspiel:kuhn_poker")
    policy, rng, utilities = random_policy(tree, rest=rest), np.random.default_rng(1), []
    number = {(state.seat, state.observation): index for index, state in enumerate(tree.states)}
    for game_seed in range(2500):
        game = OpenSpielGame("openspiel:kuhn_poker", 2, game_seed)
        turn: tuple[int, str] | None = game.observe()
        while turn is not None:
            index = number[turn]
            options = [*(f"[{name}]" for name in tree.states[index].actions), "pardon?"]
            p = policy[index]
            turn = game.play(str(rng.choice(options, p=[*p, max(0.0, 1 - p.sum())])))
        rewards, _ = game.close()
        utilities.append(2 * rewards[seat])  # `reward_scale` is 1 / 2
    error = np.std(utilities) / np.sqrt(len(utilities))
    computed = tree.outcomes(policy, seat, policy)
    assert computed.utility == pytest.approx(np.mean(utilities), abs=4 * error)
    assert computed.win == pytest.approx(np.mean(np.array(utilities) > 0), abs=0.035)


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("name", ["kuhn_poker", "liars_dice(dice_sides=3)", "matrix_rps"])
def test_average_policy_has_the_mean_outcomes_of_its_policies_against_anyone(name, seat):
    tree = flatten(f"openspiel:{name}")
    policies = [random_policy(tree, number, rest) for number, rest in ((1, 0.0), (2, 0.1), (3, 0.3))]
    weights = (1, 2, 5)
    opponent = random_policy(tree, 9, rest=0.05)
    apart = [tree.outcomes(opponent, seat, policy) for policy in policies]
    together = tree.outcomes(opponent, seat, tree.average(policies, weights))
    for result in ("win", "draw", "loss", "utility"):
        expected = np.average([getattr(each, result) for each in apart], weights=weights)
        assert getattr(together, result) == pytest.approx(expected)
    if name.startswith("liars_dice") or (name, seat) == ("kuhn_poker", 0):  # a seat that acts more than once
        means = [np.average(each, axis=0, weights=weights) for each in zip(*policies, strict=True)]
        assert tree.outcomes(opponent, seat, means).utility != pytest.approx(together.utility, abs=1e-4)


def test_average_policy_is_uniform_if_none_arrives():
    tree = flatten("openspiel:kuhn_poker")
    always_first = [np.eye(len(state.actions))[0] for state in tree.states]
    mean = tree.average([always_first, always_first], [1, 1])
    reached = [bool(np.array_equal(each, first)) for each, first in zip(mean, always_first, strict=True)]
    assert reached.count(False) == 0, "seat 0 passes, then answers a bet; seat 1 answers either"
    always_bet = [np.eye(len(state.actions))[1] for state in tree.states]
    mean = tree.average([always_bet, always_bet], [1, 1])
    assert sum(bool(np.allclose(each, 0.5)) for each in mean) == 3, "after a pass, which seat 0 never makes"


def test_average_of_policies_by_boards_is_refused():
    tree = flatten("openspiel:nim(is_misere=False,pile_sizes=2;2)")
    with pytest.raises(ConfigError, match="boards"):
        tree.average([uniform(tree)], [1])


def test_board_games_are_merged_by_board_and_solved():
    nim = flatten(NIM)
    assert len(nim.states) == 230
    optimal = [np.zeros(len(state.actions)) for state in nim.states]
    response = nim.best_response(uniform(nim), 0)
    assert nim.outcomes(uniform(nim), 0, response).win > 0.999
    assert all(p.sum() in (0.0, 1.0) for p in response)
    assert nim.exploitability(optimal) == 1.0  # forfeits at both seats
    board = flatten("openspiel:tic_tac_toe")
    assert (len(board.states), len(board.positions)) == (4520, 5478)


def test_solved_play_of_tic_tac_toe_never_loses_and_wins_against_random_play():
    tree, solved = flatten("openspiel:tic_tac_toe"), solved_moves("openspiel:tic_tac_toe")
    assert solved is not None
    perfect = []
    for state in tree.states:
        good = np.array([f"[{action}]" in solved[state.observation] for action in state.actions], np.float64)
        perfect.append(good / good.sum())
    assert tree.exploitability(perfect) == pytest.approx(0, abs=1e-12)
    for seat in (0, 1):
        against_best = tree.outcomes(tree.best_response(perfect, 1 - seat), seat, perfect)
        assert (against_best.loss, against_best.draw) == pytest.approx((0, 1), abs=1e-12)
        assert tree.outcomes(uniform(tree), seat, perfect).win > 0.7


def test_solved_moves_are_those_of_theory(monkeypatch):
    nim = solved_moves(NIM)
    start = OpenSpielGame(NIM, 2, 0).observe()[1]
    assert nim[start] == ["[0 2]"]  # Bouton: 3, 4, 5 has the winning move to 1, 4, 5
    board = solved_moves("openspiel:tic_tac_toe")
    assert board is not None and len(board) == 4520
    assert len(board[OpenSpielGame("openspiel:tic_tac_toe", 2, 0).observe()[1]]) == 9  # every opening draws
    monkeypatch.setattr(game_tree, "MOST_COUNTED", 1000)
    for other in ("openspiel:kuhn_poker", "Nim-v0-train", "openspiel:nim(pile_sizes=9;9;9;9)"):
        assert solved_moves(other) is None


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("Nim-v0-train", "only games of OpenSpiel"),
        ("openspiel:pig", "repeat without end"),
        ("openspiel:connect_four", "10\\^12"),
        ("openspiel:breakthrough", "no choice by prompt"),
        ("openspiel:leduc_poker(players=3)", "two players"),
        ("openspiel:liars_dice", "decision states with .* in the first 6,000 positions"),
        ("openspiel:liars_dice(numdice=0)", "OpenSpiel"),
    ],
)
def test_games_that_cannot_be_computed_are_refused_with_the_reason(env_id, said, monkeypatch):
    monkeypatch.setattr(game_tree, "MOST_COUNTED", 6000)
    with pytest.raises(ConfigError, match=said):
        flatten(env_id)


def test_game_above_the_limit_is_computed_if_forced():
    name = "openspiel:liars_dice(dice_sides=4)"
    tree = flatten(name, is_forced=True)
    assert 0.0 < tree.exploitability(uniform(tree)) < 1.0
