import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from unstable_lite.adapters import store
from unstable_lite.adapters.store import AdapterStore, reap_stale_arenas
from unstable_lite.transport.rpc import make_socket_directory


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace /dev/shm by a private directory, so that tests do not see other runs."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(store, "SHARED_MEMORY", directory)
    return directory


def test_arena_is_private_and_removed_on_close(shared_memory: Path, tmp_path: Path) -> None:
    arena = AdapterStore("run", fallback=tmp_path, bytes_needed=1)
    assert arena.directory.parent == shared_memory
    assert arena.directory.stat().st_mode & 0o777 == 0o700
    assert arena.remark is None
    arena.path(1).mkdir()
    arena.close()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("is_absent", [False, True])
def test_run_directory_is_used_if_shared_memory_is_absent_or_too_small(
    shared_memory: Path, tmp_path: Path, is_absent: bool
) -> None:
    if is_absent:
        shared_memory.rmdir()
    arena = AdapterStore("run", fallback=tmp_path, bytes_needed=1 if is_absent else 1 << 60)
    assert arena.directory.parent == tmp_path
    assert str(tmp_path) in (arena.remark or "")
    arena.close()


def test_arena_of_a_killed_process_is_reaped_at_the_next_start(shared_memory: Path, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from unstable_lite.adapters import store as adapters;"
            "adapters.SHARED_MEMORY = Path(sys.argv[1]);"
            "arena = adapters.AdapterStore('dead', Path(sys.argv[1]), 1); arena.path(1).mkdir();"
            "print('up', flush=True); time.sleep(60)",
            str(shared_memory),
        ],
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    assert reap_stale_arenas(shared_memory) == []
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert [path.name[:19] for path in reap_stale_arenas(shared_memory)] == ["unstable_lite-dead-"]
    assert list(shared_memory.iterdir()) == []


def test_socket_directory_is_not_taken_for_an_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as with TMPDIR=/dev/shm
    sockets = make_socket_directory()
    assert sockets.parent == tmp_path
    assert reap_stale_arenas(tmp_path) == []
    assert sockets.is_dir()


async def test_runs_of_one_name_get_separate_arenas(tmp_path: Path) -> None:
    arenas = [AdapterStore("same", tmp_path, bytes_needed=1 << 60) for _ in range(3)]
    assert len({arena.directory for arena in arenas}) == 3
    assert all(arena.directory.name.startswith("unstable_lite-same-") for arena in arenas)
    assert reap_stale_arenas(tmp_path) == [], "all of them are in use"
    for arena in arenas:
        arena.close()


def test_fallback_arena_keeps_old_files_and_writes_elsewhere(shared_memory: Path, tmp_path: Path) -> None:
    alarms: list[str] = []
    arena = AdapterStore("run", fallback=tmp_path, bytes_needed=1, alarm=alarms.append)
    arena.path(1).mkdir()
    (arena.path(1) / "file").write_bytes(b"12345")
    arena.learner_state(1).mkdir()
    assert arena.fall_back("it is full")
    assert [alarm.split(".")[0] for alarm in alarms] == ["it is full"]
    assert not arena.fall_back("it is full too"), "there is no further fallback"
    assert arena.path(1).parent.parent == arena.learner_state(1).parent.parent == shared_memory
    assert arena.path(2).parent.parent == arena.learner_state(2).parent.parent == tmp_path
    arena.path(2).mkdir()
    assert arena.bytes_used() == 5
    arena.unlink(1)
    assert not list(shared_memory.glob("unstable_lite-run-*/v1"))
    assert reap_stale_arenas(shared_memory) == reap_stale_arenas(tmp_path) == []
    arena.close()
    assert list(shared_memory.iterdir()) == []
    assert not list(tmp_path.glob("*unstable_lite-*"))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes directories of another user, which only root can do")
NOBODY = 65534


@pytest.mark.parametrize("name", ["unstable_lite-x", ".unstable_lite-x"])
def test_link_in_place_of_an_arena_or_its_lock_is_not_followed(shared_memory: Path, tmp_path: Path, name: str) -> None:
    elsewhere, arena, victim = tmp_path / "elsewhere", shared_memory / f"{name}y", tmp_path / "victim"
    for directory in (elsewhere, arena):
        directory.mkdir()
    (elsewhere / "lock").touch()
    (arena / "lock").symlink_to(victim)
    for directory in (elsewhere, arena):
        os.utime(directory, (0, 0))
    (shared_memory / name).symlink_to(elsewhere)
    assert reap_stale_arenas(shared_memory) == []
    assert (elsewhere / "lock").exists()
    assert not victim.exists()


def test_failed_reaping_holds_no_lock_and_no_descriptor(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared_memory / "unstable_lite-x").mkdir()
    (shared_memory / "unstable_lite-x" / "lock").touch()

    def refuse(directory: Path) -> None:
        raise PermissionError(directory)

    before = len([*Path("/proc/self/fd").iterdir()])
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuse)
        assert reap_stale_arenas(shared_memory) == []
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert reap_stale_arenas(shared_memory) == [shared_memory / "unstable_lite-x"]


@needs_root
@pytest.mark.parametrize("name", ["unstable_lite-x", ".unstable_lite-x"])
def test_arena_of_another_user_is_left_alone(shared_memory: Path, name: str) -> None:
    theirs = shared_memory / name
    theirs.mkdir()
    os.utime(theirs, (0, 0))
    os.chown(theirs, NOBODY, NOBODY)
    assert reap_stale_arenas(shared_memory) == []
    assert list(theirs.iterdir()) == [], "no lock was created in it"


@needs_root
@pytest.mark.parametrize("taken_by", ["directory", "file", "link"])
def test_entry_of_another_user_with_that_name_is_left_alone(
    tmp_path: Path, request: pytest.FixtureRequest, taken_by: str
) -> None:
    # Root may rename over anything, even in a sticky directory, so an ordinary user makes the arena.
    as_nobody = (
        "import os, sys; from pathlib import Path; from unstable_lite.adapters import store as adapters;"
        f"adapters.SHARED_MEMORY = Path('.'); os.chdir(sys.argv[1]); os.setgroups([]); os.setuid({NOBODY});"
        "arena = adapters.AdapterStore('run', Path('.'), 1); print(arena.directory.name); arena.close()"
    )
    sticky = Path(tempfile.mkdtemp())  # whose parents, unlike those of tmp_path, anyone may enter
    request.addfinalizer(lambda: shutil.rmtree(sticky))
    sticky.chmod(0o1777)
    theirs = sticky / "unstable_lite-run"
    if taken_by == "directory":
        theirs.mkdir()
    elif taken_by == "file":
        theirs.touch()
    else:
        theirs.symlink_to(tmp_path)
    ended = subprocess.run([sys.executable, "-c", as_nobody, sticky], capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("unstable_lite-run-")
    assert ended.stderr == ""
    assert list(sticky.iterdir()) == [theirs], "nothing is left behind"


def test_arena_without_its_name_or_its_lock_is_reaped(shared_memory: Path) -> None:
    """A run may be killed while it creates its arena, under another name, or removes it, the lock first."""
    nameless, lost = shared_memory / ".unstable_lite-x", shared_memory / "unstable_lite-x"
    nameless.mkdir()
    (nameless / "lock").touch()
    assert reap_stale_arenas(shared_memory) == [], "it may be about to get its name"
    os.utime(nameless, (0, 0))
    (lost / "v1").mkdir(parents=True)
    assert reap_stale_arenas(shared_memory) == [lost, nameless]
