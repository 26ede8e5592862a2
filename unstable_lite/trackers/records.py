"""JSON Lines on disk, in parts of bounded size, the full ones compressed; and how to read them back.

Owns file names, and that a crash costs the line being written and no other. Knows nothing of what a line holds.
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
"""Of one record; a compressed part of a megabyte could hold a line of a gigabyte."""


class AppendFile:
    """A file that grows by whole pieces: what there is no room for leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self.size = self._file.tell()

    def write(self, content: bytes) -> None:
        """In the hands of the operating system when this returns. Raises OSError, with the path."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # somebody removed it: what is written now would go with it
            anew = self.path.open("ab", buffering=0)
            self._file.close()
            self._file, self.size = anew, anew.tell()
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
    """`games.jsonl` is being written; `games-000001.jsonl.gz`, `games-000002.jsonl.gz` … are full."""

    def __init__(self, path: Path, part_mb: float = PART_MB) -> None:
        """Go on after what is there; a line that a crash cut is taken off."""
        _drop_unfinished_line(path)
        self._path = path
        self._part_bytes = int(part_mb * 1e6)
        self._file = AppendFile(path)
        self._compressing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compress")

    def write(self, record: Mapping[str, Any]) -> None:
        """In the hands of the operating system when this returns. Raises OSError, and nothing of it is there."""
        self._file.write(to_line(record))
        if self._file.size >= self._part_bytes:
            self._start_next_part()

    def close(self) -> None:
        """Waits for the compression of the last full part."""
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
            log.warning("%s goes on beyond its size: %s", self._path, error.strerror)
            return
        next_part.path = self._path
        self._file.close()
        self._file = next_part
        self._compressing.submit(_compress, full)


def to_line(record: Mapping[str, Any]) -> bytes:
    """A number that is not finite becomes null: JSON has none."""
    try:
        return _ENCODER.encode(record) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which an API's JSON may hold, has no UTF-8: a question mark
        plain = msgspec.to_builtins(record, enc_hook=_plain)
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's; what else cannot be JSON (a reward transform's notes) as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)  # takes a seventh of the time that `json` does


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which then takes its place; where that fails `path` stays as it was.

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
    """One gzip file of all `records`, there whole or not at all."""
    with replaced(path) as partial, gzip.open(partial, "wb", compresslevel=5) as file:
        file.writelines(to_line(record) for record in records)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every record that was written to `path`, its full parts first, compressed or not.

    Raises UnstableError for a line that is no JSON; the last one may be unfinished and is left out.
    """
    for _, part in sorted(_full_parts(path)):
        yield from read_part(part)
    if path.exists():
        yield from read_part(path)


def keep_records(path: Path, is_kept: Callable[[dict[str, Any]], bool], num_late: int) -> None:
    """Take out what is not to be kept, from the newest part back.

    `num_late`: how many records that are to be kept may stand behind ones that are not. Where more of them were found
    older parts hold nothing else.
    """
    parts = [part for _, part in sorted(_full_parts(path))] + [path] * path.exists()
    num_kept = 0
    for part in reversed(parts):
        num_kept += keep_whole_lines(part, is_kept)
        if num_kept > num_late:
            return


def keep_whole_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite one file, `.gz` or not, with the records to keep; how many these are."""
    if not path.exists():
        return 0
    records = list(read_part(path))
    kept = [record for record in records if is_kept(record)]
    if path.suffix != ".gz":  # rewritten in any case: an unfinished line goes
        with replaced(path) as partial:
            partial.write_bytes(b"".join(to_line(record) for record in kept))
    elif len(kept) < len(records):
        write_whole(path, kept)
    return len(kept)


def read_part(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file, `.gz` or not. Raises UnstableError for what is none, and OSError."""
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
    """Raises UnstableError for what is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnstableError(f"{where} is no JSON ({error}); remove it to read the rest") from None
    if not isinstance(record, dict):
        raise UnstableError(f"{where} is no JSON table; remove it to read the rest")
    return record


@contextlib.contextmanager
def understood(where: Path | str) -> Iterator[None]:
    """Raise UnstableError, with the run directory, if the body fails because a file says something else than a run
    writes.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnstableError(f"{where}: its files are not as a run writes them ({reason:.200})") from error


def _full_parts(path: Path) -> list[tuple[int, Path]]:
    """(number, file); the compressed one where both are there."""
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
        log.warning("%s stays as it is, for it cannot be compressed: %s", part, error.strerror)


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start_of_line = end
        while start_of_line > 0:
            start = max(0, start_of_line - 65536)
            file.seek(start)
            newline = file.read(start_of_line - start).rfind(b"\n")
            if newline >= 0:
                start_of_line = start + newline + 1
                break
            start_of_line = start
        if start_of_line < end:
            file.truncate(start_of_line)
