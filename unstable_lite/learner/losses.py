"""Losses and their metrics, as functions of per-token log-probabilities. `N` counts trained tokens.

Knows nothing of models, batches or optimisers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RATE = 0.1
"""Logarithm of the largest change of the entropy coefficient after one update."""
RANGE = 100.0
"""Largest factor between the entropy coefficient and its start."""


def importance_weights(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float, is_masked: bool = False) -> Tensor:
    """Return min(π/μ, cap), a constant weight without a gradient; if `is_masked`, 0 for a ratio above the cap."""
    ratio_N = (logp_N.detach() - behaviour_logp_N).exp()
    # A comparison with NaN is false, so that NaN stays visible.
    return ratio_N.masked_fill(ratio_N > cap, 0.0) if is_masked else ratio_N.clamp(max=cap)


def policy_gradient_loss(logp_N: Tensor, weight_N: Tensor, advantage_N: Tensor, divisor: float) -> Tensor:
    """Return the negative advantage-weighted log-likelihood.

    divisor: a constant number of tokens × the steps of the whole batch, the same for every micro-batch, so that a
    token's weight depends neither on the length of its answer nor on the rest of its micro-batch.

    Raises ValueError if a weight or advantage has another shape than (N,) or ().
    """
    _check_shapes(logp_N, weight_N=weight_N, advantage_N=advantage_N)
    return -(weight_N * advantage_N * logp_N).sum() / divisor


def clipped_loss(
    logp_N: Tensor,
    old_logp_N: Tensor,
    weight_N: Tensor,
    advantage_N: Tensor,
    clip_range: float,
    divisor: float,
    clip_range_high: float | None = None,
) -> Tensor:
    """Return PPO's clipped objective per token, with the sign of a loss.

    clip_range_high: distance above 1 if it differs from the one below (Yu et al. 2025, "DAPO", arXiv:2503.14476).

    The ratio is relative to the policy at the start of the update. `weight_N`, the ratio of that policy to the sampling
    one, is a constant, so that stale tokens count less but are clipped around the right centre.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; Hilton et al. 2022, arXiv:2110.00641 (decoupled).

    Raises ValueError if an input has another shape than (N,) or ().
    """
    _check_shapes(logp_N, old_logp_N=old_logp_N, weight_N=weight_N, advantage_N=advantage_N)
    ratio_N = (logp_N - old_logp_N).exp()
    clipped_N = ratio_N.clamp(1 - clip_range, 1 + _high(clip_range, clip_range_high))
    return -(weight_N * torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)).sum() / divisor


def _check_shapes(logp_N: Tensor, **factors: Tensor) -> None:
    """Raise if a factor would silently multiply each token by those of other tokens, as (N, 1) times (N,) does."""
    for name, factor in factors.items():
        if factor.ndim and factor.shape != logp_N.shape:
            raise ValueError(f"{name} has shape {tuple(factor.shape)}, needs one number a token: {tuple(logp_N.shape)}")


def _high(clip_range: float, clip_range_high: float | None) -> float:
    return clip_range if clip_range_high is None else clip_range_high


def kl_estimates(logp_N: Tensor, reference_logp_N: Tensor) -> Tensor:
    """Return an estimate of KL(policy ‖ reference) per sampled token: never negative, unbiased (Schulman's k3)."""
    difference_N = reference_logp_N - logp_N
    return difference_N.expm1() - difference_N


def kl_penalty(logp_N: Tensor, reference_logp_N: Tensor, weight_N: Tensor, divisor: float) -> Tensor:
    """Return KL(policy ‖ reference) with its exact gradient.

    The tokens are the policy's and change with it, so the estimate's derivative at fixed tokens would be that of
    KL(reference ‖ policy). The derivative of the expectation is that of (log π − log reference) · log π, with the
    first factor constant.
    """
    gradient_N = (logp_N - reference_logp_N).detach() * (logp_N - logp_N.detach())
    return (weight_N * (kl_estimates(logp_N.detach(), reference_logp_N) + gradient_N)).sum() / divisor


def kl_metrics(
    name: str, logp_N: Tensor, reference_logp_N: Tensor, behaviour_logp_N: Tensor, cap: float
) -> dict[str, float]:
    """Return two estimates of KL(policy ‖ reference) in nats a token, the first under `name`.

    The first is the mean of k3 over the tokens as they were sampled. It has no bound, and one token that was likely
    only for a stale policy can make it large. The second is k1 with importance weights, of the policy itself; it may be
    negative.
    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    weight_N = importance_weights(logp_N, behaviour_logp_N, cap)
    return {
        name: kl_estimates(logp_N, reference_logp_N).mean().item(),
        "kl_k1": (weight_N * (logp_N - reference_logp_N)).mean().item(),
    }


def clipping_metrics(
    logp_N: Tensor, old_logp_N: Tensor, clip_range: float, clip_range_high: float | None = None
) -> dict[str, float]:
    """Return how far the policy has moved since the start of the update."""
    distance_N = (logp_N - old_logp_N).exp() - 1
    is_clipped_N = (distance_N < -clip_range) | (distance_N > _high(clip_range, clip_range_high))
    return {
        "clip_fraction": is_clipped_N.float().mean().item(),
        "approx_kl": kl_estimates(old_logp_N, logp_N).mean().item(),
    }


def importance_metrics(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> dict[str, float]:
    ratio_N = (logp_N - behaviour_logp_N).exp()
    return {
        "importance_weight_mean": ratio_N.clamp(max=cap).mean().item(),
        "importance_weight_clipped": (ratio_N > cap).float().mean().item(),
    }


def mismatch_metrics(logp_N: Tensor, behaviour_logp_N: Tensor) -> dict[str, float]:
    """Return how far engine and learner disagree on tokens, both with the adapter that sampled them.

    With no token there is neither mean nor max.
    """
    difference = (logp_N - behaviour_logp_N).abs()
    figures = {"mismatch_tokens": float(difference.numel())}
    if difference.numel():
        figures |= {"mismatch_mean": difference.mean().item(), "mismatch_max": difference.max().item()}
    return figures


def adapted_coefficient(coefficient: float, entropy: float, start: float, target: float) -> float:
    """Return the next coefficient: larger if the entropy is below its target, smaller if it is above.

    Its logarithm changes by `RATE` times the relative error, which counts as 1 at most.
    """
    error = max(-1.0, min(1.0, (target - entropy) / target))
    return max(start / RANGE, min(start * RANGE, coefficient * math.exp(RATE * error)))
