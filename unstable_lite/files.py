"""JSON Lines on disk, written and read in parts of bounded size, of which the full ones are compressed.

Owns the file names, and guarantees that a crash costs only the line being written, and that no file is written through
a link. Knows nothing of a line's content but the types of some keys.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import logging
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unstable_lite.errors import ConfigError, UnstableError

log = logging.getLogger(__name__)

PART_MB = 64.0
MAX_LINE_BYTES = 256 << 20
"""Longest record; a compressed part of a megabyte could hold a line of a gigabyte."""


def open_to_write(path: Path, flags: int) -> int:
    """Open a file as `os.open` does, and create it if absent. Raises OSError for a link and for a FIFO."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o666)


def open_log(path: Path) -> io.FileIO:
    """Open a log to append to, and make its directory, which a person may have removed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return io.FileIO(open_to_write(path, os.O_APPEND), "ab")


def check_links(directory: Path) -> None:
    """Raise ConfigError if a link in a run directory leads out of it, or an entry is neither a file nor a directory.

    The run may be another person's: nothing may be read or written elsewhere, and no FIFO be waited for. `directory`
    itself may be a link.
    """
    root = os.path.realpath(directory)
    for path in (Path(place, name) for place, *names in os.walk(root) for name in itertools.chain(*names)):
        with contextlib.suppress(FileNotFoundError):  # the run is in progress
            mode = path.lstat().st_mode
            is_log_of_wandb = path.name == "debug-core.log" and path.is_relative_to(f"{root}/wandb")
            if stat.S_ISLNK(mode) and not (is_log_of_wandb or Path(os.path.realpath(path)).is_relative_to(root)):
                raise ConfigError(f"{path} is a link to {path.readlink()}, outside of the run; remove it")
            if not (stat.S_ISLNK(mode) or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ConfigError(f"{path} is neither a file nor a directory; remove it")


_TYPES: dict[str, Any] = {"step": int, "n": int, "models": dict[str, list[Any]], "matches": list[list[Any]]}
_TYPES |= dict.fromkeys(("label", "model", "env_id", "opponent", "kind", "end", "text", "cell"), str)
_TYPES |= {"eval_label": str | None, "points": float | None, "mean_reward": float | None}
_LINE = msgspec.defstruct("Line", [(key, kind | msgspec.UnsetType, msgspec.UNSET) for key, kind in _TYPES.items()])
"""Keys with one type in every file that has them, on which readers rely."""


class Record(dict[str, Any]):
    """Record of a file, whose missing keys are an UnstableError with its place."""

    where: str

    def __missing__(self, key: str) -> Any:
        raise UnstableError(f"{self.where} has no {key!r}; remove it to read the rest")


class AppendFile:
    """A file that grows by whole pieces: a write that finds no room leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = io.FileIO(open_to_write(path, os.O_APPEND), "ab")
        self.size = self._file.tell()

    def write(self, content: bytes) -> None:
        """Hand `content` to the operating system before returning. Raises OSError, with the path."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the file was removed: further writes would be lost with it
            new_file = io.FileIO(open_to_write(self.path, os.O_APPEND), "ab")
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
        if path.is_file():
            end = path.read_bytes().rfind(b"\n") + 1
            with io.FileIO(open_to_write(path, 0), "wb") as file:
                file.truncate(end)
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


def to_line(record: Mapping[str, Any] | msgspec.Struct) -> bytes:
    """Return the record as a line of JSON; a number that is not finite becomes null, because JSON has none."""
    try:
        return _ENCODER.encode(record) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which an API's JSON may hold, has no UTF-8: write a question mark
        builtins = msgspec.to_builtins(record, enc_hook=plain)
        written = json.dumps(builtins, ensure_ascii=False).encode("utf-8", "replace")
        return _ENCODER.encode(json.loads(written)) + b"\n"


def plain(value: Any) -> Any:
    """Return a numpy number as Python's, and any other value without JSON form (a reward transform's notes) as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=plain)  # takes a seventh of the time of `json`


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` to write to, then rename it to `path`, which stays unchanged if that fails.

    Raises OSError, with `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # left behind by a process that died, or a link
        os.close(open_to_write(partial, os.O_EXCL))
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
    kept = []
    for record in records:
        with understood(record.where):
            kept += [record] * bool(is_kept(record))
    if path.suffix != ".gz":  # rewritten in any case, to remove an unfinished line
        with replaced(path) as partial:
            partial.write_bytes(b"".join(to_line(record) for record in kept))
    elif len(kept) < len(records):
        write_whole(path, kept)
    return len(kept)


def read_part(path: Path) -> Iterator[Record]:
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


def parsed_line(line: bytes, where: str) -> Record:
    """Parse one record. Raises UnstableError if the line is not a JSON table, or if a key has a wrong type."""
    try:
        record = json.loads(line)
        msgspec.convert(record, _LINE)
    except (ValueError, RecursionError) as error:
        what = "a record" if isinstance(error, msgspec.ValidationError) else "JSON"
        raise UnstableError(f"{where} is not {what} ({error}); remove it to read the rest") from None
    found = Record(record)
    found.where = where
    return found


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
