"""Collection as in the reference: a Ray task for each game, which blocks until an actor has its answer.

Stands for its `Collector` and `run_game`: as many tasks in flight as games, each in a process of its own; a remote call
a turn to an actor that looks at its queue every 20 ms (`ticking_engine.py`); one finished game handled at a time.
Leaves out the reference's scheduler, registry, buffer and tracker, which are actors too and cost a remote call or more
a game, and vLLM, which its game processes import. So it is measured at its best.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from bench.harness import MB, Questioner
from bench.peers.blocking import play
from bench.peers.ticking_engine import TICK_S, TickingEngine
from unstable_lite.config import Config
from unstable_lite.types import GameRecord, GameSpec

OBJECT_STORE_BYTES = 100_000_000


@contextlib.contextmanager
def started_ray() -> Iterator[Any]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as directory:
        ray.init(
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            _temp_dir=directory,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


class GameTasks:
    """Games in flight, each a Ray task."""

    def __init__(self, ray: Any, engine: Any, next_spec: Callable[[], GameSpec], num_games: int) -> None:
        self._ray = ray
        self._engine = engine
        self._next_spec = next_spec
        # As in the reference a task reserves no core: all of them run at once.
        self._task = ray.remote(num_cpus=0, max_retries=0)(_game)
        self._in_flight: dict[Any, GameSpec] = {}
        while len(self._in_flight) < num_games:
            self._launch()

    @property
    def specs(self) -> list[GameSpec]:
        return list(self._in_flight.values())

    def next_finished(self, timeout_s: float) -> GameRecord | None:
        """Return the record of a finished game and start another one; None if none ends within the time."""
        done, _ = self._ray.wait(list(self._in_flight), num_returns=1, timeout=timeout_s)
        if not done:
            return None
        del self._in_flight[done[0]]
        self._launch()
        record: GameRecord = self._ray.get(done[0])
        return record

    def _launch(self) -> None:
        spec = self._next_spec()
        self._in_flight[self._task.remote(spec, self._engine)] = spec


def engine_actor(ray: Any, config: Config, threads: int, num_games: int, tick_s: float = TICK_S) -> Any:
    actor = ray.remote(num_cpus=0, max_concurrency=num_games + 8)(TickingEngine)
    return actor.remote(config.model_dump_json(), threads, tick_s)


def _game(spec: GameSpec, engine: Any) -> GameRecord:
    import ray

    return play(spec, lambda *request: ray.get(engine.submit_prompt.remote(*request)))


def measure(questioner: Questioner, config: Config, next_spec: Callable[[], GameSpec]) -> None:
    num_games = questioner.arguments["games"]
    with started_ray() as ray:
        engine = engine_actor(ray, config, questioner.arguments["threads"], num_games)
        ray.get(engine.go_on.remote())
        games = GameTasks(ray, engine, next_spec, num_games)
        first = set(spec.game_idx for spec in games.specs)
        while first:  # until every game has its process
            if (record := games.next_finished(1.0)) is not None:
                first.discard(record.spec.game_idx)
        ray.get(engine.pause.remote())
        questioner.answer({})
        for request in questioner.requests():
            ray.get(engine.go_on.remote())
            settled = time.perf_counter() + 0.1 + 0.2 * request["seconds"]
            while time.perf_counter() < settled:
                games.next_finished(0.01)
            turns, tokens, started = 0, ray.get(engine.generated_tokens.remote()), time.perf_counter()
            while (left := started + request["seconds"] - time.perf_counter()) > 0:
                record = games.next_finished(left)
                turns += len(record.turns) if record is not None else 0
            while (made := ray.get(engine.generated_tokens.remote()) - tokens) == 0:
                games.next_finished(0.01)
            seconds = time.perf_counter() - started
            ray.get(engine.pause.remote())
            memory_mb, processes = _memory()
            questioner.answer(
                {
                    "turns_per_s": turns / seconds,
                    "tokens_per_s": made / seconds,
                    "memory_mb": memory_mb,
                    "processes": processes,
                }
            )


def _memory() -> tuple[float, int]:
    """Return the memory in MB of this process and of all that Ray started, shared memory once, and their number."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / MB, len(processes)
