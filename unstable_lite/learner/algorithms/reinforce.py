"""REINFORCE with truncated importance weights. An item's reward is its advantage."""

from __future__ import annotations

from collections.abc import Sequence

from unstable_lite.config import Config
from unstable_lite.learner import UpdateResult, losses
from unstable_lite.learner.objective import importance_weights, regularised
from unstable_lite.learner.training import Training, Update
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


class REINFORCELearner:
    def __init__(self, config: Config, device: str) -> None:
        self.training = Training(config, device)
        self.policy = self.training.policy

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Take one optimiser step on all of `items`, which makes adapter `version`.

        If the loss or the gradient is not finite the step is skipped and nothing changes. If the gradient is zero no
        parameter and no moment changes, but the update counts and makes its version.
        """
        update = Update(self.training, items)
        if update.items:
            with update.steps():
                trained = self.add_gradient(update.items)
                update.step(trained)
            update.report(trained)
        return update.end(version)

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        """Add the gradient of the loss on `items`, of this rank's share, to the parameters."""
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
