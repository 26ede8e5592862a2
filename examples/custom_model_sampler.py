"""A custom model sampler: `python examples/custom_model_sampler.py [learning_steps]`.

In a TOML: `opponent_sampling_strategy = { "custom_model_sampler:Nemesis" = { weight = 0.7 }, mirror = 0.3 }`.
"""

import sys
from collections.abc import Sequence

import unstable_lite as unstable
from unstable_lite.league.model_registry import ModelMeta


class Nemesis(unstable.samplers.WeightedModelSampler):
    """Prefers models that TrueSkill ranks above the policy, by their lead; samples the others rarely."""

    def weights(self, current: ModelMeta, others: Sequence[ModelMeta], env_id: str) -> list[float]:
        return [max(other.rating_in(env_id).mu - current.rating_in(env_id).mu, 0.1) for other in others]


if __name__ == "__main__":
    run = unstable.build(
        train_envs=[
            unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=1, prompt_template="tiny"),
        ],
        opponent_sampling_strategy={"custom_model_sampler:Nemesis": {"weight": 0.7}, "mirror": 0.3},
        fixed_opponents=["scripted:random", "scripted:optimal"],
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
        league={"max_active_checkpoints": 4, "active_checkpoints_by": "match-quality"},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
