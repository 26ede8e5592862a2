"""Scripted engines whose answers take time: at the pace of a real engine's steps, or after a random delay."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import time
from collections import deque
from dataclasses import asdict, dataclass

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.transport.messages import EngineStats, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec

VARIABLE = "BENCH_LATENCY_MODEL"
"""Environment variable of the engine's process: a Latency as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    step_s: float
    """Fixed time of a step: reading the weights, starting kernels, the scheduler."""
    row_s: float
    """Time of a step for each running request."""
    prompt_token_s: float
    """Time of a step for each prompt token that it reads."""
    slots: int
    """Requests at once."""

    def step_seconds(self, rows: int, prompt_tokens: int) -> float:
        return self.step_s + self.row_s * rows + self.prompt_token_s * prompt_tokens

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class BatchingEngine(ScriptedEngine):
    """Scripted engine at a real engine's pace. A step that begins late ends at most one step late.

    Models continuous batching. A request waits for one of `slots`; its first step reads its prompt, which makes that
    step longer for every request in it; then every step makes one token of each running request. Does not model prefix
    reuse, preemption, split prompts, or attention that grows with the context.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._latency = Latency(**json.loads(os.environ[VARIABLE]))
        self._queued: deque[Generated] = deque()
        self._running: list[tuple[int, int, Generated]] = []
        """Heap of requests by the step that makes the last token."""
        self._numbers = itertools.count()
        self._steps = 0
        self._due = 0.0
        """Time at which the newest step should have ended."""

    def add_request(self, request: Generate) -> None:
        super().add_request(request)
        self._queued.append(self._finished.pop())

    def step(self) -> list[Generated]:
        prompt_tokens = 0
        while self._queued and len(self._running) < self._latency.slots:
            new = self._queued.popleft()
            prompt_tokens += len(new.generation.prompt_ids)
            last_step = self._steps + len(new.generation.completion_ids)
            heapq.heappush(self._running, (last_step, next(self._numbers), new))
        step_s, now = self._latency.step_seconds(len(self._running), prompt_tokens), time.monotonic()
        self._due = max(self._due, now - step_s) + step_s
        time.sleep(max(0.0, self._due - now))
        self._steps += 1
        finished = []
        while self._running and self._running[0][0] <= self._steps:
            finished.append(heapq.heappop(self._running)[2])
        if not self.has_unfinished():
            self._due = 0.0
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._queued or self._running)

    def stats(self) -> EngineStats:
        return self._report(queued=len(self._queued), running=len(self._running))


LATENCY = "BENCH_LATENCY_S"
"""Environment variable: mean seconds per answer."""
NAP_S = 0.005


class DelayedEngine(ScriptedEngine):
    """Scripted engine that answers after a random delay, so that many requests are in flight."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._latency_s = float(os.environ[LATENCY])
        self._delays = random.Random(spec.identity)
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Generated]] = []

    def add_request(self, request: Generate) -> None:
        super().add_request(request)
        if request.seed is not None:  # a canary: made-up delays must not count as recovery time
            heapq.heappush(self._waiting, (0.0, next(self._numbers), self._finished.pop()))
            return
        due = time.monotonic() + self._latency_s * self._delays.uniform(0.5, 1.5)
        heapq.heappush(self._waiting, (due, next(self._numbers), self._finished.pop()))

    def step(self) -> list[Generated]:
        if self._waiting[0][0] > time.monotonic():
            time.sleep(NAP_S)
        finished = []
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            finished.append(heapq.heappop(self._waiting)[2])
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def stats(self) -> EngineStats:
        return self._report(queued=0, running=len(self._waiting))
