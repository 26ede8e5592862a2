from __future__ import annotations

import pytest
import torch

from unstable_lite.learners.losses import (
    importance_figures,
    importance_weights,
    mismatch_figures,
    policy_gradient_loss,
)


def test_importance_weights_are_the_ratio_up_to_the_cap_and_no_path_for_the_gradient() -> None:
    logp_N = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    weight_N = importance_weights(logp_N, torch.tensor([-1.0, -9.0, -2.0]), cap=2.0)
    assert weight_N.tolist() == pytest.approx([1.0, 2.0, 0.36787944])
    assert not weight_N.requires_grad


def test_an_impossible_behaviour_probability_is_capped_and_nan_is_not_hidden() -> None:
    weight_N = importance_weights(torch.zeros(2), torch.tensor([-torch.inf, torch.nan]), cap=2.0)
    assert weight_N[0] == 2.0
    assert weight_N[1].isnan()


def test_the_gradient_of_each_token_is_minus_weight_times_advantage_over_the_divisor() -> None:
    logp_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = policy_gradient_loss(logp_N, torch.tensor([0.5, 2.0]), torch.tensor([3.0, -1.0]), divisor=10)
    (gradient_N,) = torch.autograd.grad(loss, logp_N)
    assert gradient_N.tolist() == pytest.approx([-0.15, 0.2])
    assert loss.item() == pytest.approx(-(0.5 * 3 * -1 + 2 * -1 * -2) / 10)


def test_figures_count_what_they_say() -> None:
    logp_N, behaviour_N = torch.tensor([0.0, -1.0, -2.0, -5.0]), torch.tensor([-3.0, -1.5, -2.0, -5.0])
    figures = importance_figures(logp_N, behaviour_N, cap=2.0)
    assert figures["importance_weight_clipped"] == 0.25
    assert figures["importance_weight_mean"] == pytest.approx((2 + 1.6487213 + 1 + 1) / 4)
    mismatch = mismatch_figures(logp_N, behaviour_N, torch.tensor([False, True, True, False]))
    assert mismatch == {"mismatch_mean": 0.25, "mismatch_max": 0.5, "mismatch_tokens": 2}
    none = mismatch_figures(logp_N, behaviour_N, torch.zeros(4, dtype=torch.bool))
    assert none == {"mismatch_mean": 0, "mismatch_max": 0, "mismatch_tokens": 0}
