"""JSON Lines on disk, written and read in parts of bounded size, of which the full ones are compressed.

Owns the file names, and guarantees that a crash costs only the line being written. Knows nothing of a line's content.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unstable_lite.errors import UnstableError

log = logging.getLogger(__name__)

PART_MB = 64.0
MAX_LINE_BYTES = 256 << 20
"""Longest record; a compressed part of a megabyte could hold a line of a gigabyte."""


class AppendFile:
    """A file that grows by whole pieces: a write that finds no room leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self.size = self._file.tell()

    def write(self, content: bytes) -> None:
        """Hand `content` to the operating system before returning. Raises OSError, with the path."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the file was removed: further writes would be lost with it
            new_file = self.path.open("ab", buffering=0)
            self._file.close()
            self._file, self.size = new_file, new_file.tell()
        written = 0
        try:
            while written < len(content):
                written += self._file.write(content[written:])
        except OSError as error:
            self._file.truncate(self.size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.size += written

    def close(self) -> None:
        self._file.close()


class RecordLog:
    """A log in parts: `games.jsonl` is being written; `games-000001.jsonl.gz`, `games-000002.jsonl.gz` … are full."""

    def __init__(self, path: Path, part_mb: float = PART_MB) -> None:
        """Continue after the existing records; remove a last line that a crash cut off."""
        _drop_unfinished_line(path)
        self._path = path
        self._part_bytes = int(part_mb * 1e6)
        self._file = AppendFile(path)
        self._compressing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compress")

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand the record to the operating system before returning. Raises OSError without writing a part of it."""
        self._file.write(to_line(record))
        if self._file.size >= self._part_bytes:
            self._start_next_part()

    def close(self) -> None:
        """Close the log and wait until its last full part is compressed."""
        self._file.close()
        self._compressing.shutdown()

    def _start_next_part(self) -> None:
        try:
            number = max((number for number, _ in _full_parts(self._path)), default=0) + 1
            full = self._path.with_name(f"{self._path.stem}-{number:06d}.jsonl")
            next_part = AppendFile(self._path.with_name(f".{self._path.name}.next"))
            self._path.rename(full)
            next_part.path.rename(self._path)
        except OSError as error:
            log.warning(
                "%s grows beyond its size limit, because no new part can be made: %s", self._path, error.strerror
            )
            return
        next_part.path = self._path
        self._file.close()
        self._file = next_part
        self._compressing.submit(_compress, full)


def to_line(record: Mapping[str, Any]) -> bytes:
    """Return the record as a line of JSON; a number that is not finite becomes null, because JSON has none."""
    try:
        return _ENCODER.encode(record) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which an API's JSON may hold, has no UTF-8: write a question mark
        plain = msgspec.to_builtins(record, enc_hook=_plain)
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    """Return a numpy number as Python's, and any other value without JSON form (a reward transform's notes) as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)  # takes a seventh of the time of `json`


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` to write to, then rename it to `path`, which stays unchanged if that fails.

    Raises OSError, with `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write one gzip file of all `records`, which exists either whole or not at all."""
    with replaced(path) as partial, gzip.open(partial, "wb", compresslevel=5) as file:
        file.writelines(to_line(record) for record in records)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every record that was written to `path`, its full parts first, compressed or not.

    Raises UnstableError for a line that is not JSON; an unfinished last line is left out.
    """
    for _, part in sorted(_full_parts(path)):
        yield from read_part(part)
    if path.exists():
        yield from read_part(path)


def keep_records(path: Path, is_kept: Callable[[dict[str, Any]], bool], num_late: int) -> None:
    """Remove all other records, from the newest part back.

    `num_late`: largest number of records to keep that may follow one to remove. If more are found, older parts have
    only records to keep.
    """
    parts = [part for _, part in sorted(_full_parts(path))] + [path] * path.exists()
    num_kept = 0
    for part in reversed(parts):
        num_kept += keep_whole_lines(part, is_kept)
        if num_kept > num_late:
            return


def keep_whole_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite one file, `.gz` or not, with the records to keep; return their number."""
    if not path.exists():
        return 0
    records = list(read_part(path))
    kept = [record for record in records if is_kept(record)]
    if path.suffix != ".gz":  # rewritten in any case, to remove an unfinished line
        with replaced(path) as partial:
            partial.write_bytes(b"".join(to_line(record) for record in kept))
    elif len(kept) < len(records):
        write_whole(path, kept)
    return len(kept)


def read_part(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one file, `.gz` or not. Raises UnstableError for a line that is not a record; OSError."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if len(line) == MAX_LINE_BYTES:
                    raise UnstableError(f"{path}, line {number} is longer than {MAX_LINE_BYTES} bytes; remove it")
                if not line.endswith(b"\n"):
                    return
                yield parsed_line(line, f"{path}, line {number}")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UnstableError(f"{path} is damaged ({error}); move it away to read the rest") from None


def parsed_line(line: bytes, where: str) -> dict[str, Any]:
    """Parse one record. Raises UnstableError if the line is not a JSON table."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnstableError(f"{where} is not JSON ({error}); remove it to read the rest") from None
    if not isinstance(record, dict):
        raise UnstableError(f"{where} is not a JSON table; remove it to read the rest")
    return record


@contextlib.contextmanager
def understood(where: Path | str) -> Iterator[None]:
    """Raise UnstableError, with the run directory, if the body fails on content that a run does not write."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnstableError(f"{where}: its files are not as a run writes them ({reason:.200})") from error


def _full_parts(path: Path) -> list[tuple[int, Path]]:
    """Return (number, file) of each full part; the compressed file if both exist."""
    name = re.compile(re.escape(path.stem) + r"-(\d{6})\.jsonl(\.gz)?")
    parts: dict[int, Path] = {}
    for file in sorted(path.parent.glob(f"{path.stem}-*.jsonl*")):  # x.jsonl before x.jsonl.gz
        if match := name.fullmatch(file.name):
            parts[int(match[1])] = file
    return list(parts.items())


def _compress(part: Path) -> None:
    try:
        with (
            replaced(part.with_name(f"{part.name}.gz")) as partial,
            part.open("rb") as source,
            gzip.open(partial, "wb", compresslevel=5) as compressed,
        ):
            shutil.copyfileobj(source, compressed, 1 << 20)
        part.unlink()
    except OSError as error:
        log.warning("%s stays as it is, because it cannot be compressed: %s", part, error.strerror)


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if (end := content.rfind(b"\n") + 1) < len(content):
        os.truncate(path, end)
