"""Cost of a turn in each part of the orchestrator: sampled processor time, by the code that is running.

A timer counts the processor time of this process and samples the stack of the main thread every millisecond of it. The
time since the last sample is that of the innermost function that belongs to a part. Unlike a profiler that is called at
every call, this does not make small functions more expensive than large ones. Knows files, not their content.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType

EVERY_S = 0.001

GARBAGE, LOOP, THREADS = "garbage collection", "event loop", "other threads (ZeroMQ's own, nearly all)"
FILES = {
    "/textarena/": "env: its own code",
    "/unstable_lite/games/environments.py": "env: streams of its own, guard, checks",
    "/unstable_lite/games/hang_guard.py": "env: streams of its own, guard, checks",
    "/unstable_lite/games/env_pool.py": "env: streams of its own, guard, checks",
    "/unstable_lite/games/templates.py": "prompt and action: template, markup, extraction",
    "/unstable_lite/games/": "game: loop, record, players, start and end",
    "/unstable_lite/rollout/buffer.py": "rewards and buffer",
    "/unstable_lite/rollout/step_buffer.py": "rewards and buffer",
    "/unstable_lite/rollout/episode_buffer.py": "rewards and buffer",
    "/unstable_lite/rollout/step_counts.py": "rewards and buffer",
    "/unstable_lite/rollout/back_pressure.py": "rewards and buffer",
    "/unstable_lite/rollout/": "game: loop, record, players, start and end",
    "/unstable_lite/transport/codec.py": "messages: pack and unpack",
    "/unstable_lite/transport/messages.py": "messages: pack and unpack",
    "/unstable_lite/transport/": "requests: sockets, replies, deadlines",
    "/unstable_lite/engines/client.py": "requests: sockets, replies, deadlines",
    "/zmq/": "requests: sockets, replies, deadlines",
    "/unstable_lite/league/": "league: scheduler, samplers, ratings",
    "/unstable_lite/rng.py": "league: scheduler, samplers, ratings",
    "/trueskill/": "league: scheduler, samplers, ratings",
    "/unstable_lite/reward_transformations/": "rewards and buffer",
    "/unstable_lite/tracking/": "tracker: windows, transcripts, metrics",
    "/asyncio/": LOOP,
    "/bench/": LOOP,
}
"""Piece of a file's path to the part; the first match wins."""
PARTS = tuple(dict.fromkeys([*FILES.values(), GARBAGE, THREADS]))


class Parts:
    """Processor time of this process by part, sampled within `sampled`; only one at a time."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._known: dict[str, str | None] = {}
        self._looked_at = 0.0

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        all_s, main_s = time.process_time(), time.thread_time()
        self._looked_at = main_s
        gc.callbacks.append(self._collect)
        previous = signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, previous)
            gc.callbacks.remove(self._collect)
        all_s, main_s = time.process_time() - all_s, time.thread_time() - main_s
        self.seconds[THREADS] += max(0.0, all_s - main_s)

    def _look(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._count(self._part(frame))

    def _collect(self, phase: str, info: dict[str, int]) -> None:  # noqa: ARG002
        """Count a garbage collection, which has no Python function on the stack."""
        self._count(GARBAGE if phase == "stop" else self._part(sys._getframe(1)))

    def _count(self, part: str) -> None:
        now = time.thread_time()
        self.seconds[part] += now - self._looked_at
        self._looked_at = now

    def _part(self, frame: FrameType | None) -> str:
        while frame is not None:
            path = frame.f_code.co_filename
            if path == __file__:  # in `_collect`: the first code that ran after a collection
                return GARBAGE
            if path not in self._known:
                self._known[path] = next((part for piece, part in FILES.items() if piece in path), None)
            if (part := self._known[path]) is not None:
                return part
            frame = frame.f_back
        return LOOP
