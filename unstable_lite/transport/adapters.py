"""The shared-memory arena: where adapters pass from the learner to the engines.

A version is a PEFT directory in tmpfs, written once by the learner under a name that is never reused. References
(the current policy, opponents, games in flight) decide when it is unlinked. A lock file says whose arena it is: the
lock goes when its process goes, however it goes, and the next start removes what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from unstable_lite.transport.messages import AdapterPart, FetchAdapter

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "unstable_lite-"
LOCK = "lock"
NAMELESS_FOR_S = 60.0
"""Age in seconds at which an arena that did not get its name counts as left behind."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
PART_BYTES = 1 << 20
"""Of an adapter on its way to another machine: small enough that what else there is to say soon has its turn."""


class AdapterArena:
    """The adapters of one run. Version 0 is the base: it has no directory and is never released."""

    def __init__(self, run_id: str, fallback: Path, bytes_needed: int) -> None:
        """Make the arena in shared memory, or in `fallback` where that is absent or has too little room.

        `remark` says where the arena is if that is not shared memory.
        """
        self.remark: str | None = None
        parent = SHARED_MEMORY
        if not os.access(SHARED_MEMORY, os.W_OK):
            self.remark = f"{SHARED_MEMORY} is not there or not writable: adapters go through {fallback}"
            parent = fallback
        elif (free := shutil.disk_usage(SHARED_MEMORY).free) < bytes_needed:
            self.remark = (
                f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, {bytes_needed / 1e6:.0f} MB may be needed: "
                f"adapters go through {fallback}"
            )
            parent = fallback
        self._run_id = run_id
        self._fallback = fallback
        self._locks: list[int] = []
        self._directories = [self._make(parent)]
        """The last one is written to."""
        self.unreferenced: asyncio.Queue[int] = asyncio.Queue()
        """Versions that nobody holds any more, to be unloaded from the engines and then unlinked."""
        self._references: Counter[int] = Counter()

    @property
    def directory(self) -> Path:
        return self._directories[-1]

    def fall_back(self) -> bool:
        """From now on write to the fallback, for shared memory is full; whether it was not so already."""
        if self.directory.parent == self._fallback:
            return False
        self._directories.append(self._make(self._fallback))
        return True

    def path(self, version: int) -> Path:
        return self._place(f"v{version}")

    def learner_state(self, version: int) -> Path:
        """Where the learner keeps its state of a version, for the one that takes its place if it dies."""
        return self._place(f"learner-{version}")

    def bytes_used(self) -> int:
        files = [file for directory in self._directories for file in directory.rglob("*")]
        return sum(file.stat().st_size for file in files if file.is_file())

    def retain(self, version: int) -> None:
        self._references[version] += 1

    def release(self, version: int) -> None:
        self._references[version] -= 1
        assert self._references[version] >= 0, f"adapter version {version} released more often than retained"
        if self._references[version] == 0:
            del self._references[version]
            if version != 0:
                self.unreferenced.put_nowait(version)

    @contextlib.contextmanager
    def held(self, version: int) -> Iterator[None]:
        """Retained while the body runs."""
        self.retain(version)
        try:
            yield
        finally:
            self.release(version)

    def references(self, version: int) -> int:
        return self._references[version]

    @property
    def live_versions(self) -> set[int]:
        """Referenced versions, the base apart."""
        return set(self._references) - {0}

    def unlink(self, version: int) -> None:
        shutil.rmtree(self.path(version), ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())

    def _make(self, parent: Path) -> Path:
        # Locked under another name first, so that a run that starts now cannot take it for a dead run's.
        nameless = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
        lock = try_lock(nameless)
        assert lock is not None, f"{nameless} has just been made"
        self._locks.append(lock)
        return _rename(nameless, parent / f"{PREFIX}{self._run_id}")

    def _place(self, name: str) -> Path:
        """Where it was written, or else is to be."""
        written = (directory / name for directory in self._directories if (directory / name).exists())
        return next(written, self.directory / name)


def adapter_part(adapter: Path | None, asked: FetchAdapter) -> AdapterPart:
    """What is asked for of the PEFT directory `adapter`; a part without a name where it is not there (any more)."""
    name, data, is_end_of_file, is_end = "", b"", True, True
    if adapter is not None:
        with contextlib.suppress(FileNotFoundError, IndexError):  # retired meanwhile; or a worker that cannot count
            files = sorted(path for path in adapter.iterdir() if path.is_file())
            path = files[asked.file]
            with path.open("rb") as file:
                file.seek(asked.offset)
                data = file.read(PART_BYTES)
            name = path.name
            is_end_of_file = asked.offset + len(data) >= path.stat().st_size
            is_end = is_end_of_file and asked.file == len(files) - 1
    return AdapterPart(
        version=asked.version,
        file=asked.file,
        offset=asked.offset,
        name=name,
        data=data,
        is_end_of_file=is_end_of_file,
        is_end=is_end,
    )


def reap_stale_arenas(parent: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's arenas in `parent` that no living process holds; return the removed directories.

    `parent` may be writable for everybody: directories of other users are not touched, links are not followed.
    """
    reaped = []
    for directory in (*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")):
        with contextlib.suppress(OSError):  # a link, or removed by another process at this moment
            if _reap(directory):
                reaped.append(directory)
    return reaped


def _reap(directory: Path) -> bool:
    """Remove `directory` if it is a stale arena of this user; return whether it was."""
    with _opened(directory, os.O_NOFOLLOW) as descriptor:
        status = os.fstat(descriptor)
        is_fresh = directory.name.startswith(".") and time.time() - status.st_mtime < NAMELESS_FOR_S
        if status.st_uid != os.geteuid() or is_fresh:
            return False
        try:
            lock = _try_lock_in(descriptor)
        except FileNotFoundError:  # its owner was killed while it removed the arena
            shutil.rmtree(directory)
            return True
    if lock is None:
        return False
    try:
        shutil.rmtree(directory)
    finally:
        os.close(lock)
    return True


def _rename(directory: Path, wanted: Path) -> Path:
    """Rename to `wanted`, or to `wanted-<number>` if another run or another user has that name; return the name."""
    for number in itertools.count(1):
        name = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            directory.rename(name)
        except OSError:  # which one depends on whose it is: ENOTEMPTY, ENOTDIR, EPERM in a sticky directory, …
            if not os.path.lexists(name):
                raise
        else:
            break
    return name


def try_lock(directory: Path) -> int | None:
    """Lock the file `lock` in `directory`, made if absent; return its descriptor, None if a living process holds it.

    Raises OSError, also if the file is a symbolic link.
    """
    with _opened(directory) as descriptor:
        return _try_lock_in(descriptor, os.O_CREAT)


@contextlib.contextmanager
def _opened(directory: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock_in(directory: int, flags: int = 0) -> int | None:
    descriptor = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600, dir_fd=directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
