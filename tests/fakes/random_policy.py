"""Policy that draws any legal action, from its own stream."""

import random

from fakes.game_records import make_generation
from unstable_lite.games.players.scripted import random_legal_action
from unstable_lite.types import Generation


class RandomPolicy:
    def __init__(self, env_id: str, seed: int = 0) -> None:
        self._env_id = env_id
        self._rng = random.Random(seed)

    async def generate(self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
        text = f"\\boxed{{{random_legal_action(self._env_id, prompt, self._rng)}}}"
        return make_generation([2], text=text, adapter_version=version)
