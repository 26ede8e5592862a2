"""A2C: REINFORCE with advantages from a critic.

An item's reward is the game's reward for that turn, the final reward with the last one; the critic, on the same frozen
base, estimates how much of it was to be expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from unstable_lite.config import Config
from unstable_lite.learner import UpdateResult, losses
from unstable_lite.learner.objective import importance_weights, regularised
from unstable_lite.learner.training import Training, Update
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


class A2CLearner:
    def __init__(self, config: Config, device: str) -> None:
        self.training = Training(config, device, has_critic=True)
        self.policy = self.training.policy

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Take one step of policy and critic each on all of `items`, which makes adapter `version`.

        If a loss or a gradient is not finite both steps are skipped, and nothing changes. The policy is not stepped
        while the critic warms up, nor if its gradient is zero.
        """
        update = Update(self.training, items)
        weighed, target_I = update.weigh(items)
        if update.items:
            with update.steps():
                trained = self.add_gradient(weighed)
                update.step(trained, self.training.add_critic_gradient(update.items, target_I))
            update.report(trained)
            update.metrics |= {"policy_loss": trained.loss, "logp_std": trained.logp_std}
        return update.end(version)

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        """Add the gradient of the loss on `items`, of this rank's share; rewards are the advantages."""
        config = self.training.config
        divisor = self.training.completion_len * len(items)
        trained = Trained()
        for batch in self.policy.micro_batches(items):
            logp_N, entropy_N = self.policy.logprobs(batch)
            reference_logp_N = self.policy.reference_logprobs(batch) if config.kl_coefficient else None
            weight_N = importance_weights(batch, logp_N, config)
            loss = losses.policy_gradient_loss(logp_N, weight_N, batch.advantage_N, divisor)
            loss = regularised(loss, batch, logp_N, entropy_N, reference_logp_N, self.training, divisor)
            loss.backward()  # type: ignore[no-untyped-call]
            trained.add(batch, logp_N, entropy_N, reference_logp_N, loss)
        return trained
