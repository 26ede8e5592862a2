"""Games in lock step: the next requests of all games go to the engines together.

An engine rounds differently if the other requests of its batch differ, and these are random if each game runs at its
own pace. In lock step, requests leave when every game of the round has asked or is over, in the order of their seeds.
So the generated text depends on the games alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from unstable_lite.games.players.policy import Generates
from unstable_lite.types import Generation

T = TypeVar("T")

_Request = tuple[Callable[[], Awaitable[Generation]], asyncio.Future[Generation]]
"""Function that asks an engine, and the future of its answer."""


class LockStep:
    def __init__(self, generate: Generates) -> None:
        self._generate = generate
        self._num_playing = 0
        self._asked: dict[int, _Request] = {}
        """Requests that wait for those of the other games, by seed."""
        self._waves: set[asyncio.Task[None]] = set()

    async def play(self, games: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Play all of `games` to their end and return their results; the first error ends them all."""
        self._num_playing += len(games)
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(self._counted(game)) for game in games]
        return [task.result() for task in playing]

    async def generate(
        self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None, **options: Any
    ) -> Generation:
        """Return one completion for a game that `play` plays; `seed` is required, and no two requests may share it."""
        assert seed is not None and seed not in self._asked
        reply: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._asked[seed] = partial(self._generate, prompt, version, stop, seed, **options), reply
        self._send_if_all_asked()
        try:
            return await reply
        finally:
            self._asked.pop(seed, None)  # its game was abandoned before the others had asked

    async def _counted(self, game: Coroutine[Any, Any, T]) -> T:
        try:
            return await game
        finally:
            self._num_playing -= 1
            self._send_if_all_asked()

    def _send_if_all_asked(self) -> None:
        if self._asked and len(self._asked) == self._num_playing:
            wave = [self._asked.pop(seed) for seed in sorted(self._asked)]
            task = asyncio.create_task(self._answer(wave))
            self._waves.add(task)
            task.add_done_callback(self._waves.discard)

    async def _answer(self, wave: Sequence[_Request]) -> None:
        """Deliver all replies together and in order, so that the games continue in order, too."""
        results = await asyncio.gather(*(ask() for ask, _ in wave), return_exceptions=True)
        for (_, reply), result in zip(wave, results, strict=True):
            if reply.done():
                continue
            if isinstance(result, BaseException):
                reply.set_exception(result)
            else:
                reply.set_result(result)
