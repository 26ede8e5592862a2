"""A custom algorithm. In this file's directory: `python custom_algorithm.py [learning_steps]`.

Or `python -m unstable_lite run custom_algorithm.toml`, which has `algorithm = "custom_algorithm:TaperedREINFORCE"`.
Python must be able to import the module.
"""

import sys
from collections.abc import Sequence

import torch

import unstable_lite as unstable
from unstable_lite.config import Config
from unstable_lite.learner import losses
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.learner.objective import regularised
from unstable_lite.learner.training_stats import Trained
from unstable_lite.types import TrainItem


class TaperedREINFORCE(REINFORCELearner):
    """REINFORCE that weights failures by how likely the policy still makes them; successes count in full.

    Per token, after TOPR (Le Roux et al. 2025, arXiv:2503.14286): stale failures are dangerous because the policy
    would keep unlearning moves that it has already unlearnt.
    """

    def __init__(self, config: Config, device: str, taper_cap: float = 1.0) -> None:
        super().__init__(config, device)
        self._taper_cap = taper_cap

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        divisor = self.training.completion_len * len(items)
        trained = Trained()
        for batch in self.policy.micro_batches(items):
            logp_N, entropy_N = self.policy.logprobs(batch)
            tapered_N = losses.importance_weights(logp_N, batch.behaviour_logp_N, cap=self._taper_cap)
            weight_N = batch.weight_N * torch.where(batch.advantage_N > 0, torch.ones_like(tapered_N), tapered_N)
            loss = losses.policy_gradient_loss(logp_N, weight_N, batch.advantage_N, divisor)
            loss = regularised(loss, batch, logp_N, entropy_N, None, self.training, divisor)
            loss.backward()
            trained.add(batch, logp_N, entropy_N, reference_logp_N=None, loss=loss)
        return trained


if __name__ == "__main__":
    run = unstable.build(
        train_envs=[
            unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny"),
        ],
        algorithm="custom_algorithm:TaperedREINFORCE",
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
