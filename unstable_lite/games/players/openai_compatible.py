"""A seat of a model behind an OpenAI-compatible endpoint (OpenRouter unless OPENAI_BASE_URL says otherwise).

It is asked for the answer format that our own model is asked for, so that neither side is handicapped.
"""

from __future__ import annotations

import os
from functools import cache

import openai

from unstable_lite.errors import RequestError
from unstable_lite.games.api_keys import api_key
from unstable_lite.games.templates import find_extraction
from unstable_lite.types import AgentSpec, Reply

OPENROUTER_URL = "https://openrouter.ai/api/v1"
SYSTEM_PROMPT = (
    "You are a player in a game. Read what you observe, think about your move, and end your answer with the move "
    "itself inside \\boxed{}, exactly as the game wants it written."
)
TIMEOUT_S = 120.0
MAX_RETRIES = 4


@cache
def _client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=api_key(),
        base_url=os.environ.get("OPENAI_BASE_URL", OPENROUTER_URL),
        timeout=TIMEOUT_S,
        max_retries=MAX_RETRIES,
    )


class OpenAICompatiblePlayer:
    def __init__(self, agent: AgentSpec) -> None:
        assert agent.model.name is not None
        self._model = agent.model.name
        self._extract = find_extraction(agent.action_extraction_fn)

    async def act(self, observation: str) -> Reply:
        try:
            completion = await _client().chat.completions.create(
                model=self._model,
                messages=[
                    {"role": "system", "content": SYSTEM_PROMPT},
                    {"role": "user", "content": observation},
                ],
            )
        except openai.OpenAIError as error:
            raise RequestError(f"{self._model}: {type(error).__name__}: {error}") from error
        text = (completion.choices[0].message.content if completion.choices else None) or ""
        if not text:
            raise RequestError(f"{self._model}: an answer without text")
        action, format_ok = self._extract(text)
        return Reply(action=action, text=text, prompt=observation, format_ok=format_ok)
