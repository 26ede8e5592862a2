"""Convert a GGUF file once, into a model directory below the user's cache.

The cache key contains a hash of the file's content, so a changed file is converted again. The conversion needs torch,
so it runs in its own process (loading.py); nothing here loads torch or transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unstable_lite.errors import ModelError
from unstable_lite.plugins import environment_without_keys

SUFFIX = ".gguf"
STRING, ARRAY = 8, 9
SIZES = dict(enumerate((1, 1, 2, 2, 4, 4, 4, 1, 0))) | dict.fromkeys((10, 11, 12), 8)
"""Bytes of a value by its type in GGUF. A string begins with its length; arrays of arrays are not in use."""
ABANDONED_S = 24 * 3600
"""Age in seconds from which an unfinished directory is removed. No conversion takes as long."""


def converted(path: Path, may_convert: bool = True) -> Path:
    """Return the model directory that `path`, a GGUF file, is converted to; convert it first if that is needed.

    Reports a conversion on stderr, because stdout may be redirected. Processes that convert the same file at the same
    time do the work twice and end with the same directory.

    Raises ModelError if the file cannot be read or converted, if the package gguf is missing, or if the file is not
    converted yet and `may_convert` is false.
    """
    try:
        info = path.stat()
        digest = _digest(path, info.st_size, info.st_mtime_ns)
        target = _cache() / f"{path.stem}-{digest}"
        if target.is_dir():
            return target
        if not may_convert:
            raise ModelError(f"{path} is not converted yet")
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"{path}: to read GGUF files: pip install 'unstable-lite[gguf]'")
        target.parent.mkdir(parents=True, exist_ok=True)
        for left_behind in target.parent.glob(".*"):  # by a conversion that was killed
            with contextlib.suppress(FileNotFoundError):  # another process removes it too
                if time.time() - left_behind.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(left_behind, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True
        ) as unfinished:
            print(f"converting {path} to {target}, once", file=sys.stderr)  # noqa: T201
            _check_lengths(path)
            if reason := run_alone("convert", str(path.resolve()), unfinished):
                raise ModelError(f"{path} cannot be converted: {reason}")
            try:
                Path(unfinished).rename(target)
            except OSError:
                if not target.is_dir():  # no other process was faster
                    raise
    except OSError as error:
        raise ModelError(f"{path} cannot be converted: {error}") from error
    return target


def _check_lengths(path: Path) -> None:
    """Raise ModelError if the header of a GGUF file declares more than the file holds: its reader would not end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        is_big_endian = file.read(8)[4:6] == b"\0\0"  # the version, a small number, follows "GGUF"

        def skip(length: int) -> None:
            if length > (left := size - file.tell()):
                lengths = f"its header declares {length} bytes, and {left} are left"
                raise ModelError(f"{path} is damaged, or not a GGUF file: {lengths}")
            file.seek(length, os.SEEK_CUR)

        def number(length: int = 8) -> int:
            if len(content := file.read(length)) < length:
                skip(length)
            return int.from_bytes(content, "big" if is_big_endian else "little")

        num_tensors, num_keys = number(), number()
        for _ in range(num_keys):
            skip(number())
            kind, length = number(4), 1
            if kind == ARRAY:
                kind, length = number(4), number()
            for _ in range(length if kind == STRING else 0):
                skip(number())
            skip(length * SIZES.get(kind, size + 1))
        for _ in range(num_tensors):
            skip(number())
            skip(8 * number(4) + 12)


def run_alone(*arguments: str) -> str:
    """Run loading.py, which loads torch, in a process of its own; return the last line of its stderr if it fails."""
    process = subprocess.run(
        [sys.executable, "-m", "unstable_lite.models.loading", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        # As for a worker: it can import the modules that this process can, but gets no API keys.
        # It needs nothing but files of this machine, so it contacts no hub.
        env=environment_without_keys() | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
    )
    if process.returncode < 0:
        return f"its process was ended by signal {-process.returncode}; is there enough memory?"
    lines = process.stderr.strip().splitlines() or [f"its process ended with code {process.returncode}"]
    return lines[-1] if process.returncode else ""


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base / "unstable_lite" / "gguf"


@functools.lru_cache(maxsize=8)
def _digest(path: Path, _size: int, _mtime_ns: int) -> str:
    """Return 16 hexadecimal digits. Size and time of change are arguments so that a changed file is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
