"""Budget for thinking: one turn of a model is at most two generations.

The first ends at the budget. The second continues exactly its token ids, after the end of thinking if that was open.
Together they are one completion, in which the ids that were put in are marked. Knows no engines and no learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unstable_lite.config.training import EngineConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.players.policy import Generates
from unstable_lite.games.thinking import END_OF_THINKING, leaves_thinking_open
from unstable_lite.rng import derive_seed
from unstable_lite.types import Forced, Generation, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    thinking_tokens: int
    max_tokens: int
    """Largest number of sampled tokens of the whole answer."""
    max_model_len: int
    """Largest number of tokens of prompt and answer together."""
    end_ids: TokenIds
    """Ids of `END_OF_THINKING`."""
    engine_kind: str

    async def generate(
        self, generate: Generates, opened: str, prompt: str, version: int, stop: tuple[str, ...], seed: int | None
    ) -> Generation:
        """Return one answer: `generate`'s, or two of it as one if the first reaches the budget.

        opened: end of the prompt that belongs to the thinking, `<think>` or empty. Raises ConfigError for an engine
        that does not know `prompt_ids`, and the errors of `generate`.
        """
        first = await generate(prompt, version, stop, seed, max_tokens=self.thinking_tokens)
        if first.finish_reason == "stop":
            return first
        ids, forced = [first.prompt_ids, first.completion_ids], None
        if leaves_thinking_open(opened + first.text):
            forced = Forced(at=len(first.completion_ids), ids=self.end_ids)
            ids.append(self.end_ids)
        prompt_ids = np.concatenate(ids)
        if len(prompt_ids) >= self.max_model_len:
            return first
        second_seed = None if seed is None else derive_seed(seed, "after the thinking budget")
        max_tokens = self.max_tokens - self.thinking_tokens
        second = await generate(prompt, version, stop, second_seed, max_tokens=max_tokens, prompt_ids=prompt_ids)
        if not np.array_equal(second.prompt_ids, prompt_ids):
            raise ConfigError(
                f"engine.kind = {self.engine_kind!r} does not complete the ids of `Generate.prompt_ids`, which "
                "engine.thinking_tokens needs; unset that key"
            )
        return _joined(first, forced, second)


def thinking_budget(engine: EngineConfig, info: Mapping[str, Any]) -> ThinkingBudget | None:
    """Return the budget of `engine.thinking_tokens`, if there is one.

    info: an engine's facts. Raises ConfigError if they lack the ids that end the thinking.
    """
    if engine.thinking_tokens is None:
        return None
    if not (end_ids := info.get("prompts", {}).get("end_of_thinking")):
        raise ConfigError(
            f"engine.thinking_tokens: engine.kind = {engine.kind!r} does not say which ids end the thinking (a custom "
            "engine declares them in its facts: `prompts`, `end_of_thinking`)"
        )
    return ThinkingBudget(
        thinking_tokens=engine.thinking_tokens,
        max_tokens=engine.max_generation_len,
        max_model_len=info["max_model_len"],
        end_ids=np.array(end_ids, np.int32),
        engine_kind=engine.kind,
    )


def _joined(first: Generation, forced: Forced | None, second: Generation) -> Generation:
    """Return both as one completion, of sampled ids only."""
    return Generation(
        prompt_ids=first.prompt_ids,
        completion_ids=np.concatenate([first.completion_ids, second.completion_ids]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        text=first.text + END_OF_THINKING * (forced is not None) + second.text,
        finish_reason=second.finish_reason,
        adapter_version=second.adapter_version,
        forced=forced,
    )
