"""Engine behind blocking calls that is stepped on a tick, as the reference's inference actor.

Represents `submit_prompt(prompt, adapter) -> text` and a loop that sleeps 20 ms before it looks at its queue and steps
the engine; nothing but text comes back. Any of this project's engines can be inside. The step's own time counts towards
the tick, as if vLLM's core computed in its own process while the actor sleeps. Leaves out the actor's reports
and its stall detector. Runs in a manager's process, in place of a Ray actor.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from unstable_lite.config import Config
from unstable_lite.engines.base import load_engine
from unstable_lite.errors import RequestError
from unstable_lite.transport.messages import Failed, Generate
from unstable_lite.transport.worker_main import WorkerSpec

TICK_S = 0.02


class TickingEngine:
    def __init__(self, config_json: str, threads: int, tick_s: float = TICK_S) -> None:
        spec = WorkerSpec(name="engine-0", endpoint="", device="cpu", threads=threads, config_json=config_json)
        self._engine = load_engine(spec)
        self._config = spec.config.engine
        self._tick_s = tick_s
        self._arrived: queue.SimpleQueue[tuple[Generate, Future[str]]] = queue.SimpleQueue()
        self._to_do: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._running: dict[int, Future[str]] = {}
        self._numbers = itertools.count()
        self._takes = threading.Event()
        self._loaded: set[int] = set()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit_prompt(self, prompt: str, version: int, stop: tuple[str, ...]) -> str:
        """Return the whole answer; block until it exists. Raises RequestError."""
        config = self._config
        request = Generate(
            request_id=next(self._numbers),
            prompt=prompt,
            adapter_version=version,
            max_tokens=config.max_generation_len,
            temperature=config.temperature,
            top_p=config.top_p,
            stop=stop,
            seed=None,
        )
        answer: Future[str] = Future()
        self._arrived.put((request, answer))
        return answer.result()

    def load_adapter(self, version: int, path: str, needed: set[int]) -> None:
        """Load an adapter. `needed`: versions that games in flight still request; others are unloaded."""

        def load() -> None:
            for old in self._loaded - needed:
                self._engine.unload_adapter(old)
            self._engine.load_adapter(version, Path(path))
            self._loaded = (self._loaded & needed) | {version}

        done: Future[None] = Future()
        self._to_do.put((load, done))
        done.result()

    def num_waiting(self) -> int:
        """Return the number of requests in the queue."""
        return self._arrived.qsize()

    def go_on(self) -> None:
        self._takes.set()

    def pause(self) -> None:
        """Accept no more requests; running ones are finished."""
        self._takes.clear()

    def _run(self) -> None:
        try:
            while True:
                started = time.monotonic()
                self._take()
                if self._engine.has_unfinished():
                    for reply in self._engine.step():
                        answer = self._running.pop(reply.request_id)
                        if isinstance(reply, Failed):
                            answer.set_exception(RequestError(reply.error))
                            continue
                        answer.set_result(reply.generation.text)
                time.sleep(max(0.0, self._tick_s - (time.monotonic() - started)))
        finally:
            for answer in self._running.values():
                answer.set_exception(RuntimeError("the engine's loop has ended; see its output"))

    def _take(self) -> None:
        while not self._to_do.empty():
            function, done = self._to_do.get()
            function()
            done.set_result(None)
        while self._takes.is_set() and not self._arrived.empty():
            request, answer = self._arrived.get()
            try:
                self._engine.add_request(request)
            except RequestError as error:
                answer.set_exception(error)
            else:
                self._running[request.request_id] = answer


class _Manager(BaseManager):
    pass


_Manager.register("TickingEngine", TickingEngine)


@contextlib.contextmanager
def in_a_process(config: Config, threads: int, tick_s: float = TICK_S) -> Iterator[Any]:
    """Proxy to a TickingEngine in its own process; each calling thread has its own connection."""
    with _Manager(ctx=get_context("spawn")) as manager:
        yield manager.TickingEngine(config.model_dump_json(), threads, tick_s)  # type: ignore[attr-defined]
