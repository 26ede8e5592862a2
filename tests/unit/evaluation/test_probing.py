"""The metrics of a policy's choice, on policies with known metrics."""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.errors import UnsupportedEnvError
from unstable_lite.evaluation.probing import (
    ActionDistribution,
    Probe,
    mean_estimate,
    probe,
    random_positions,
    state_dependence,
    uniform_distribution,
)
from unstable_lite.games.players.lookahead import greedy_actions, optimal_actions
from unstable_lite.games.players.scripted import legal_actions

NIM = EvalEnvSpec(env_id="Nim-v0-train", num_players=2)
TICTACTOE = EvalEnvSpec(env_id="TicTacToe-v0-train", num_players=2, observation="board")
Choice = Callable[[str, str], Sequence[str]]


@cache
def probe_of(env: EvalEnvSpec, choose: Choice, games: int = 25, legal: float = 1.0) -> Probe:
    """Probe a policy that takes the chosen actions with total probability `legal`."""
    positions, distributions = random_positions(env, games), {}
    for position in positions:
        actions, chosen = legal_actions(env.env_id, position.observation), choose(env.env_id, position.observation)
        p_A = np.array([legal * (action in chosen) / len(chosen) for action in actions])
        distributions[position.observation] = ActionDistribution(actions=tuple(actions), probabilities=p_A)
    return probe("policy", env, positions, distributions)


def by_preference(env_id: str, observation: str) -> list[str]:
    return [max(legal_actions(env_id, observation))]


def choice(p: Sequence[float]) -> ActionDistribution:
    return ActionDistribution(actions=tuple("abcdefgh"[: len(p)]), probabilities=np.array(p))


@pytest.mark.parametrize("env", [NIM, TICTACTOE])
@pytest.mark.parametrize("blind", [legal_actions, by_preference])
def test_blind_players_have_no_state_dependence_and_others_have(env, blind):
    of_blind, of_optimal = probe_of(env, blind), probe_of(env, optimal_actions)
    assert abs(of_blind.state_dependence.value) < 1e-4
    assert of_optimal.state_dependence.low > 0.2


@pytest.mark.parametrize("env", [NIM, TICTACTOE])
def test_optimal_share_counts_only_positions_with_a_wrong_move(env):
    positions = random_positions(env, 25)
    shares = [
        len(optimal_actions(env.env_id, p.observation)) / len(legal_actions(env.env_id, p.observation))
        for p in positions
    ]
    of_random, of_optimal = probe_of(env, legal_actions), probe_of(env, optimal_actions)
    wrong_is_possible = [share for share in shares if share < 1]
    assert of_random.optimal.n == of_optimal.optimal.n == len(wrong_is_possible) < len(positions)
    assert of_random.optimal.value == pytest.approx(sum(wrong_is_possible) / len(wrong_is_possible))
    assert of_optimal.optimal.value == pytest.approx(1)
    assert of_random.optimal.low < of_random.optimal.value < of_random.optimal.high


def test_illegal_answer_is_not_optimal_and_counts_as_the_rest():
    careless = probe_of(NIM, optimal_actions, legal=0.5)
    assert careless.optimal.value == pytest.approx(0.5)
    assert careless.rest.value == pytest.approx(0.5)


def test_games_without_a_solver_have_no_share_of_optimal_moves():
    tak = EvalEnvSpec(env_id="SimpleTak-v0-train", num_players=2)
    assert probe_of(tak, legal_actions, games=4).optimal is None
    greedy = probe_of(tak, greedy_actions, games=4).greedy
    assert greedy is not None and greedy.value == pytest.approx(1) and greedy.n < 4 * 17
    assert probe_of(NIM, legal_actions, games=4).greedy is None


def test_positions_are_seeded_and_cover_every_turn_of_every_game():
    positions = random_positions(TICTACTOE, 6)
    assert positions == random_positions(TICTACTOE, 6) != random_positions(TICTACTOE, 6, seed=1)
    assert {p.game for p in positions} == set(range(6))
    assert all(p.observation.count("|") == 6 for p in positions)
    assert [p.turn for p in positions if p.game == 3] == list(range(sum(p.game == 3 for p in positions)))
    with pytest.raises(UnsupportedEnvError):
        random_positions(EvalEnvSpec(env_id="Chopsticks-v0-train", num_players=2), 2)


def test_state_dependence_is_mutual_information_if_all_is_legal():
    sure = [choice([0.9, 0.1] if game % 2 else [0.1, 0.9]) for game in range(400)]
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    estimate = state_dependence(sure, [0] * 400, range(400))
    assert estimate.value == pytest.approx(math.log(2) - entropy, abs=0.003)
    by_turn = state_dependence(sure, [game % 2 for game in range(400)], range(400))
    assert by_turn.value == pytest.approx(0, abs=1e-6), "the action depends on the turn alone"


def test_state_dependence_of_few_positions_is_bias_corrected():
    rng = np.random.default_rng(0)

    def sample(n: int) -> list[ActionDistribution]:
        return [choice(list(rng.dirichlet([0.7] * 5))) for _ in range(n)]

    truth = state_dependence(sample(1500), [0] * 1500, range(1500)).value
    plain, estimates = [], []
    for _ in range(60):
        few = sample(12)
        mean = np.mean([of.probabilities for of in few], axis=0)
        plain.append(np.mean([(of.probabilities * np.log(of.probabilities / mean)).sum() for of in few]))
        estimates.append(state_dependence(few, [0] * 12, range(12)))
    bias, corrected_bias = np.mean(plain) - truth, np.mean([e.value for e in estimates]) - truth
    assert bias < -0.025
    assert abs(corrected_bias) < abs(bias) / 2
    assert np.mean([e.low < truth < e.high for e in estimates]) > 0.8


def test_positions_of_one_game_are_not_counted_as_independent():
    rng = random.Random(0)
    of_game = [rng.random() for _ in range(20)]
    one_each, ten_each = mean_estimate(of_game, range(20)), mean_estimate(of_game * 10, [*range(20)] * 10)
    assert ten_each.value == pytest.approx(one_each.value)
    assert ten_each.high - ten_each.low == pytest.approx(one_each.high - one_each.low)
    assert math.isnan(mean_estimate([math.nan], [0]).value)


def test_uniform_distribution_matches_random_legal_play():
    uniform = uniform_distribution("Nim-v0", "Current Pile:\n  pile 0: 0\n  pile 1: 2\n  pile 2: 2")
    assert uniform.actions == ("[1 1]", "[1 2]", "[2 1]", "[2 2]")
    assert uniform.probabilities.tolist() == [0.25] * 4
    assert uniform.rest == 0
