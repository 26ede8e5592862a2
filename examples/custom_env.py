"""A custom game. In this file's directory: `python custom_env.py [learning_steps]`.

Or `python -m unstable_lite run custom_env.toml`, which has `env_id = "custom_env:RaceTo20-v0-train"`. The module before
the colon is imported, and registers the id after it with TextArena. Python must be able to import the module.
"""

import random
import re
import sys
from typing import Any

import textarena as ta

import unstable_lite as unstable


class RaceTo20(ta.Env):
    """Two players add 1, 2 or 3 to a number in turn. The player who makes it 20 wins."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = ta.TwoPlayerState(num_players=num_players, seed=seed)
        start = random.randint(0, 7)  # from the game's random stream: the same seed gives the same game
        self.state.reset(game_state={"number": start}, player_prompt_function=self._rules)
        self._show_number()

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.state.add_observation(
            from_id=self.state.current_player_id, message=action, observation_type=ta.ObservationType.PLAYER_ACTION
        )
        move = re.search(r"\[([123])\]", action)
        if move is None:
            self.state.set_invalid_move(reason="A move is [1], [2] or [3].")
        else:
            self.state.game_state["number"] += int(move[1])
            if self.state.game_state["number"] >= 20:
                self.state.set_winner(player_id=self.state.current_player_id, reason="The number is 20.")
        self._show_number()
        return self.state.step()

    def _rules(self, player_id: int, game_state: dict[str, Any]) -> str:
        return f"You are player {player_id}. Add 1, 2 or 3 to the number, as [1], [2] or [3]. Who makes it 20 wins."

    def _show_number(self) -> None:
        number = self.state.game_state["number"]
        self.state.add_observation(message=f"The number is {number}.", observation_type=ta.ObservationType.GAME_BOARD)


if __name__ != "__main__":  # a run imports this file by its name, even if it is the script
    ta.envs.registration.register_with_versions(
        id="RaceTo20-v0",
        entry_point="custom_env:RaceTo20",
        wrappers={
            "default": [ta.wrappers.LLMObservationWrapper, ta.wrappers.ActionFormattingWrapper],
            "-train": [ta.wrappers.GameBoardObservationWrapper, ta.wrappers.ActionFormattingWrapper],
        },
    )


if __name__ == "__main__":
    run = unstable.build(
        train_envs=[
            unstable.TrainEnvSpec(
                env_id="custom_env:RaceTo20-v0-train", num_players=2, num_actors=2, prompt_template="tiny"
            ),
        ],
        max_generation_len=16,
        batch_size=64,
        learning_rate=1e-3,
        vllm_config={"temperature": 1.0, "max_model_len": 512},
    )
    summary = run.start(
        learning_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20, num_collection_workers=32, num_eval_workers=0
    )
    print("adapter:", summary.checkpoint)
