"""Clock of a training that another process observes: it runs only while the training does.

The subject's side of `bench end_to_end`, the same for this project and for the reference's way.
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.harness import Questioner


class Over(Exception):
    """The observer needs no more updates."""


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
        """Report that all parts are up, and block until training may begin. Raises Over."""
        self._questioner.answer({})
        self._wait()

    def tell(self, update: int | None, adapter: Path | None) -> None:
        """Report an update, or none within the limit, and block until training may continue. Raises Over."""
        self._seconds += time.perf_counter() - self._since
        self._questioner.answer(
            {"seconds": self._seconds, "update": update, "adapter": str(adapter) if adapter else None}
        )
        self._wait()

    def _wait(self) -> None:
        if next(self._requests, None) is None:
            raise Over
        self._since = time.perf_counter()
