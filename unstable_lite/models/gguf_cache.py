"""Convert a GGUF file once, into a model directory below the user's cache.

The cache key contains a hash of the file's content, so a changed file is converted again. The conversion needs torch,
so it runs in its own process (convert_gguf.py); nothing here loads torch or transformers.
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

SUFFIX = ".gguf"
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
            _convert(path, Path(unfinished))
            try:
                Path(unfinished).rename(target)
            except OSError:
                if not target.is_dir():  # no other process was faster
                    raise
    except OSError as error:
        raise ModelError(f"{path} cannot be converted: {error}") from error
    return target


def _convert(source: Path, target: Path) -> None:
    """Run convert_gguf.py. Raises ModelError with the last line of its traceback if it fails."""
    process = subprocess.run(
        [sys.executable, "-m", "unstable_lite.models.convert_gguf", str(source.resolve()), str(target)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        # As for a worker: it can import the modules that this process can, but gets no API keys.
        # The file contains everything else that it needs, so it contacts no hub.
        env={name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
        | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"the conversion ended with code {process.returncode}"
        if process.returncode < 0:
            reason = f"the conversion was ended by signal {-process.returncode}; is there enough memory?"
        raise ModelError(f"{source} cannot be converted: {reason}")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base / "unstable_lite" / "gguf"


@functools.lru_cache(maxsize=8)
def _digest(path: Path, _size: int, _mtime_ns: int) -> str:
    """Return 16 hexadecimal digits. Size and time of change are arguments so that a changed file is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
