"""The engines as the orchestrator sees them: one pool, the least loaded worker first.

Turns prompts into Generations and adapters into loaded versions. Knows no games and no learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from unstable_lite.config import EngineConfig
from unstable_lite.errors import AdapterError
from unstable_lite.transport.messages import EngineStats, Generate, Generated, LoadAdapter, Message, UnloadAdapter
from unstable_lite.transport.sockets import Peer, Router
from unstable_lite.types import Generation

LOAD_TIMEOUT_S = 300.0


class EngineClient:
    """One engine worker."""

    def __init__(self, router: Router, name: str, config: EngineConfig) -> None:
        self.peer = Peer(router, name, self._receive)
        self.stats = EngineStats(queued=0, running=0, tokens_per_s=0.0, cached_share=0.0)
        self._config = config

    async def generate(
        self,
        prompt: str,
        version: int,
        stop: tuple[str, ...] = (),
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> Generation:
        """One completion by adapter `version`. Raises RequestError, AdapterError, WorkerDied."""
        config = self._config
        reply: Generated = await self.peer.ask(
            Generate,
            config.request_timeout_s,
            prompt=prompt,
            adapter_version=version,
            max_tokens=max_tokens or config.max_generation_len,
            temperature=config.temperature,
            top_p=config.top_p,
            stop=stop,
            seed=seed,
        )
        generation = reply.generation
        if generation.adapter_version != version:
            raise AdapterError(
                f"{self.peer.name} answered with adapter version {generation.adapter_version}, asked for {version}"
            )
        return generation

    async def load_adapter(self, version: int, path: Path) -> None:
        await self.peer.ask(LoadAdapter, LOAD_TIMEOUT_S, version=version, path=str(path))

    async def unload_adapter(self, version: int) -> None:
        await self.peer.ask(UnloadAdapter, LOAD_TIMEOUT_S, version=version)

    def _receive(self, message: Message) -> None:
        if isinstance(message, EngineStats):
            self.stats = message


class EnginePool:
    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.generated_tokens = 0

    async def generate(self, prompt: str, version: int, stop: tuple[str, ...] = ()) -> Generation:
        """One completion by the worker with the fewest requests in flight."""
        engine = self.engines[0]
        if len(self.engines) > 1:
            engine = min(self.engines, key=lambda engine: engine.peer.num_pending)
        generation = await engine.generate(prompt, version, stop)
        self.generated_tokens += len(generation.completion_ids)
        return generation

    async def load_adapter(self, version: int, path: Path) -> None:
        """Returns when every engine has it."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(engine.load_adapter(version, path))

    async def unload_adapter(self, version: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(engine.unload_adapter(version))
