"""Losses and their figures, as functions of per-token log-probabilities. `N` counts trained tokens.

Knows nothing of models, batches or optimisers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def importance_weights(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> Tensor:
    """min(π/μ, cap): a constant weight, not a path for the gradient."""
    return (logp_N.detach() - behaviour_logp_N).exp().clamp(max=cap)


def policy_gradient_loss(logp_N: Tensor, weight_N: Tensor, advantage_N: Tensor, divisor: float) -> Tensor:
    """Negative advantage-weighted log-likelihood.

    divisor: a constant number of tokens × the steps of the whole batch, the same for every micro-batch: a token's
    weight depends neither on the length of its answer nor on what else is in its micro-batch.
    """
    return -(weight_N * advantage_N * logp_N).sum() / divisor


def clipped_loss(
    logp_N: Tensor, old_logp_N: Tensor, weight_N: Tensor, advantage_N: Tensor, clip_range: float, divisor: float
) -> Tensor:
    """PPO's clipped objective per token, with the sign of a loss.

    The ratio is to the policy at the start of the update; `weight_N` (that policy against the one that sampled) is a
    constant, so that stale tokens count for less and yet are clipped around the right centre.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; Hilton et al. 2022, arXiv:2110.00641 (decoupled).
    """
    ratio_N = (logp_N - old_logp_N).exp()
    clipped_N = ratio_N.clamp(1 - clip_range, 1 + clip_range)
    return -(weight_N * torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)).sum() / divisor


def kl_estimates(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """KL(policy ‖ reference) from one sampled token each: never negative, unbiased (Schulman's k3)."""
    difference_N = reference_logp_N - logp_N
    return difference_N.expm1() - difference_N


def kl_penalty(logp_N: Tensor, reference_logp_N: Tensor, weight_N: Tensor, divisor: float) -> Tensor:
    """KL(policy ‖ reference), with its own gradient.

    The estimate's derivative at fixed tokens would be that of KL(reference ‖ policy): the tokens are the policy's, and
    change with it. The derivative of the expectation is that of (log π − log reference) · log π, first factor constant.
    """
    gradient_N = (logp_N - reference_logp_N).detach() * (logp_N - logp_N.detach())
    return (weight_N * (kl_estimates(logp_N.detach(), reference_logp_N) + gradient_N)).sum() / divisor


def kl_figures(
    name: str, logp_N: Tensor, reference_logp_N: Tensor, behaviour_logp_N: Tensor, cap: float
) -> dict[str, float]:
    """Return two estimates of KL(policy ‖ reference) in nats a token, the first under `name`.

    The first is the mean of k3 over the tokens as they were sampled. It has no bound, and one token that only a stale
    policy liked can make it large. The second is k1 with importance weights, of the policy itself; it may be negative.
    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    weight_N = importance_weights(logp_N, behaviour_logp_N, cap)
    return {
        name: kl_estimates(logp_N, reference_logp_N).mean().item(),
        "kl_k1": (weight_N * (logp_N - reference_logp_N)).mean().item(),
    }


def clipping_figures(logp_N: Tensor, old_logp_N: Tensor, clip_range: float) -> dict[str, float]:
    """How far the policy has moved from where the update began."""
    is_clipped_N = ((logp_N - old_logp_N).exp() - 1).abs() > clip_range
    return {
        "clip_fraction": is_clipped_N.float().mean().item(),
        "approx_kl": kl_estimates(old_logp_N, logp_N).mean().item(),
    }


def importance_figures(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> dict[str, float]:
    ratio_N = (logp_N - behaviour_logp_N).exp()
    return {
        "importance_weight_mean": ratio_N.clamp(max=cap).mean().item(),
        "importance_weight_clipped": (ratio_N > cap).float().mean().item(),
    }


def mismatch_figures(logp_N: Tensor, behaviour_logp_N: Tensor) -> dict[str, float]:
    """Return how far engine and learner disagree on tokens, both with the adapter that sampled them.

    With no token there is neither mean nor max.
    """
    difference = (logp_N - behaviour_logp_N).abs()
    figures = {"mismatch_tokens": float(difference.numel())}
    if difference.numel():
        figures |= {"mismatch_mean": difference.mean().item(), "mismatch_max": difference.max().item()}
    return figures
