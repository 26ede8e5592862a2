"""metrics.jsonl: one line a flush, readable by anything."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers that are not finite become null: JSON has no NaN."""
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
