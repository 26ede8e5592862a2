"""Parts of the policy's loss that all algorithms share: importance weights, entropy bonus, and KL penalty.

Applies the config to the formulas of losses.py. Knows nothing of models or of the rest of the loss.
"""

from __future__ import annotations

from torch import Tensor

from unstable_lite.config.training import LearnerConfig
from unstable_lite.learner import losses
from unstable_lite.learner.batching import MicroBatch
from unstable_lite.learner.training import Training


def importance_weights(batch: MicroBatch, logp_N: Tensor, config: LearnerConfig) -> Tensor:
    """Return the importance weight of each token, or of its sequence, times the weight that it was given."""
    ours_N, theirs_N = logp_N, batch.behaviour_logp_N
    if config.importance_weight_level == "sequence":
        ours_N, theirs_N = batch.sequence_mean(ours_N.detach()), batch.sequence_mean(theirs_N.to(ours_N))
    is_masked = config.importance_weight_mode == "mask"
    return batch.weight_N * losses.importance_weights(ours_N, theirs_N, config.importance_weight_cap, is_masked)


def clipped_loss(
    batch: MicroBatch, logp_N: Tensor, old_logp_N: Tensor, config: LearnerConfig, divisor: float
) -> Tensor:
    """Return the clipped objective, with the weights of the policy `old_logp_N` at the start of the update.

    At the level of sequences the value of each token's ratio is its sequence's, but its gradient only the token's own
    (GSPO-token), so that a token with weight 0 has none.
    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, section 4.3.
    """
    weight_N = importance_weights(batch, old_logp_N, config)
    if config.importance_weight_level == "sequence":
        moved_N = batch.sequence_mean((logp_N - old_logp_N).detach())
        logp_N = old_logp_N + moved_N + (logp_N - logp_N.detach())
    limits = config.clip_range, divisor, config.clip_range_high
    return losses.clipped_loss(logp_N, old_logp_N, weight_N, batch.advantage_N, *limits)


def regularised(
    loss: Tensor,
    batch: MicroBatch,
    logp_N: Tensor,
    entropy_N: Tensor,
    reference_logp_N: Tensor | None,
    training: Training,
    divisor: float,
) -> Tensor:
    """Return `loss` with entropy bonus and KL penalty. `reference_logp_N`: if there is a penalty.

    The bonus has no importance weight, and masked tokens keep it: at the prefix it is an exact mean over all next
    tokens of the present policy. A ratio corrects which token was sampled, so here it would only add noise and bias.
    """
    if training.entropy_coefficient:
        loss = loss - training.entropy_coefficient * (batch.weight_N * entropy_N).sum() / divisor
    if reference_logp_N is not None:
        # The weights are those of the present policy, in a clipped step too.
        weight_N = importance_weights(batch, logp_N, training.config)
        loss = loss + training.kl_coefficient * losses.kl_penalty(logp_N, reference_logp_N, weight_N, divisor)
    return loss
