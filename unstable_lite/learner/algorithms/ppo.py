"""PPO, clipped per token: several steps on one batch, advantages from a critic.

An item's reward is the game's reward for that turn, the final reward with the last one; the critic, on the same frozen
base, estimates how much of it was to be expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from unstable_lite.config import Config
from unstable_lite.learner import UpdateResult
from unstable_lite.learner.objective import clipped_loss, regularised
from unstable_lite.learner.old_policy import OldPolicy, proximal_policy, shuffled_minibatches
from unstable_lite.learner.training import Training, Update
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


class PPOLearner:
    def __init__(self, config: Config, device: str) -> None:
        self.training = Training(config, device, has_critic=True)
        self.policy = self.training.policy

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Make adapter `version` by `ppo_epochs` passes over `items` in `ppo_minibatches` steps each.

        If a loss or a gradient of a step is not finite all steps are undone, and nothing changes. The policy is not
        stepped while the critic warms up, nor if its gradient is zero.
        """
        update, config = Update(self.training, items), self.training.config
        weighed, target_I = update.weigh(items)
        if update.items:
            with update.steps(several=True):
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
