"""TensorBoard event files, written without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.summary import Writer


class TensorBoardSink:
    def __init__(self, directory: Path) -> None:
        self._writer = Writer(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
