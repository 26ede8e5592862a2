"""Custom reward transforms. In this file's directory: `python custom_reward_transformation.py [learning_steps]`.

Or `python -m unstable_lite run custom_reward_transformation.toml`, which names `custom_reward_transformation:QuickWin`.
A final transform is called as `(reward, pid, env_id)` once per player of a game, a step transform as `(player_traj,
step_index, reward)` once per turn, a sampling transform as `(steps)` once per batch. A class gets its options from the
config; its state survives a restart if it has `state_dict` and `load_state_dict`.
"""

import sys

import unstable_lite as unstable
from unstable_lite.types import PlayerTrajectory


class QuickWin:
    """Adds `bonus / turns` to every step of the winner, so that a quick win is worth more."""

    def __init__(self, bonus: float = 1.0) -> None:
        self.bonus = bonus

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        has_won = player_traj.final_reward > 0
        return reward + (self.bonus / player_traj.num_turns if has_won else 0.0)


if __name__ == "__main__":
    run = unstable.build(
        train_envs=[
            unstable.TrainEnvSpec(env_id="TicTacToe-v0-train", num_players=2, num_actors=2, prompt_template="tiny"),
        ],
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
        rewards={
            "final_reward_transformation": ["WinDrawLossFormatter", "RoleAdvantageByEnvFormatter"],
            "step_reward_transformation": [{"name": "custom_reward_transformation:QuickWin", "bonus": 2.0}],
        },
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
