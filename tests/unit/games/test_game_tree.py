"""Values in a game tree are those of OpenSpiel and of play; estimates from answers are unbiased, with intervals."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel import game_tree
from unstable_lite.games.openspiel.game import OpenSpielGame
from unstable_lite.games.openspiel.game_tree import GameTree, Policy, flatten, renormalised, solved_moves, uniform
from unstable_lite.games.openspiel.prompts import action_names, prompt
from unstable_lite.rollout.sampled_policy import SampledPolicy
from unstable_lite.types import UTILITY

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
KUHN, BOARD = "openspiel:kuhn_poker", "openspiel:tic_tac_toe"
GOOFSPIEL = "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)"
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
    tree = flatten(KUHN)
    silent = [np.zeros(2) for _ in tree.states]
    assert tree.exploitability(silent) == pytest.approx(2.0)  # each seat forfeits at once, for min_utility
    assert tree.exploitability(renormalised(silent)) == pytest.approx(11 / 24)
    half = random_policy(tree, rest=0.5)
    assert 11 / 24 < tree.exploitability(half) < 2.0
    played = tree.outcomes(half, 0, half)
    assert played.win + played.draw + played.loss == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("env_id", "seat", "rest", "tolerance"),
    [(KUHN, 0, 0.0, 0.035), (KUHN, 1, 0.3, 0.035), (GOOFSPIEL, 0, 0.1, 0.05), ("openspiel:matrix_brps", 1, 0.1, 0.05)],
)
def test_computed_outcomes_are_those_of_played_games(env_id, seat, rest, tolerance):
    """The tree of a game with simultaneous moves has the prompts of play, in which the seats answer in turn."""
    tree = flatten(env_id)
    policy, rng, utilities = random_policy(tree, rest=rest), np.random.default_rng(1), []
    number = {(state.seat, state.observation): index for index, state in enumerate(tree.states)}
    for game_seed in range(2500 if env_id == KUHN else 1000):
        game = OpenSpielGame(env_id, 2, game_seed)
        turn: tuple[int, str] | None = game.observe()
        while turn is not None:
            index = number[turn]
            options = [*(f"[{name}]" for name in tree.states[index].actions), "pardon?"]
            p = policy[index]
            turn = game.play(str(rng.choice(options, p=[*p, max(0.0, 1 - p.sum())])))
        utilities.append(game.close()[1][seat][UTILITY])
    error = np.std(utilities) / np.sqrt(len(utilities))
    computed = tree.outcomes(policy, seat, policy)
    assert computed.utility == pytest.approx(np.mean(utilities), abs=4 * error)
    assert computed.win == pytest.approx(np.mean(np.array(utilities) > 0), abs=tolerance)


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


def test_average_policy_is_uniform_if_none_arrives_and_refused_for_boards():
    tree = flatten(KUHN)
    always_first = [np.eye(len(state.actions))[0] for state in tree.states]
    mean = tree.average([always_first, always_first], [1, 1])
    reached = [bool(np.array_equal(each, first)) for each, first in zip(mean, always_first, strict=True)]
    assert reached.count(False) == 0, "seat 0 passes, then answers a bet; seat 1 answers either"
    always_bet = [np.eye(len(state.actions))[1] for state in tree.states]
    mean = tree.average([always_bet, always_bet], [1, 1])
    assert sum(bool(np.allclose(each, 0.5)) for each in mean) == 3, "after a pass, which seat 0 never makes"
    nim = flatten("openspiel:nim(is_misere=False,pile_sizes=2;2)")
    with pytest.raises(ConfigError, match="boards"):
        nim.average([uniform(nim)], [1])


def test_nim_is_merged_by_board_and_won_by_the_first_player_as_in_theory():
    nim, solved = flatten(NIM), solved_moves(NIM)
    assert solved is not None and solved[OpenSpielGame(NIM, 2, 0).observe()[1]] == ["[0 2]"]  # Bouton: leave 1, 4, 5
    assert len(nim.states) == 230
    response = nim.best_response(uniform(nim), 0)
    assert nim.outcomes(uniform(nim), 0, response).win > 0.999
    assert all(p.sum() in (0.0, 1.0) for p in response)
    silent = [np.zeros(len(state.actions)) for state in nim.states]
    assert nim.exploitability(silent) == 1.0  # forfeits at both seats


def test_solved_play_of_tic_tac_toe_never_loses_and_wins_against_random_play():
    tree, solved = flatten(BOARD), solved_moves(BOARD)
    assert solved is not None and (len(solved), len(tree.states), len(tree.positions)) == (4520, 4520, 5478)
    assert len(solved[OpenSpielGame(BOARD, 2, 0).observe()[1]]) == 9  # every opening draws
    good = [np.array([f"[{each}]" in solved[state.observation] for each in state.actions]) for state in tree.states]
    perfect = [each / each.sum() for each in good]
    assert tree.exploitability(perfect) == pytest.approx(0, abs=1e-12)
    for seat in (0, 1):
        against_best = tree.outcomes(tree.best_response(perfect, 1 - seat), seat, perfect)
        assert (against_best.loss, against_best.draw) == pytest.approx((0, 1), abs=1e-12)
        assert tree.outcomes(uniform(tree), seat, perfect).win > 0.7


def test_only_a_small_board_game_has_solved_moves(monkeypatch):
    monkeypatch.setattr(game_tree, "MOST_STATES", 500)
    for other in (KUHN, "Nim-v0-train", "openspiel:nim(pile_sizes=9;9;9;9)"):
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
        ("openspiel:nim(pile_sizes=30;30;30)", "decision states with .* in the first 10,000 positions"),
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


# estimates from answers


def drawn(tree: GameTree, policy: Policy, samples: int, rng: np.random.Generator) -> SampledPolicy:
    """Return the counts of answers drawn from `policy`."""
    answers = SampledPolicy(tree)
    for counts, played in zip(answers.counts_2O, policy, strict=True):
        of_all = np.append(played, max(0.0, 1 - played.sum()))
        counts += rng.multinomial(samples // 2, of_all / of_all.sum(), size=2)
    return answers


def equilibrium(tree: GameTree) -> Policy:
    """Return the equilibrium of Kuhn poker in which seat 0 never bets first."""
    bets = {"J": (0.0, 0.0, 1 / 3, 0.0), "Q": (0.0, 1 / 3, 0.0, 1 / 3), "K": (0.0, 1.0, 1.0, 1.0)}
    policy = []
    for state in tree.states:
        of_card = bets[state.observation.partition("Your card: ")[2][0]]
        first, second, after_check, after_bet = of_card
        faces_bet = "fold" in state.actions
        bet = (second if faces_bet else first) if state.seat == 0 else (after_bet if faces_bet else after_check)
        policy.append(np.array([1 - bet, bet]))
    assert tree.exploitability(policy) == pytest.approx(0, abs=1e-9)
    return policy


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("name", ["kuhn_poker", "matrix_rps", "nim(is_misere=False,pile_sizes=2;2)"])
def test_outcomes_of_several_policies_are_those_of_each(name, seat):
    tree = flatten(f"openspiel:{name}")
    policies = [random_policy(tree, seed, rest) for seed, rest in ((1, 0.0), (2, 0.1), (3, 0.5))]
    own = random_policy(tree, 4, 0.2)
    together = tree.outcomes([np.stack(each, axis=1) for each in zip(*policies, strict=True)], seat, own)
    apart = [tree.outcomes(policy, seat, own) for policy in policies]
    for result in ("win", "draw", "loss", "utility"):
        expected = np.broadcast_to([getattr(each, result) for each in apart], 3)
        assert np.broadcast_to(getattr(together, result), 3) == pytest.approx(expected)


def test_best_responses_to_one_half_are_valued_against_the_other():
    tree, rng = flatten(KUHN), np.random.default_rng(1)
    answers = drawn(tree, random_policy(tree, 1, rest=0.1), 202, rng)
    halves: list[list[npt.NDArray[np.float64]]] = [[(c[half] / 101)[:2] for c in answers.counts_2O] for half in (0, 1)]
    won = []
    for seat, (fitted, valued) in itertools.product((0, 1), (halves, halves[::-1])):
        own = [number for number, state in enumerate(tree.states) if state.seat == seat]
        responses = []
        for choices in itertools.product((0, 1), repeat=len(own)):
            response = [np.zeros(2) for _ in tree.states]
            for number, action in zip(own, choices, strict=True):
                response[number][action] = 1.0
            responses.append(response)
        utilities = np.array([tree.outcomes(fitted, seat, response).utility for response in responses])
        best = [responses[number] for number in np.flatnonzero(utilities > utilities.max() - 1e-9)]
        values = {round(tree.outcomes(valued, seat, response).utility, 9) for response in best}
        won += values
        assert len(values) == 1, "best responses differ only in states that they do not reach"
    assert answers.exploitability()[0] == pytest.approx(np.mean(won))


def test_noise_does_not_look_like_a_weakness():
    tree, rng = flatten(KUHN), np.random.default_rng(2)
    policy, found, in_sample = equilibrium(tree), [], []
    for _ in range(200):
        answers = drawn(tree, policy, 32, rng)
        found.append(answers.exploitability()[0])
        first, second = answers.halves()
        in_sample.append(tree.exploitability([(a + b) / 2 for a, b in zip(first, second, strict=True)]))
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found)) < 3 * error < 0.01
    assert np.mean(in_sample) > 0.02, "the same answers in both roles find an exploiter of the equilibrium"


@pytest.mark.parametrize("kind", ["equilibrium", "careless"])
def test_intervals_cover_the_exploitability(kind):
    tree, rng = flatten(KUHN), np.random.default_rng(3)
    policy = equilibrium(tree) if kind == "equilibrium" else random_policy(tree, 3, 0.2)
    found = [drawn(tree, policy, 32, rng).metrics() for _ in range(100)]
    for name, played in (("exploitability", policy), ("exploitability_legal", renormalised(policy))):
        truth, intervals = tree.exploitability(played), [(each[f"{name}_low"], each[f"{name}_high"]) for each in found]
        assert sum(low <= truth <= high for low, high in intervals) >= 90
        assert all(low <= each[name] <= high for each, (low, high) in zip(found, intervals, strict=True))
        assert np.mean([high - low for low, high in intervals]) < 0.5


def test_answers_that_are_not_legal_forfeit_are_counted_and_show_no_legal_play():
    tree = flatten(KUHN)
    silent = SampledPolicy(tree)
    for state in range(len(tree.states)):
        for half in (0, 1):
            silent.add(state, half, None)
    found = silent.metrics()
    assert (found["rest"], silent.num_answers) == (1.0, 24)
    assert found["exploitability"] == pytest.approx(2.0)
    for number, state in enumerate(tree.states):
        for half in (0, 1):
            assert not any("legal" in name for name in silent.metrics())
            silent.add(number, half, state.actions[0])
    always_first = tree.exploitability([np.array([1.0, 0.0]) for _ in tree.states])
    assert silent.metrics()["exploitability_legal"] == pytest.approx(always_first)
    assert silent.rest == 0.5


def test_answer_that_was_never_given_is_not_impossible():
    tree = flatten(KUHN)
    always_first = SampledPolicy(tree)
    for counts in always_first.counts_2O:
        counts[:, 0] = 16
    value, low, high = always_first.exploitability()
    truth = tree.exploitability([np.array([1.0, 0.0]) for _ in tree.states])
    assert value == pytest.approx(truth)
    assert low < truth - 0.01 and high > truth + 0.01
