"""Removal of the records that a run made after the checkpoint from which it resumes, because it makes them again.

Owns the mapping from files of a run directory to updates and games. Each file is replaced atomically or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from unstable_lite.config.env_ids import with_slugs
from unstable_lite.errors import UnstableError
from unstable_lite.files import keep_records, keep_whole_lines, read_records, replaced
from unstable_lite.tracking.evaluations import evaluation_group
from unstable_lite.tracking.records import train_files
from unstable_lite.tracking.tensorboard import tag_of


def rewind(
    directory: Path,
    update: int,
    num_games: int,
    in_flight: Collection[int],
    is_repeated: Callable[[dict[str, Any]], bool],
) -> None:
    """Remove all records after `update` from a run directory.

    `num_games`: number of games handed out by then; later games get their numbers again. `in_flight`: those that were
    not over. `is_repeated`: whether a line of eval.jsonl is of an evaluation that continues or is made again.
    """
    evaluations = directory / "eval.jsonl"
    names = {
        (line["step"], to_tag(f"{evaluation_group(line['label'], line['env_id'], line['opponent'])} n"))
        for line in read_records(evaluations)
        if is_repeated(line)
        for to_tag in (str, with_slugs, tag_of)  # of metrics.jsonl, and of TensorBoard's files, also of before
    }

    def is_kept(step: int, logged: Iterable[str]) -> bool:
        return step <= update and not any((step, name) in names for name in logged)

    keep_whole_lines(directory / "metrics.jsonl", lambda line: is_kept(line["step"], line))
    _rewind_tensorboard(directory / "tensorboard", is_kept)
    for name in ("league.jsonl", "alarms.jsonl"):
        keep_whole_lines(directory / name, lambda line: bool(line["step"] <= update))

    def is_known(game: dict[str, Any]) -> bool:
        """Return whether kept records count the game's result; for an evaluation with a quota, eval.jsonl may."""
        number, label = game["game_idx"], game["eval_label"]
        return bool(number < num_games and (number not in in_flight or label is not None))

    keep_records(directory / "games.jsonl", is_known, num_late=len(in_flight))
    for number, path in train_files(directory).items():
        if number > update:
            path.unlink()
    # Last, because it determines the records to remove from the other files.
    keep_whole_lines(evaluations, lambda line: line["step"] <= update and not is_repeated(line))


def _rewind_tensorboard(directory: Path, is_kept: Callable[[int, Iterable[str]], bool]) -> None:
    old = sorted(directory.glob("events.out.tfevents.*"))
    events = [(raw, _event(raw, path)) for path in old for raw in RawEventFileLoader(str(path)).Load()]
    kept = [raw for raw, event in events if is_kept(event.step, (value.tag for value in event.summary.value))]
    if len(kept) == len(events):
        return
    # TensorBoard reads files in the order of their names, which begin with a number.
    with replaced(old[0]) as partial, partial.open("wb") as file:
        writer = RecordWriter(file)
        for raw in kept:
            writer.write(raw)
    for path in old[1:]:
        path.unlink()


def _event(raw: bytes, path: Path) -> Event:
    try:
        return Event.FromString(raw)
    except DecodeError as error:
        raise UnstableError(f"{path}: a record is not an event of TensorBoard ({error}); move the file away") from None
