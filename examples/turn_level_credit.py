"""Give late and decisive turns more weight: `python examples/turn_level_credit.py [learning_steps]`.

A game's reward says least about its first moves. In a config:

    rewards.step_reward_transformation = [{ name = "turn_level_credit:TurnLevelCredit", decay = 0.8, decisive = 2.0 }]
"""

import sys

import unstable_lite as unstable
from unstable_lite.types import PlayerTrajectory, StepContext


class TurnLevelCredit:
    """Sets a turn's weight to `decay` for each later turn of its player, times `decisive` for the game's last move.

    An invalid move that ended the game carries all of its player's blame: the turns before it have weight 0.
    """

    def __init__(self, decay: float = 0.9, decisive: float = 1.0) -> None:
        self.decay = decay
        self.decisive = decisive

    def __call__(
        self, player_traj: PlayerTrajectory, step_index: int, reward: float, context: StepContext | None
    ) -> float:
        assert context is not None
        num_later = context.num_player_turns - 1 - context.player_turn
        weight = self.decay**num_later
        if context.turn == context.num_turns - 1:
            weight *= self.decisive
        last = player_traj.steps[-1].context
        if last is not None and last.is_invalid and context.end == "invalid" and num_later > 0:
            weight = 0.0
        player_traj.steps[step_index].weight = weight
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
        rewards={"step_reward_transformation": [{"name": "turn_level_credit:TurnLevelCredit", "decisive": 2.0}]},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
