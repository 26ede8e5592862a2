"""Adapter files in shared memory, through which the learner passes adapters to the engines.

A version is a PEFT directory in tmpfs, written once under a name that is never reused; adapters/table.py decides when
it is removed. A lock file marks the arena as in use: the lock ends with its process, and the next start of any run
removes arenas that are not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "unstable_lite-"
LOCK = "lock"
NAMELESS_FOR_S = 60.0
"""Age in seconds at which an arena that was never renamed counts as abandoned."""


class AdapterStore:
    """Arena of one run. The base, version 0, has no directory."""

    def __init__(
        self, run_id: str, fallback: Path, bytes_needed: int, alarm: Callable[[str], None] = log.warning
    ) -> None:
        """Create the arena in shared memory, or in `fallback` if shared memory is absent or too small.

        `remark` then says why the arena is not in shared memory.
        """
        problem = None
        if not os.access(SHARED_MEMORY, os.W_OK):
            problem = f"{SHARED_MEMORY} is absent or not writable"
        elif (free := shutil.disk_usage(SHARED_MEMORY).free) < bytes_needed:
            problem = f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, {bytes_needed / 1e6:.0f} MB may be needed"
        self.remark = problem and f"{problem}: adapters are written to {fallback}"
        self._run_id = run_id
        self._fallback = fallback
        self._alarm = alarm
        self._locks: list[int] = []
        self.outside: dict[int, Path] = {}
        """Directories of adapters that are not in the arena, and stay as they are."""
        self._directories = [self._make(fallback if problem else SHARED_MEMORY)]
        """Directories of the arena; the last one is written to."""

    @property
    def directory(self) -> Path:
        return self._directories[-1]

    def fall_back(self, reason: str) -> bool:
        """Write to the fallback from now on, and raise an alarm. Return False if that was so already."""
        if self.directory.parent == self._fallback:
            return False
        self._directories.append(self._make(self._fallback))
        self._alarm(f"{reason}. From now on adapters go through {self.directory}")
        return True

    def path(self, version: int) -> Path:
        return self.outside.get(version) or self._place(f"v{version}")

    def learner_state(self, version: int) -> Path:
        """Return the directory of the learner's state at a version, from which a restarted learner resumes."""
        return self._place(f"learner-{version}")

    def bytes_used(self) -> int:
        files = [file for directory in self._directories for file in directory.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    def unlink(self, version: int) -> None:
        if self.outside.pop(version, None) is None:
            shutil.rmtree(self.path(version), ignore_errors=True)

    def close(self) -> None:
        """Remove all directories and release their locks."""
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())

    def _make(self, parent: Path) -> Path:
        # Lock it under another name first, so that a run that starts now cannot mistake it for a dead run's.
        nameless = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{self._run_id}-", dir=parent))
        lock = try_lock(nameless)
        assert lock is not None, f"{nameless} is new but locked"
        self._locks.append(lock)
        return nameless.rename(nameless.with_name(nameless.name.removeprefix(".")))

    def _place(self, name: str) -> Path:
        """Return the path of `name` if it was written, or else the path to write it to."""
        written = (directory / name for directory in self._directories if (directory / name).exists())
        return next(written, self.directory / name)


def reap_stale_arenas(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's arenas in `parent` that no living process holds; return the removed directories.

    `parent` may be writable for all users: directories of other users are not touched, links are not followed.
    """
    reaped = []
    for directory in (*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")):
        with contextlib.suppress(OSError):  # a link, or just removed by another process
            if _reap(directory):
                reaped.append(directory)
    return reaped


def _reap(directory: Path) -> bool:
    """Remove `directory` if it is a stale arena of this user. Return whether it was."""
    with _opened(directory, os.O_NOFOLLOW) as descriptor:
        status = os.fstat(descriptor)
        is_fresh = directory.name.startswith(".") and time.time() - status.st_mtime < NAMELESS_FOR_S
        if status.st_uid != os.geteuid() or is_fresh:
            return False
        lock = _try_lock_in(descriptor)
    if lock is None:
        return False
    try:
        shutil.rmtree(directory)
    finally:
        os.close(lock)
    return True


def try_lock(directory: Path) -> int | None:
    """Lock the file `lock` in `directory`, created if absent. Return its descriptor; None if a living process holds it.

    Raises OSError, including if the file is a symbolic link.
    """
    with _opened(directory) as descriptor:
        return _try_lock_in(descriptor)


@contextlib.contextmanager
def _opened(directory: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock_in(directory: int) -> int | None:
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
