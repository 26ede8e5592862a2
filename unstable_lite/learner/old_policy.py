"""Policy at the start of an update, around which the update's later steps are clipped.

Owns the pass that computes its log-probabilities (also the base's if the loss needs them; neither changes
during the update) and the order of the steps. Knows nothing of losses or optimisers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unstable_lite.config.training import LearnerConfig
from unstable_lite.learner.model import Policy
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """Log-probabilities of each item's trained tokens."""

    logp: list[Tensor]
    reference_logp: list[Tensor] | None
    trained: Trained
    """Metrics of this policy."""

    def of(self, rows: Sequence[int]) -> OldPolicy:
        """Return the same for some of the items."""
        reference_logp = None if self.reference_logp is None else [self.reference_logp[row] for row in rows]
        return OldPolicy([self.logp[row] for row in rows], reference_logp, self.trained)


@torch.no_grad()
def proximal_policy(policy: Policy, items: Sequence[TrainItem], config: LearnerConfig) -> OldPolicy:
    trained = Trained()
    for batch in policy.micro_batches(items):
        with policy.evaluating():
            logp_N, entropy_N = policy.logprobs(batch)
        reference_logp_N = policy.reference_logprobs(batch) if config.kl_coefficient else None
        trained.add(batch, logp_N, entropy_N, reference_logp_N, loss=torch.zeros(()))
    trained.gather()  # each step divides its items among the ranks again
    like = next(iter(policy.parameters.values()))
    logp = trained.per_item(trained.logp_N.to(like), items)
    reference_logp = trained.per_item(trained.reference_logp_N.to(like), items) if config.kl_coefficient else None
    return OldPolicy(logp, reference_logp, trained)


def shuffled_minibatches(num_items: int, config: LearnerConfig) -> Iterator[tuple[bool, list[int]]]:
    """Yield the items of each step of the update, and whether the step belongs to the last pass over all of them.

    Each pass uses every item once, in a new order, in `ppo_minibatches` parts whose sizes differ by 1 at most. Draws
    from torch's generator for the CPU, whose state is saved with the learner.
    """
    for epoch in range(config.ppo_epochs):
        order = torch.randperm(num_items)
        for rows in order.tensor_split(min(config.ppo_minibatches, num_items)):
            yield epoch == config.ppo_epochs - 1, rows.tolist()
