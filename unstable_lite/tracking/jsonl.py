"""metrics.jsonl: one JSON line for each call of `log`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from unstable_lite.files import AppendFile, to_line


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. Non-finite numbers become null, because JSON has no NaN."""
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(to_line({"step": step, "time": time.time(), **finite}))

    def close(self) -> None:
        self._file.close()
