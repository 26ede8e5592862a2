"""Finished runs that several test modules read: made once for all of pytest's workers, and changed only in copies."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes import runs, sync_runs

LISTS_IMPORTS = """
import atexit, sys
from pathlib import Path
from unstable_lite.cli.app import main

imports = Path(sys.argv.pop(1))
atexit.register(lambda: imports.write_text(" ".join(sys.modules)))
main()
"""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory that `make` filled; the first worker of pytest that needs it calls it."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers of this session
    directory, is_made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(directory, ignore_errors=True)  # `make` has failed before
            directory.mkdir()
            make(directory)
            is_made.touch()
    return directory


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three updates; two folders above are its standard output and the modules it imported."""

    def make(directory: Path) -> None:
        command = [sys.executable, "-c", LISTS_IMPORTS, directory / "outputs" / "imports", "run"]
        command += [runs.write_small(directory), "tracker.keep_tokens=true"]
        done = subprocess.run(command, capture_output=True, text=True, env=runs.environment())
        assert (done.returncode, done.stderr) == (0, ""), done
        (directory / "outputs" / "stdout").write_text(done.stdout)

    return runs.run_directory(made_once(tmp_path_factory, "finished-run", make))


@pytest.fixture(scope="session")
def sync_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sync run with a budget for thinking that was not interrupted."""

    def make(directory: Path) -> None:
        code, out, err = runs.run("run", sync_runs.write_thinking(directory), *sync_runs.THINKING)
        assert code == 0, out + err

    return runs.run_directory(made_once(tmp_path_factory, "sync-run", make))
