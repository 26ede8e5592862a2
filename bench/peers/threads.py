"""A thread for each game, which blocks until its answer arrives, as users write who start from one game's loop.

Stands for a pool of threads around a blocking client. The client inside is this project's own, to the same engine
process; an HTTP client would cost more. Leaves out scheduling by ratings, buffer, records on disk and metrics, all of
which ours has.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from bench.harness import Questioner, memory_mb, started_engine
from bench.peers.blocking import play
from unstable_lite.config import Config
from unstable_lite.engines.client import EnginePool
from unstable_lite.types import GameSpec


class GameThreads:
    """Games in flight, each in a thread; made on the loop of `pool`, on which the threads wait."""

    def __init__(self, pool: EnginePool, next_spec: Callable[[], GameSpec], num_games: int) -> None:
        self.turns = 0
        """Records of finished games."""
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._next_spec = next_spec
        self._lock = threading.Lock()
        for _ in range(num_games):
            threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        while True:
            with self._lock:
                spec = self._next_spec()
            record = play(spec, self._submit)
            with self._lock:
                self.turns += len(record.turns)

    def _submit(self, prompt: str, version: int, stop: tuple[str, ...]) -> str:
        return asyncio.run_coroutine_threadsafe(self._pool.generate(prompt, version, stop), self._loop).result().text


async def measure(questioner: Questioner, config: Config, next_spec: Callable[[], GameSpec]) -> None:
    async with started_engine(config, threads=questioner.arguments["threads"]) as (pool, _):
        games = GameThreads(pool, next_spec, questioner.arguments["games"])
        questioner.answer({})
        for request in questioner.requests():  # blocks the loop, and so in the end every thread
            await asyncio.sleep(0.1 + 0.2 * request["seconds"])
            turns, before, started, tokens = games.turns, pool.generated_tokens, time.perf_counter(), 0
            while not tokens:
                await asyncio.sleep(request["seconds"])
                tokens = pool.generated_tokens - before
            seconds = time.perf_counter() - started
            questioner.answer(
                {
                    "turns_per_s": (games.turns - turns) / seconds,
                    "tokens_per_s": tokens / seconds,
                    "memory_mb": memory_mb("now"),
                }
            )
