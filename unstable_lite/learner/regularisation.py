"""Terms of the policy's loss that all algorithms share: the entropy bonus and the penalty of the KL to a reference.

Knows the config's coefficients and a micro-batch; knows nothing of models or of the rest of the loss.
"""

from __future__ import annotations

from torch import Tensor

from unstable_lite.learner import losses
from unstable_lite.learner.batching import MicroBatch
from unstable_lite.learner.training import Training


def regularised(
    loss: Tensor,
    batch: MicroBatch,
    logp_N: Tensor,
    entropy_N: Tensor,
    reference_logp_N: Tensor | None,
    training: Training,
    divisor: float,
) -> Tensor:
    """Return `loss` with both terms. `reference_logp_N`: if there is a KL penalty."""
    config = training.config
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * (batch.weight_N * entropy_N).sum() / divisor
    if reference_logp_N is not None:
        # The weights are those of the present policy, in a clipped step too.
        importance_N = losses.importance_weights(logp_N, batch.behaviour_logp_N, config.importance_weight_cap)
        penalty = losses.kl_penalty(logp_N, reference_logp_N, batch.weight_N * importance_N, divisor)
        loss = loss + config.kl_coefficient * penalty
    return loss
