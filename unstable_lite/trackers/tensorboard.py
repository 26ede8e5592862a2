"""TensorBoard event files, written without torch."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from unstable_lite.trackers.records import AppendFile

PREFIX = "events.out.tfevents."


class TensorBoardSink:
    """Written at once and whole, not by a thread that a full disk ends."""

    def __init__(self, directory: Path) -> None:
        # TensorBoard reads files in the order of their names. By the clock, which can jump, a resumed run's would come
        # before the ones that it goes on from.
        numbers = [int(path.name.removeprefix(PREFIX).partition(".")[0]) for path in directory.glob(f"{PREFIX}*")]
        number = max(numbers, default=0) + 1
        self._file = AppendFile(directory / f"{PREFIX}{number:010d}.{socket.gethostname()}")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        event = Event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.MergeFrom(scalar_pb(name, value))
        self._write(event)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())
