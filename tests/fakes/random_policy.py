"""Policy that draws any legal action, from its own stream."""

from __future__ import annotations

import random

import numpy as np

from unstable_lite.games.players.scripted import random_legal_action
from unstable_lite.types import Generation


class RandomPolicy:
    def __init__(self, env_id: str, seed: int = 0) -> None:
        self._env_id = env_id
        self._rng = random.Random(seed)

    async def generate(self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
        return Generation(
            prompt_ids=np.array([1], np.int32),
            completion_ids=np.array([2], np.int32),
            logprobs=np.array([0.0], np.float32),
            text=f"\\boxed{{{random_legal_action(self._env_id, prompt, self._rng)}}}",
            finish_reason="stop",
            adapter_version=version,
        )
