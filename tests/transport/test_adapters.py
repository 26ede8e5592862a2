from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from unstable_lite.transport import adapters
from unstable_lite.transport.adapters import AdapterArena, reap_stale_arenas
from unstable_lite.transport.sockets import make_socket_directory


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of our own in place of /dev/shm, so that tests do not meet other runs."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(adapters, "SHARED_MEMORY", directory)
    return directory


def test_an_arena_is_private_and_gone_after_close(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1)
    assert arena.directory.parent == shared_memory
    assert arena.directory.stat().st_mode & 0o777 == 0o700
    assert arena.remark is None
    arena.path(1).mkdir()
    arena.close()
    assert list(shared_memory.iterdir()) == []


def test_a_version_is_unreferenced_exactly_when_its_last_holder_lets_go(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1)
    for _ in range(3):
        arena.retain(5)
    arena.release(5)
    arena.release(5)
    assert arena.unreferenced.empty()
    assert arena.references(5)
    arena.release(5)
    assert arena.unreferenced.get_nowait() == 5
    assert not arena.references(5)
    arena.close()


def test_the_base_is_never_let_go(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1)
    arena.retain(0)
    arena.release(0)
    assert arena.unreferenced.empty()
    arena.close()


def test_releasing_what_nobody_holds_is_our_bug_and_says_so(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1)
    with pytest.raises(AssertionError, match="version 3"):
        arena.release(3)
    arena.close()


def test_without_enough_shared_memory_the_run_directory_is_used_and_said(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1 << 60)
    assert arena.directory.parent == tmp_path
    assert arena.remark is not None
    assert str(tmp_path) in arena.remark
    arena.close()


def test_without_shared_memory_the_run_directory_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "SHARED_MEMORY", tmp_path / "absent")
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1)
    assert arena.directory.parent == tmp_path
    assert arena.remark is not None
    arena.close()


def test_a_living_runs_arena_is_not_reaped(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterArena("alive", fallback=tmp_path, bytes_needed=1)
    assert reap_stale_arenas(shared_memory) == []
    assert arena.directory.is_dir()
    arena.close()


def test_the_arena_of_a_killed_process_is_reaped_at_the_next_start(shared_memory: Path, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from unstable_lite.transport import adapters;"
            "adapters.SHARED_MEMORY = Path(sys.argv[1]);"
            "arena = adapters.AdapterArena('dead', Path(sys.argv[1]), 1); arena.path(1).mkdir();"
            "print('up', flush=True); time.sleep(60)",
            str(shared_memory),
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert reap_stale_arenas(shared_memory) == []
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert reap_stale_arenas(shared_memory) == [shared_memory / "unstable_lite-dead"]
    assert list(shared_memory.iterdir()) == []


def test_the_directory_of_a_runs_sockets_is_taken_for_no_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as with TMPDIR=/dev/shm
    sockets = make_socket_directory()
    assert sockets.parent == tmp_path
    assert reap_stale_arenas(tmp_path) == []
    assert sockets.is_dir()


async def test_two_runs_of_one_name_have_an_arena_each(tmp_path: Path) -> None:
    arenas = [AdapterArena("same", tmp_path, bytes_needed=1 << 60) for _ in range(3)]
    assert [arena.directory.name for arena in arenas] == [f"unstable_lite-same{end}" for end in ("", "-2", "-3")]
    assert reap_stale_arenas(tmp_path) == [], "all of them are alive"
    for arena in arenas:
        arena.close()


def test_an_arena_that_falls_back_finds_what_was_written_before_and_writes_elsewhere(
    shared_memory: Path, tmp_path: Path
) -> None:
    arena = AdapterArena("run", fallback=tmp_path, bytes_needed=1)
    arena.path(1).mkdir()
    (arena.path(1) / "file").write_bytes(b"12345")
    arena.learner_state(1).mkdir()
    assert arena.fall_back()
    assert not arena.fall_back(), "there is nowhere else"
    assert arena.path(1).parent.parent == arena.learner_state(1).parent.parent == shared_memory
    assert arena.path(2).parent.parent == arena.learner_state(2).parent.parent == tmp_path
    arena.path(2).mkdir()
    assert arena.bytes_used() == 5
    arena.unlink(1)
    assert not (shared_memory / "unstable_lite-run" / "v1").exists()
    assert reap_stale_arenas(shared_memory) == reap_stale_arenas(tmp_path) == []
    arena.close()
    assert list(shared_memory.iterdir()) == []
    assert not list(tmp_path.glob("*unstable_lite-*"))
