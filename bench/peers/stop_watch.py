"""The clock of a training that is looked at from outside: it runs only while the training does.

The subject's side of `bench end_to_end`, the same for this project and for the reference's way.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.harness import Questioner


class Over(Exception):
    """Nobody wants to know more."""


class StopWatch:
    def __init__(self, questioner: Questioner, limit_s: float) -> None:
        self._questioner = questioner
        self._requests = questioner.requests()
        self._limit_s = limit_s
        self._seconds = 0.0
        self._since = 0.0

    @property
    def is_late(self) -> bool:
        return self._seconds + time.perf_counter() - self._since > self._limit_s

    def start(self) -> None:
        """Everything is there; blocks until training is to begin. Raises Over."""
        self._questioner.answer({})
        self._wait()

    def tell(self, update: int | None, adapter: Path | None) -> None:
        """This update has been made, or none within the limit; blocks until training is to go on. Raises Over."""
        self._seconds += time.perf_counter() - self._since
        self._questioner.answer(
            {"seconds": self._seconds, "update": update, "adapter": str(adapter) if adapter else None}
        )
        self._wait()

    def _wait(self) -> None:
        if next(self._requests, None) is None:
            raise Over
        self._since = time.perf_counter()
