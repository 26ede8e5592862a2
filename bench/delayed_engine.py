"""Scripted engine whose answers take time, so that as many requests are in flight as at a real engine."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import time

from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.transport.messages import EngineStats, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec

LATENCY = "BENCH_LATENCY_S"
"""Environment variable: mean seconds per answer."""
NAP_S = 0.005


class DelayedEngine(ScriptedEngine):
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
        return self._throughput.report(queued=0, running=len(self._waiting))
