"""Exploitability estimated from answers: without bias from noise, forfeits included, with intervals that cover it."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from unstable_lite.games.openspiel.game_tree import GameTree, Policy, flatten, renormalised, uniform
from unstable_lite.rollout.sampled_policy import SampledPolicy

pyspiel = pytest.importorskip("pyspiel")

KUHN = "openspiel:kuhn_poker"


def drawn(tree: GameTree, policy: Policy, samples: int, rng: np.random.Generator) -> SampledPolicy:
    """Return the counts of answers drawn from `policy`."""
    answers = SampledPolicy(tree)
    for counts, played in zip(answers.counts_2O, policy, strict=True):
        of_all = np.append(played, max(0.0, 1 - played.sum()))
        counts += rng.multinomial(samples // 2, of_all / of_all.sum(), size=2)
    return answers


def random_policy(tree: GameTree, rng: np.random.Generator, rest: float) -> Policy:
    return [(1 - rest) * rng.dirichlet(np.ones(len(state.actions))) for state in tree.states]


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
def test_outcomes_of_several_policies_are_those_of_each(name: str, seat: int) -> None:
    tree, rng = flatten(f"openspiel:{name}"), np.random.default_rng(0)
    policies = [random_policy(tree, rng, rest) for rest in (0.0, 0.1, 0.5)]
    own = random_policy(tree, rng, 0.2)
    together = tree.outcomes([np.stack(each, axis=1) for each in zip(*policies, strict=True)], seat, own)
    apart = [tree.outcomes(policy, seat, own) for policy in policies]
    for result in ("win", "draw", "loss", "utility"):
        expected = np.broadcast_to([getattr(each, result) for each in apart], 3)
        assert np.broadcast_to(getattr(together, result), 3) == pytest.approx(expected)


def test_best_responses_to_one_half_are_valued_against_the_other() -> None:
    tree, rng = flatten(KUHN), np.random.default_rng(1)
    answers = drawn(tree, random_policy(tree, rng, rest=0.1), 202, rng)
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


def test_noise_does_not_look_like_a_weakness() -> None:
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


@pytest.mark.parametrize("kind", ["equilibrium", "random", "careless"])
def test_intervals_cover_the_exploitability(kind: str) -> None:
    tree, rng = flatten(KUHN), np.random.default_rng(3)
    policies = {"equilibrium": equilibrium(tree), "random": uniform(tree), "careless": random_policy(tree, rng, 0.2)}
    policy = policies[kind]
    found = [drawn(tree, policy, 32, rng).metrics() for _ in range(100)]
    for name, played in (("exploitability", policy), ("exploitability_legal", renormalised(policy))):
        truth, intervals = tree.exploitability(played), [(each[f"{name}_low"], each[f"{name}_high"]) for each in found]
        assert sum(low <= truth <= high for low, high in intervals) >= 90
        assert all(low <= each[name] <= high for each, (low, high) in zip(found, intervals, strict=True))
        assert np.mean([high - low for low, high in intervals]) < 0.5


def test_answers_that_are_not_legal_forfeit_are_counted_and_show_no_legal_play() -> None:
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


def test_answer_that_was_never_given_is_not_impossible() -> None:
    tree = flatten(KUHN)
    always_first = SampledPolicy(tree)
    for counts in always_first.counts_2O:
        counts[:, 0] = 16
    value, low, high = always_first.exploitability()
    truth = tree.exploitability([np.array([1.0, 0.0]) for _ in tree.states])
    assert value == pytest.approx(truth)
    assert low < truth - 0.01 and high > truth + 0.01
