"""The engines as the orchestrator sees them: one pool, the least loaded worker first.

Turns prompts into Generations and adapters into loaded versions. Knows no games and no learner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from unstable_lite.config import EngineConfig
from unstable_lite.errors import AdapterError, WorkerDied
from unstable_lite.transport.adapters import adapter_part
from unstable_lite.transport.messages import (
    AdapterDigest,
    ConfirmAdapter,
    EngineStats,
    FetchAdapter,
    Generate,
    Generated,
    LoadAdapter,
    Message,
    Sleep,
    UnloadAdapter,
    WakeUp,
)
from unstable_lite.transport.sockets import Peer, Router
from unstable_lite.types import Generation

LOAD_TIMEOUT_S = 300.0
CHARS_PER_TOKEN = 4
"""About what tokenizers make of English. A constant and nothing learned from replies: in `sync` mode, and after a
resume, the same requests must go to the same engines."""


class EngineClient:
    """One engine worker."""

    def __init__(self, router: Router, name: str, config: EngineConfig) -> None:
        self.peer = Peer(router, name, self._receive)
        self.stats = EngineStats(queued=0, running=0, tokens_per_s=0.0, cached_share=0.0)
        self.outstanding_tokens = 0
        """Asked for and not answered yet: prompts by their estimated length, completions at their longest."""
        self._holds: tuple[int, set[int]] = (0, set())
        """In which life which versions are loaded."""
        self._paths: dict[int, Path] = {}
        """Of the versions that it was told to load."""
        self._read: dict[tuple[int, int], str] = {}
        """By life and version: the digest that the engine replied when it loaded an adapter, until it is asked for."""
        self._loading = asyncio.Lock()
        self._config = config
        self._awake = asyncio.Event()
        self._awake.set()
        self._is_resting = False

    @property
    def is_up(self) -> bool:
        return self.peer.is_up and not self._is_resting

    @property
    def is_asleep(self) -> bool:
        """Until it was taken back."""
        return self.peer.is_up and self._is_resting

    async def sleep(self) -> None:
        """What it was asked it still answers; from then on it waits for `wake_up`, and so does who asks it.

        It is up again when it was taken back. Raises WorkerDied if it dies first: then nobody waits for it.
        """
        self._is_resting = True
        self._awake.clear()
        try:
            await self.peer.ask(Sleep, self._config.request_timeout_s + LOAD_TIMEOUT_S)
        except WorkerDied:
            self._awake.set()
            raise

    async def wake_up(self) -> None:
        try:
            await self.peer.ask(WakeUp, LOAD_TIMEOUT_S)
        finally:
            self._awake.set()

    def take_back(self) -> None:
        """It was given what it should hold, and tried."""
        self.peer.take_back()
        self._is_resting = False

    async def generate(
        self,
        prompt: str,
        version: int,
        stop: tuple[str, ...] = (),
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> Generation:
        """One completion by adapter `version`. Raises RequestError, AdapterError, WorkerDied."""
        if not self._awake.is_set():
            await self._awake.wait()
        config = self._config
        max_tokens = max_tokens or config.max_generation_len
        tokens = len(prompt) // CHARS_PER_TOKEN + max_tokens
        self.outstanding_tokens += tokens
        try:
            reply: Generated = await self.peer.ask(
                Generate,
                config.request_timeout_s,
                prompt=prompt,
                adapter_version=version,
                max_tokens=max_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                stop=stop,
                seed=seed,
            )
        finally:
            self.outstanding_tokens -= tokens
        generation = reply.generation
        if generation.adapter_version != version:
            raise AdapterError(
                f"{self.peer.name} answered with adapter version {generation.adapter_version}, asked for {version}"
            )
        return generation

    @property
    def adapters(self) -> set[int]:
        """The versions that it holds."""
        if self._holds[0] != self.peer.life:
            self._holds = self.peer.life, set()
        return self._holds[1]

    async def load_adapter(self, version: int, path: Path) -> None:
        """Nothing, if it holds `version` already."""
        async with self._loading:
            await self._awake.wait()
            adapters = self.adapters
            if version in adapters:
                return
            self._paths[version] = path
            reply: AdapterDigest = await self.peer.ask(LoadAdapter, LOAD_TIMEOUT_S, version=version, path=str(path))
            self._read[self.peer.life, version] = reply.digest
            adapters.add(version)

    async def adapter_digest(self, version: int) -> str:
        """Return the digest of what the engine holds as `version`.

        That is the digest in its reply to `load_adapter`, once; afterwards the engine is asked again, because a sleep
        or a link that was cut may lie between. Raises RequestError if it does not hold `version`.
        """
        async with self._loading:
            await self._awake.wait()
            if (digest := self._read.pop((self.peer.life, version), None)) is not None:
                return digest
            reply: AdapterDigest = await self.peer.ask(ConfirmAdapter, LOAD_TIMEOUT_S, version=version)
            return reply.digest

    async def unload_adapter(self, version: int) -> None:
        """Nothing, if it does not hold `version`."""
        async with self._loading:
            await self._awake.wait()
            adapters = self.adapters
            if version not in adapters:
                return
            await self.peer.ask(UnloadAdapter, LOAD_TIMEOUT_S, version=version)
            adapters.discard(version)
            self._read.pop((self.peer.life, version), None)
            self._paths.pop(version, None)

    def holds_already(self, versions: Iterable[int]) -> None:
        """A worker on another machine came back with these."""
        self.adapters.update(versions)

    def _receive(self, message: Message) -> None:
        if isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, FetchAdapter):
            self.peer.tell(adapter_part(self._paths.get(message.version), message), is_large=True)


class EnginePool:
    """What an engine that dies still owes is asked of another one, or of itself when it is back."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self.generated_tokens = 0
        self.resent = 0
        """Requests that were asked again because their engine died."""
        self._return = asyncio.Event()

    @property
    def up(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.is_up]

    async def generate(
        self, prompt: str, version: int, stop: tuple[str, ...] = (), seed: int | None = None
    ) -> Generation:
        """One completion by the worker with the fewest outstanding tokens; of equals by the first."""
        while True:
            up = self.up or await self.wait_for_one()
            engine = up[0] if len(up) == 1 else self.choose(up)
            try:
                generation = await engine.generate(prompt, version, stop, seed)
            except WorkerDied:
                self.resent += 1
            else:
                self.generated_tokens += len(generation.completion_ids)
                return generation

    def choose(self, up: Sequence[EngineClient]) -> EngineClient:
        """Who gets the next request, of several."""
        return min(up, key=lambda engine: engine.outstanding_tokens)

    async def wait_for_one(self) -> list[EngineClient]:
        """The engines that are up, as soon as one is."""
        while not (up := self.up):
            await self._return.wait()
        return up

    def take_back(self, engine: EngineClient) -> None:
        """It died or slept, is there again, and holds what the others hold."""
        engine.take_back()
        self._return.set()
        self._return = asyncio.Event()

    async def load_adapter(self, version: int, path: Path) -> None:
        """Returns when every engine that is up has it.

        One on another machine that cannot load what another engine can is given up. Raises an ExceptionGroup of
        RequestErrors where nobody can load it, or an engine of this machine cannot.
        """
        failures = await self._ask_each(lambda engine: engine.load_adapter(version, path))
        if any(version in engine.adapters for engine in self.up):
            for engine in list(failures):
                if engine.peer.give_up is not None:
                    with contextlib.suppress(WorkerDied):
                        engine.peer.give_up(f"could not load adapter {version}: {failures.pop(engine)}")
        _raise(failures)

    async def unload_adapter(self, version: int) -> None:
        _raise(await self._ask_each(lambda engine: engine.unload_adapter(version)))

    async def _ask_each(self, ask: Callable[[EngineClient], Awaitable[None]]) -> dict[EngineClient, Exception]:
        """Of all that are up, and wait for all; who could not, and why.

        What one that dies should hold it is given when it is back.
        """
        asked = self.up
        results = await asyncio.gather(*map(ask, asked), return_exceptions=True)
        return {
            engine: result
            for engine, result in zip(asked, results, strict=True)
            if isinstance(result, Exception) and not isinstance(result, WorkerDied)
        }


def _raise(failures: Mapping[EngineClient, Exception]) -> None:
    if failures:
        raise ExceptionGroup("engines", list(failures.values()))
