"""metrics.jsonl: one JSON line for each call of `log`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from unstable_lite.files import AppendFile, to_line


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line, in which a number that is not finite is null."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._file.write(to_line({"step": step, "time": time.time(), **numbers}))

    def close(self) -> None:
        self._file.close()
