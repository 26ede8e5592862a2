"""Player for a model that the engines serve: the base model, the current adapter, or an older one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

from unstable_lite.games.templates import EXTRACTIONS, Template, find_extraction
from unstable_lite.rng import derive_seed
from unstable_lite.types import AgentSpec, Generation, Reply

Generates = Callable[..., Awaitable[Generation]]
"""Function from (prompt, adapter version, stop strings, seed) to one completion: `EnginePool.generate`. It also gets
`sampling` in games whose sampling is not the engines', and two requests with `max_tokens` for a budget of thinking."""

LeasesNewest = Callable[[], AbstractContextManager[int]]
"""Function that leases the adapter of the current policy for the time of the context, which is its version."""


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
        self._newest = newest
        self._template = template
        self._extract = find_extraction(agent.action_extraction_fn)
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
        with self._newest() if self._newest else nullcontext(self._version) as version:
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
