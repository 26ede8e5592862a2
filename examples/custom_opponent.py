"""A custom opponent and prompt template. In this file's directory: `python custom_opponent.py [learning_steps]`.

Or `python -m unstable_lite run custom_opponent.toml`, which has `fixed_opponents = ["custom_opponent:Careful"]` and a
table `[templates.brief]`. Python must be able to import the module.
"""

import random
import sys

import unstable_lite as unstable
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.types import Reply


class Careful:
    """Takes as few as possible. Each game makes a new instance, which sees the observations of its seat."""

    def __init__(self, env_id: str, seed: int) -> None:
        self.env_id, self.random = env_id, random.Random(seed)

    async def act(self, observation: str) -> Reply:
        ones = [action for action in legal_actions(self.env_id, observation) if action.endswith(" 1]")]
        action = self.random.choice(ones)
        return Reply(action=action, text=action, prompt=observation)


def main(learning_steps: int) -> None:
    run = unstable.build(
        model_name="builtin:tiny",
        train_envs=[
            unstable.TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=1, prompt_template="brief"),
        ],
        # `chat` wraps this text in the tokenizer's chat template.
        templates={"brief": {"chat": True, "user": "{observation}", "stop": ["\n\n"]}},
        opponent_sampling_strategy="fixed",
        fixed_opponents=["custom_opponent:Careful"],
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
    )
    summary = run.start(learning_steps=learning_steps, num_collection_workers=32, num_eval_workers=0)
    assert summary is not None
    print("adapter:", summary.checkpoint)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
