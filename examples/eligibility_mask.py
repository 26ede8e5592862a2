"""Train only on eligible turns and tokens: `python examples/eligibility_mask.py [learning_steps]`.

A win that the opponent gave away says nothing about one's own moves. In a config, with the id of a reasoning model's
token `</think>` (151668 for Qwen3):

    rewards.step_reward_transformation = [{ name = "eligibility_mask:EligibilityMask", end_of_thinking = 151668 }]
"""

import sys

import numpy as np

import unstable_lite as unstable
from unstable_lite.types import PlayerTrajectory, StepContext


class EligibilityMask:
    """Gives weight 0 to each turn of a game that another player's invalid move ended, and to the tokens of thinking.

    end_of_thinking: id of the token that ends the thinking; an answer without it has no eligible token.
    """

    def __init__(self, end_of_thinking: int | None = None) -> None:
        self.end_of_thinking = end_of_thinking

    def __call__(
        self, player_traj: PlayerTrajectory, step_index: int, reward: float, context: StepContext | None
    ) -> float:
        step, last = player_traj.steps[step_index], player_traj.steps[-1].context
        assert context is not None and last is not None
        if context.end == "invalid" and not last.is_invalid:
            step.weight = 0.0
        if self.end_of_thinking is not None:
            generation = step.generation
            is_end = generation.completion_ids == self.end_of_thinking
            is_answer = np.cumsum(is_end) - is_end > 0
            if generation.forced is not None:  # engine.thinking_tokens ended the thinking, so no sampled token did
                is_answer[generation.forced.at :] = True
            step.token_weights = is_answer.astype(np.float32)
        return reward


if __name__ == "__main__":
    run = unstable.build(
        train_envs=[
            unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny"),
        ],
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
        rewards={"step_reward_transformation": ["eligibility_mask:EligibilityMask"]},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
