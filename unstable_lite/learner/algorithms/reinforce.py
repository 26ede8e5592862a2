"""REINFORCE with truncated importance weights, and A2C: the same step with advantages from a critic.

An item's reward is its advantage in REINFORCE. In A2C it is the game's reward for that turn, the final reward with the
last one; the critic, on the same frozen base, estimates how much of it was to be expected.
"""

from __future__ import annotations

from collections.abc import Sequence

from unstable_lite.config import Config
from unstable_lite.config.reference import LEARNER, from_reference
from unstable_lite.learner import UpdateResult, losses
from unstable_lite.learner.objective import importance_weights, regularised
from unstable_lite.learner.training import Training, Update
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


@from_reference(kept=LEARNER)
class REINFORCELearner:
    has_critic = False

    def __init__(self, config: Config, device: str) -> None:
        self.training = Training(config, device, self.has_critic)
        self.policy = self.training.policy

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Take one step of policy and critic each on all of `items`, which makes adapter `version`.

        If a loss or a gradient is not finite the step is skipped and nothing changes. If the policy's gradient is zero,
        or while the critic warms up, no parameter and no moment of the policy changes, but the update makes its
        version.
        """
        update = Update(self.training, items)
        weighed, target_I = update.weigh(items)
        if update.items:
            trained = self.add_gradient(weighed)
            update.step(trained, self.training.add_critic_gradient(weighed, target_I))
            update.report(trained)
            if self.has_critic:
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


@from_reference(kept=LEARNER)
class A2CLearner(REINFORCELearner):
    has_critic = True
