"""Orchestrator side of the engines: one pool, the least loaded worker first.

Turns prompts into Generations and adapters into loaded versions. Knows no games and no learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unstable_lite.config.training import EngineConfig
from unstable_lite.engines.base import REQUEST_TIMEOUT_S
from unstable_lite.errors import AdapterError, WorkerDied
from unstable_lite.transport import messages
from unstable_lite.transport.messages import EngineStats, Message
from unstable_lite.transport.rpc import Router, WorkerChannel, WorkerState
from unstable_lite.types import Generation, Sampling, TokenIds

T = TypeVar("T")

LOAD_TIMEOUT_S = 300.0
CHARS_PER_TOKEN = 4
"""Approximate number of characters per token of English. A constant, not learned from replies: with a sync schedule,
and after a resume, the same requests must go to the same engines."""


class EngineClient:
    """Client of one engine worker."""

    def __init__(self, router: Router, name: str, config: EngineConfig) -> None:
        self.channel = WorkerChannel(router, name, self._receive)
        self.stats = EngineStats(queued=0, running=0, tokens_per_s=0.0, cached_share=0.0)
        self.outstanding_tokens = 0
        """Tokens of unanswered requests: prompts by their estimated length, completions at their limit."""
        self._holds: tuple[int, set[int]] = (0, set())
        """The worker's life, and the versions loaded in it."""
        self._loading = asyncio.Lock()
        self._config = config

    @property
    def is_up(self) -> bool:
        return self.channel.is_up

    async def sleep(self) -> None:
        """Let the engine answer its pending requests and release its device; later requests wait until it wakes up.

        Raises WorkerDied if it dies first.
        """
        self.channel.mark_asleep()
        await self.channel.ask(messages.Sleep, REQUEST_TIMEOUT_S + LOAD_TIMEOUT_S)

    async def wake_up(self) -> None:
        """Return the device to the engine, which is up once it has its adapters again (`EnginePool.mark_ready`)."""
        try:
            await self.channel.ask(messages.WakeUp, LOAD_TIMEOUT_S)
        finally:
            self.channel.mark_awake()

    async def generate(
        self,
        prompt: str,
        version: int,
        stop: tuple[str, ...] = (),
        seed: int | None = None,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        prompt_ids: TokenIds | None = None,
    ) -> Generation:
        """Complete `prompt_ids` or else `prompt` by an adapter. Raises RequestError, AdapterError, WorkerDied.

        If this call is cancelled, the engine drops the request.
        """
        if self.channel.state is WorkerState.ASLEEP:
            await self.channel.until_awake()
        config = self._config
        temperature, top_p = (sampling.temperature, sampling.top_p) if sampling else (None, None)
        max_tokens = max_tokens or config.max_generation_len
        outstanding = len(prompt) // CHARS_PER_TOKEN + max_tokens
        asked = self.channel.ask(
            messages.Generate,
            REQUEST_TIMEOUT_S,
            prompt=prompt,
            adapter_version=version,
            max_tokens=max_tokens,
            temperature=config.temperature if temperature is None else temperature,
            top_p=config.top_p if top_p is None else top_p,
            stop=stop,
            seed=seed,
            prompt_ids=prompt_ids,
        )
        self.outstanding_tokens += outstanding
        try:
            generation: Generation = (await asked).generation
        except asyncio.CancelledError:
            self.channel.cancel(asked)
            raise
        finally:
            self.outstanding_tokens -= outstanding
        if generation.adapter_version != version:
            raise AdapterError(
                f"{self.channel.name} answered with adapter version {generation.adapter_version} instead of {version}"
            )
        return generation

    @property
    def adapters(self) -> set[int]:
        """Loaded versions."""
        if self._holds[0] != self.channel.life:
            self._holds = self.channel.life, set()
        return self._holds[1]

    async def load_adapter(self, version: int, path: Path) -> str:
        """Load an adapter, and return the digest of the one that the engine now holds as `version`.

        An engine that has loaded it before only confirms it, because it may have slept since.
        """
        async with self._loading:
            await self.channel.until_awake()
            adapters = self.adapters
            reply: messages.AdapterDigest
            if version in adapters:
                reply = await self.channel.ask(messages.ConfirmAdapter, LOAD_TIMEOUT_S, version=version)
            else:
                reply = await self.channel.ask(messages.LoadAdapter, LOAD_TIMEOUT_S, version=version, path=str(path))
                adapters.add(version)
            return reply.digest

    async def unload_adapter(self, version: int) -> None:
        """Unload an adapter, if the engine holds `version`."""
        async with self._loading:
            await self.channel.until_awake()
            adapters = self.adapters
            if version not in adapters:
                return
            await self.channel.ask(messages.UnloadAdapter, LOAD_TIMEOUT_S, version=version)
            adapters.discard(version)

    def _receive(self, message: Message) -> None:
        if isinstance(message, EngineStats):
            self.stats = message


class EnginePool:
    """Pool of engines. Requests of an engine that dies go to another one, or to its replacement."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.generated_tokens = 0
        self.resent = 0
        """Number of requests that were repeated because their engine died."""
        self._return = asyncio.Event()

    @property
    def up(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.is_up]

    async def generate(
        self, prompt: str, version: int, stop: tuple[str, ...] = (), seed: int | None = None, **options: Any
    ) -> Generation:
        """Return a completion by the worker with the fewest outstanding tokens; of equals by the first.

        options: further arguments of `EngineClient.generate`.
        """
        while True:
            up = self.up or await self.wait_for_one()
            engine = up[0] if len(up) == 1 else self.choose(up)
            try:
                generation = await engine.generate(prompt, version, stop, seed, **options)
            except WorkerDied:
                self.resent += 1
            else:
                self.generated_tokens += len(generation.completion_ids)
                return generation

    def choose(self, up: Sequence[EngineClient]) -> EngineClient:
        """Return the engine that gets the next request."""
        return min(up, key=lambda engine: engine.outstanding_tokens)

    async def wait_for_one(self) -> list[EngineClient]:
        """Wait until an engine is up; return all that are."""
        while not (up := self.up):
            await self._return.wait()
        return up

    def mark_ready(self, engine: EngineClient) -> None:
        """Record that an engine that died, slept or started late holds the adapters of the others."""
        engine.channel.mark_ready()
        self._return.set()
        self._return = asyncio.Event()

    async def load_adapter(self, version: int, path: Path) -> None:
        """Load an adapter; return when every engine that is up has it.

        Raises RequestError if an engine cannot load it.
        """
        await self.each(lambda engine: engine.load_adapter(version, path))

    async def unload_adapter(self, version: int) -> None:
        await self.each(lambda engine: engine.unload_adapter(version))

    async def each(self, ask: Callable[[EngineClient], Awaitable[T]]) -> list[T | None]:
        """Ask all engines that are up; see `all_of`. An engine that dies gets its adapters when it returns."""
        return await all_of(map(ask, self.up), but=WorkerDied)


async def all_of(asked: Iterable[Awaitable[T]], but: type[Exception] | tuple[()] = ()) -> list[T | None]:
    """Ask at once and wait for all; None for one that ended by `but`. Raises the first error of another kind."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, but):
            raise result
    return [None if isinstance(result, BaseException) else result for result in results]
