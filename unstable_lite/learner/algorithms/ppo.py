"""GRPO and PPO: several clipped steps on one batch, around the policy at the start of the update.

In GRPO an item's reward is its advantage within its group of games (the same start, the same seat), computed before it
reaches the learner. In PPO it is the game's reward for that turn, the final reward with the last one; the critic, on
the same frozen base, estimates how much of it was to be expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.config.reference import LEARNER, from_reference
from unstable_lite.config.training import LearnerConfig
from unstable_lite.learner import UpdateResult
from unstable_lite.learner.model import Policy
from unstable_lite.learner.objective import clipped_loss, regularised
from unstable_lite.learner.training import Training, Update
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


@from_reference(kept=LEARNER)
class GRPOLearner:
    has_critic = False

    def __init__(self, config: Config, device: str) -> None:
        self.training = Training(config, device, self.has_critic)
        self.policy = self.training.policy

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Make adapter `version` by `ppo_epochs` passes over `items` in `ppo_minibatches` steps each.

        If a loss or a gradient of a step is not finite the update is skipped, and the worker undoes its steps. A step
        whose gradient is zero, or while the critic warms up, changes no parameter and no moment of the policy.
        """
        update, config = Update(self.training, items), self.training.config
        weighed, target_I = update.weigh(items)
        if update.items:
            proximal = proximal_policy(self.policy, update.items, config)
            last_epoch = Trained()
            for is_last_epoch, rows in shuffled_minibatches(len(update.items), config):
                minibatch = [weighed[row] for row in rows]
                clipped = self.add_gradient(minibatch, proximal.of(rows))
                if not update.step(clipped, self.training.add_critic_gradient(minibatch, target_I[rows])):
                    break
                if is_last_epoch:
                    last_epoch.extend(clipped)
            update.report(proximal.trained)
            update.metrics |= last_epoch.clipping_metrics(config.clip_range, config.clip_range_high)
            update.metrics |= {"policy_loss": update.loss, "logp_std": proximal.trained.logp_std}
        return update.end(version)

    def add_gradient(self, items: Sequence[TrainItem], proximal: OldPolicy) -> Trained:
        """Add the gradient of the clipped loss on `items`, of this rank's share; rewards are the advantages."""
        divisor = self.training.completion_len * len(items)
        clipped = Trained()
        for batch in self.policy.micro_batches(items):
            logp_N, entropy_N = self.policy.logprobs(batch)
            old_logp_N = batch.gather(proximal.logp)
            reference_logp_N = None if proximal.reference_logp is None else batch.gather(proximal.reference_logp)
            loss = clipped_loss(batch, logp_N, old_logp_N, self.training.config, divisor)
            loss = regularised(loss, batch, logp_N, entropy_N, reference_logp_N, self.training, divisor)
            loss.backward()  # type: ignore[no-untyped-call]
            clipped.add(batch, logp_N, entropy_N, old_logp_N, loss)
        return clipped


@from_reference(kept=LEARNER)
class PPOLearner(GRPOLearner):
    has_critic = True


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """Policy at the start of an update: the log-probabilities of each item's trained tokens."""

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
