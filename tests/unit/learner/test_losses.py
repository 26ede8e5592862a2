import math

import pytest
import torch

from unstable_lite.learner.losses import (
    clipped_loss,
    clipping_metrics,
    importance_metrics,
    importance_weights,
    kl_estimates,
    kl_metrics,
    kl_penalty,
    mismatch_metrics,
    policy_gradient_loss,
)


def test_zero_behaviour_probability_is_capped():
    assert importance_weights(torch.zeros(1), torch.tensor([-torch.inf]), cap=2.0).tolist() == [2.0]


def test_factor_with_a_column_too_many_is_refused_and_not_broadcast():
    logp_N, column = torch.tensor([-1.0, -2.0]), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"advantage_N has shape \(2, 1\), needs one number a token: \(2,\)"):
        policy_gradient_loss(logp_N, torch.ones(2), column, divisor=1)
    with pytest.raises(ValueError, match=r"weight_N has shape \(2, 1\)"):
        policy_gradient_loss(logp_N, column, torch.ones(2), divisor=1)
    with pytest.raises(ValueError, match=r"old_logp_N has shape \(2, 1\)"):
        clipped_loss(logp_N, column, torch.ones(2), torch.ones(2), clip_range=0.2, divisor=1)
    assert policy_gradient_loss(logp_N, torch.ones(()), torch.tensor(2.0), divisor=1) == 6


def test_metrics_match_their_definitions():
    logp_N, behaviour_N = torch.tensor([0.0, -1.0, -2.0, -5.0]), torch.tensor([-3.0, -1.5, -2.0, -5.0])
    metrics = importance_metrics(logp_N, behaviour_N, cap=2.0)
    assert metrics["importance_weight_clipped"] == 0.25
    assert metrics["importance_weight_mean"] == pytest.approx((2 + 1.6487213 + 1 + 1) / 4)
    mismatch = mismatch_metrics(logp_N[1:3], behaviour_N[1:3])
    assert mismatch == {"mismatch_mean": 0.25, "mismatch_max": 0.5, "mismatch_tokens": 2}
    old_logp_N = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    metrics = clipping_metrics(old_logp_N + torch.tensor([0.0, 0.1, 0.3, -0.3]), old_logp_N, clip_range=0.2)
    assert metrics["clip_fraction"] == 0.5
    expected = sum(math.exp(d) - 1 - d for d in (0.0, 0.1, 0.3, -0.3)) / 4
    assert metrics["approx_kl"] == pytest.approx(expected, abs=1e-6)


def test_kl_penalty_over_all_tokens_equals_the_kl_and_its_gradient():
    """Weight each token by its probability, so that the sum over the vocabulary is the expectation."""
    torch.manual_seed(0)
    logits_V, base_V = torch.randn(20, dtype=torch.float64, requires_grad=True), torch.randn(20, dtype=torch.float64)
    logp_V, base_logp_V = logits_V.log_softmax(-1), base_V.log_softmax(-1)
    kl = (logp_V.exp() * (logp_V - base_logp_V)).sum()
    (expected,) = torch.autograd.grad(kl, logits_V, retain_graph=True)
    frequency_V = logp_V.detach().exp()
    penalty = kl_penalty(logp_V, base_logp_V, frequency_V, divisor=1.0)
    (ours,) = torch.autograd.grad(penalty, logits_V)
    assert penalty.item() == pytest.approx(kl.item())
    assert torch.allclose(ours, expected, atol=1e-12)
    assert (kl_estimates(logp_V, base_logp_V) >= 0).all()


def test_k1_estimates_the_policy_kl_under_any_sampler():
    torch.manual_seed(0)
    logp_V, reference_logp_V = torch.randn(2, 20, dtype=torch.float64).log_softmax(-1)
    uniform_V = torch.full_like(logp_V, -math.log(20))
    kl = (logp_V.exp() * (logp_V - reference_logp_V)).sum().item()
    metrics = kl_metrics("kl", logp_V, reference_logp_V, uniform_V, cap=math.inf)
    assert metrics["kl_k1"] == pytest.approx(kl)
    assert metrics["kl"] == pytest.approx(kl_estimates(logp_V, reference_logp_V).mean().item())
    assert metrics["kl"] != pytest.approx(kl, rel=0.1)
    given_up, liked = torch.tensor([-12.0]), torch.tensor([-0.1])
    metrics = kl_metrics("kl", given_up, liked, liked, cap=2.0)
    assert abs(metrics["kl_k1"]) < 1e-4 < 1e4 < metrics["kl"]
    assert kl_metrics("kl", liked, given_up, given_up, cap=2.0)["kl_k1"] == pytest.approx(2 * 11.9)
