"""Take back what a run told after the checkpoint that it goes on from: it will happen again, and be told again.

Owns which files of a run directory tell of which update or game. Every file is replaced whole or stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from unstable_lite.trackers.records import keep_records, keep_whole_lines, replaced


def rewind(directory: Path, update: int, num_games: int, num_ended: int) -> None:
    """`num_games`: how many had been handed out at that update, the later ones get their numbers again; `num_ended`:
    how many of them were over.
    """
    for name in ("metrics.jsonl", "eval.jsonl", "league.jsonl", "alarms.jsonl"):
        keep_whole_lines(directory / name, _until(update))
    keep_records(
        directory / "games.jsonl",
        lambda record: bool(record["game_idx"] < num_games),
        num_late=num_games - num_ended,
    )
    for path in (directory / "train_data").glob("step-*.jsonl.gz"):
        if int(path.name.removeprefix("step-").partition(".")[0]) > update:
            path.unlink()
    _rewind_tensorboard(directory / "tensorboard", update)


def _until(update: int) -> Callable[[dict[str, Any]], bool]:
    return lambda record: bool(record["step"] <= update)


def _rewind_tensorboard(directory: Path, update: int) -> None:
    old = sorted(directory.glob("events.out.tfevents.*"))
    events = [raw for path in old for raw in RawEventFileLoader(str(path)).Load()]
    kept = [raw for raw in events if Event.FromString(raw).step <= update]
    if len(kept) == len(events):
        return
    # Files are read in the order of their names, which begin with a number.
    with replaced(old[0]) as partial, partial.open("wb") as file:
        writer = RecordWriter(file)
        for raw in kept:
            writer.write(raw)
    for path in old[1:]:
        path.unlink()
