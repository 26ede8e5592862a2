"""Weight steps by the spread of their group's rewards: `python examples/weight_by_group_spread.py [learning_steps]`.

A group whose games all ended alike shows nothing; one whose games ended differently shows most. In a config:

    run.group_size = 4
    rewards.group_baseline = "rloo"
    rewards.sampling_reward_transformation = ["weight_by_group_spread:WeightByGroupSpread"]
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import unstable_lite as unstable
from unstable_lite.types import Step


class WeightByGroupSpread:
    """Multiplies a step's weight by its group's standard deviation over the batch's mean one.

    The deviation is that of the rewards which the env gave to one seat in the group's games of this batch.
    """

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        reward_of_game: dict[tuple[int | None, int], dict[int, float]] = defaultdict(dict)
        for step in steps:
            assert step.context is not None
            group = step.context.group_idx, step.pid
            reward_of_game[group][step.context.game_idx] = step.step_info["raw_reward"]
        spread = {group: pstdev(rewards.values()) for group, rewards in reward_of_game.items()}
        of_steps = [spread[step.context.group_idx, step.pid] for step in steps if step.context is not None]
        usual = fmean(of_steps) or 1.0
        return [replace(step, weight=step.weight * each / usual) for step, each in zip(steps, of_steps, strict=True)]


if __name__ == "__main__":
    run = unstable.build(
        train_envs=[
            unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny"),
        ],
        algorithm="rloo",
        run={"group_size": 4},
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
        rewards={"sampling_reward_transformation": ["weight_by_group_spread:WeightByGroupSpread"]},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
