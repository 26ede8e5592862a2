"""Interface of the players of a game, and the players for a model: one that the engines serve, or an endpoint.

With a budget for thinking, one turn of a model is at most two generations. The first ends at the budget. The second
continues exactly its token ids, after the end of thinking if that was open. Together they are one completion, in which
the ids that were put in are marked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unstable_lite.config.training import EngineConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import (
    END_OF_THINKING,
    EXTRACTIONS,
    THINK,
    Tags,
    end_of_thinking,
    find_extraction,
    leaves_thinking_open,
    tags_in,
)
from unstable_lite.games.templates import CHAT_TEMPLATES, Template
from unstable_lite.rng import derive_seed
from unstable_lite.types import AgentSpec, Forced, Generation, Reply, TokenIds

if TYPE_CHECKING:
    from unstable_lite.games.players.openai_compatible import Endpoint


class Player(Protocol):
    async def act(self, observation: str) -> Reply:
        """Answer an observation. Raises RequestError if there is no answer."""


Generates = Callable[..., Awaitable[Generation]]
"""Function from (prompt, adapter version, stop strings, seed) to one completion: `EnginePool.generate`. It also gets
`sampling` in games whose sampling is not the engines', and two requests with `max_tokens` for a budget of thinking."""

LeasesNewest = Callable[[str], AbstractContextManager[int]]
"""Function that leases the newest adapter of the named policy for the time of the context, which is its version."""


class PolicyPlayer:
    def __init__(
        self,
        generate: Generates,
        template: Template,
        agent: AgentSpec,
        num_players: int,
        sampling_seed: int | None = None,
        newest: LeasesNewest | None = None,
    ) -> None:
        """Create the player.

        sampling_seed: seed for a separate stream per turn; None: the engine's own stream. newest: lease of the adapter
        that answers a turn; None: all turns have the adapter of the agent, which the caller keeps loaded.
        """
        assert agent.model.adapter_version is not None
        self._generate = generate
        self._version = agent.model.adapter_version
        self._newest, self._policy = newest, agent.model.policy
        self._template = template
        self._extract = find_extraction(agent.action_extraction_fn, template.tags)
        # A custom extraction receives the answer as it was generated.
        self._opened = template.opened_thinking if agent.action_extraction_fn in EXTRACTIONS else ""
        self._num_players = num_players
        self._sampling_seed = sampling_seed
        self._num_turns = 0

    async def act(self, observation: str) -> Reply:
        prompt = self._template.prompt(observation, self._num_players)
        seed = None if self._sampling_seed is None else derive_seed(self._sampling_seed, self._num_turns)
        self._num_turns += 1
        # Leased before the request waits for an engine: the adapter must be there when an engine is.
        with self._newest(self._policy) if self._newest else nullcontext(self._version) as version:
            generation = await self._generate(prompt, version, self._template.stop, seed)
        action, format_ok = self._extract(self._opened + generation.text)
        return Reply(
            action=action,
            text=generation.text,
            prompt=prompt,
            format_ok=format_ok,
            is_cut_off=generation.finish_reason == "length",
            generation=generation,
        )


class OpenAICompatiblePlayer:
    """A model behind an endpoint.

    It gets the prompt of the `chat` template, as our own model would, so that neither side is handicapped.
    """

    def __init__(self, endpoint: Endpoint, agent: AgentSpec, num_players: int) -> None:
        assert agent.model.name is not None
        self._endpoint = endpoint
        self._model = agent.model.name
        self._extraction = agent.action_extraction_fn
        self._num_players = num_players

    async def act(self, observation: str) -> Reply:
        """Ask the model for its action. Raises OpponentError."""
        message = CHAT_TEMPLATES["chat"].message(observation, self._num_players)
        answer = await self._endpoint.complete(self._model, message)
        action, format_ok = find_extraction(self._extraction, tags_in(answer.text))(answer.text)
        return Reply(action=action, text=answer.text, prompt=message, format_ok=format_ok, is_cut_off=answer.is_cut_off)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    thinking_tokens: int
    max_tokens: int
    """Largest number of sampled tokens of the whole answer."""
    max_model_len: int
    """Largest number of tokens of prompt and answer together."""
    end_ids: Mapping[str, TokenIds]
    """Ids of the texts that end a thinking."""
    engine_kind: str
    tags: Tags = THINK

    async def generate(
        self, generate: Generates, opened: str, prompt: str, version: int, stop: tuple[str, ...], seed: int | None
    ) -> Generation:
        """Return one answer: `generate`'s, or two of it as one if the first reaches the budget.

        opened: end of the prompt that belongs to the thinking, the opening tag or empty. Raises ConfigError for an
        engine that does not know `prompt_ids`, or how a thinking ends, and the errors of `generate`.
        """
        end = end_of_thinking(self.tags)
        if end not in self.end_ids:
            raise ConfigError(f"engine.thinking_tokens: the engine's facts name no ids for {end!r} (ends_of_thinking)")
        first = await generate(prompt, version, stop, seed, max_tokens=self.thinking_tokens)
        if first.finish_reason == "stop":
            return first
        ids, forced = [first.prompt_ids, first.completion_ids], None
        if leaves_thinking_open(opened + first.text, self.tags):
            forced = Forced(at=len(first.completion_ids), ids=self.end_ids[end])
            ids.append(forced.ids)
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
        return Generation(
            prompt_ids=first.prompt_ids,
            completion_ids=np.concatenate([first.completion_ids, second.completion_ids]),
            logprobs=np.concatenate([first.logprobs, second.logprobs]),
            text=first.text + end * (forced is not None) + second.text,
            finish_reason=second.finish_reason,
            adapter_version=second.adapter_version,
            forced=forced,
        )


def thinking_budget(engine: EngineConfig, info: Mapping[str, Any]) -> ThinkingBudget | None:
    """Return the budget of `engine.thinking_tokens`, if there is one.

    info: an engine's facts. Raises ConfigError if they lack the ids that end the thinking.
    """
    if engine.thinking_tokens is None:
        return None
    prompts = info.get("prompts", {})
    if not (end_ids := prompts.get("end_of_thinking")):
        raise ConfigError(
            f"engine.thinking_tokens: engine.kind = {engine.kind!r} does not say which ids end the thinking (a custom "
            "engine declares them in its facts: `prompts`, `end_of_thinking`)"
        )
    ends = {END_OF_THINKING: end_ids} | prompts.get("ends_of_thinking", {})
    return ThinkingBudget(
        thinking_tokens=engine.thinking_tokens,
        max_tokens=engine.max_generation_len,
        max_model_len=info["max_model_len"],
        end_ids={text: np.array(ids, np.int32) for text, ids in ends.items()},
        engine_kind=engine.kind,
    )
