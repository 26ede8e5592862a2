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

    divisor: max_generation_len × steps of the whole batch, the same for every micro-batch: neither the length of
    an answer nor the company that it is computed in changes its weight.
    """
    return -(weight_N * advantage_N * logp_N).sum() / divisor


def importance_figures(logp_N: Tensor, behaviour_logp_N: Tensor, cap: float) -> dict[str, float]:
    ratio_N = (logp_N - behaviour_logp_N).exp()
    return {
        "importance_weight_mean": ratio_N.clamp(max=cap).mean().item(),
        "importance_weight_clipped": (ratio_N > cap).float().mean().item(),
    }


def mismatch_figures(logp_N: Tensor, behaviour_logp_N: Tensor, is_on_policy_N: Tensor) -> dict[str, float]:
    """How far engine and learner disagree on tokens that the learner's present adapter sampled.

    With no such token mean and max are 0: read them beside `mismatch_tokens`.
    """
    difference = (logp_N - behaviour_logp_N).abs()[is_on_policy_N]
    has_any = difference.numel() > 0
    return {
        "mismatch_mean": difference.mean().item() if has_any else 0.0,
        "mismatch_max": difference.max().item() if has_any else 0.0,
        "mismatch_tokens": float(torch.count_nonzero(is_on_policy_N).item()),
    }
