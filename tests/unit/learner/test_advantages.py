"""Returns, advantages and value metrics, compared with explicit sums."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from fakes.game_records import CONTEXT, make_item
from fakes.unrolled import returns, z_scores
from unstable_lite.errors import RequestError
from unstable_lite.learner.critic import estimate_advantages, is_judged, policy_weights, value_metrics, zero_share
from unstable_lite.reward_transformations.averages import Spread
from unstable_lite.types import GameEnd, Opponent, StepContext, TrainItem


def step(reward: float, trajectory: int, context: StepContext | None = None) -> TrainItem:
    return make_item([1], [1], [-1.0], reward=reward, trajectory=trajectory, context=context)


def make_context(end: GameEnd, opponents: int = 1, is_invalid: bool = False, is_out: bool = False) -> StepContext:
    return replace(
        CONTEXT,
        opponents=(Opponent(pid=1, uid="base", kind="fixed"),) * opponents,
        turn=4,
        player_turn=2,
        num_turns=5,
        final_reward=0.0,
        outcome="draw",
        end=end,
        is_invalid=is_invalid,
        is_out=is_out,
    )


def test_last_step_of_a_truncated_game_is_excluded_and_the_others_bootstrap_from_its_prompt():
    value_I = np.array([1.0, 2.0, 4.0, 8.0])
    # The player's last step is not judged, because nothing after it was observed.
    expected = [0.5 + 0.9 * 2 - 1 + 0.45 * (0.9 * 4 - 2), 0.9 * 4 - 2, 0.0, 7 - 8]
    capped = [
        step(0.5, 0),
        step(0.0, 0),
        step(-3.0, 0, make_context("truncated")),
        step(7.0, 1, make_context("natural")),
    ]
    advantage_I, target_I = estimate_advantages(capped, value_I, 0.9, 0.5)
    assert advantage_I == pytest.approx(expected)
    assert target_I == pytest.approx(np.add(expected, value_I))
    assert is_judged(capped).tolist() == [True, True, False, True]
    others = [expected[0], expected[1], expected[3]]
    for is_normalized, weights in ((True, z_scores(others)), (False, others)):
        weight_I = policy_weights(capped, advantage_I, 1.0, is_normalized, Spread())
        assert weight_I[[0, 1, 3]] == pytest.approx(weights)
        assert weight_I[2] == 0


@pytest.mark.parametrize(
    "context",
    [
        make_context("natural"),
        make_context("invalid", is_invalid=True),
        make_context("truncated", opponents=0),  # keeps the env's partial reward
        make_context("truncated", is_invalid=True, is_out=True),  # the player was already out
    ],
)
def test_other_endings_are_worth_their_reward(context):
    items, values = [step(reward, 0, context) for reward in (0.1, 0.2, 0.7)], [0.3, -0.6, 0.9]
    advantage_I, _ = estimate_advantages(items, np.array(values), 0.9, 0.7)
    assert advantage_I == pytest.approx(returns(items, values, 0.9, 0.7))


def test_split_trajectory_is_refused():
    with pytest.raises(RequestError, match=r"item 0: .*trajectory 1"):
        estimate_advantages([step(0, 1), step(0, 2), step(0, 1)], np.zeros(3), 1.0, 1.0)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_critic_error_is_ignored_if_all_returns_are_equal(is_normalized):
    items = [step(0.0, 0), step(1.0, 0), step(1.0, 1), step(0.0, 2), step(0.0, 2), step(1.0, 2)]
    error_I = np.array([0.01, -0.02, 0.03, 0.02, 0.01, -0.01])
    assert policy_weights(items, error_I, 1.0, is_normalized, Spread()).tolist() == [0.0] * 6
    lost = [*items, step(-1.0, 3)]
    assert np.abs(policy_weights(lost, np.append(error_I, -1.9), 1.0, is_normalized, Spread())).min() > 0


def test_unusually_uniform_batch_is_not_scaled_up():
    spread = Spread()
    usual = [step(reward, trajectory) for trajectory, reward in enumerate([1.0, -1.0] * 8)]
    for _ in range(20):
        policy_weights(usual, np.array([1.0, -1.0] * 8), 1.0, True, spread)
    calm = [step(reward, trajectory) for trajectory, reward in enumerate([1.0, 0.999] * 8)]
    advantage_I = np.array([0.0005, -0.0005] * 8)
    assert np.abs(policy_weights(calm, advantage_I, 1.0, True, spread)).max() == pytest.approx(0.005)


def test_value_metrics_and_zero_share_match_their_definitions():
    metrics = value_metrics(np.array([0.5, -0.5, 1.0, 2.0]), np.array([1.0, 1.0, 0.0, 3.0]))
    assert metrics["value_mae"] == pytest.approx((0.5 + 1.5 + 1.0 + 1.0) / 4)
    assert (metrics["value_dir_acc"], metrics["value_dir_n"]) == (pytest.approx(2 / 3), 3)
    assert (metrics["value_mean"], metrics["return_mean"], metrics["num_steps"]) == (0.75, 1.25, 4)
    targets = np.array([1.0, 2.0, 4.0])
    assert value_metrics(targets, targets)["explained_variance"] == 1
    assert value_metrics(np.full(3, 9.0), targets)["explained_variance"] == pytest.approx(0)
    nothing = value_metrics(np.ones(2), np.zeros(2))
    assert (nothing["explained_variance"], nothing["value_dir_acc"], nothing["value_dir_n"]) == (0, 0, 0)
    assert all(math.isfinite(value) for value in nothing.values())
    assert zero_share([0.0, 1e-9, -1.0, 0.5]) == 0.5
    assert zero_share(np.zeros(3)) == 1
    assert zero_share([]) == 0
