"""A custom env sampler: `python examples/custom_env_sampler.py [learning_steps]`.

In a TOML: `env_sampling_strategy = { "custom_env_sampler:WinsFirst" = { goal = 0.5 } }`. Python must be able to import
the module.
"""

import sys
from typing import Any

import unstable_lite as unstable


class WinsFirst(unstable.samplers.BaseEnvSampler):
    """Chooses the first env whose average reward is below `goal`, or any env once all have reached it."""

    def __init__(self, train_envs: Any, eval_envs: Any = (), rng_seed: int = 489, goal: float = 0.5) -> None:
        super().__init__(train_envs, eval_envs, rng_seed)
        self.goal = goal
        self.averages: dict[str, float] = {}

    def _choose_train(self) -> unstable.TrainEnvSpec:
        for spec in self.train_env_specs:
            if self.averages.get(spec.env_id, 0.0) < self.goal:
                return spec
        return self._train_rng.choice(self.train_env_specs)

    def update(self, env_id: str, avg_actor_reward: float, avg_opponent_reward: float | None) -> None:
        before = self.averages.get(env_id, 0.0)
        self.averages[env_id] = 0.95 * before + 0.05 * avg_actor_reward

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.averages = state["averages"]


if __name__ == "__main__":
    seats = {"num_players": 2, "num_actors": 1, "prompt_template": "tiny"}
    run = unstable.build(
        train_envs=[unstable.TrainEnvSpec(env_id=env_id, **seats) for env_id in ("Nim-v0-train", "TicTacToe-v0-train")],
        env_sampling_strategy={"custom_env_sampler:WinsFirst": {"goal": 0.5}},
        opponent_sampling_strategy="fixed",
        fixed_opponents=["scripted:random"],
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
