"""A run's output is closed, full or limited to few characters; the run continues."""

import contextlib
import functools
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fakes import runs
from unstable_lite.dashboards.terminal import TerminalInterface

QUICK = (*runs.SCRIPTED, "run.eval_games=0", "run.num_eval_workers=0", "run.learning_steps=1")
torchless = functools.partial(runs.command, module=runs.TORCHLESS)


def saved(directory: Path, update: int = 1) -> bool:
    return (runs.run_directory(directory) / "checkpoints" / f"ckpt-{update}" / "manifest.json").is_file()


def test_run_whose_terminal_closes_saves_and_ends(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()

    def in_terminal() -> None:
        os.login_tty(theirs)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

    process = subprocess.Popen(
        torchless("run", runs.write_small(tmp_path), *QUICK, "run.learning_steps=10000"),
        preexec_fn=in_terminal,
        env=runs.environment(),
    )
    os.close(theirs)
    os.set_blocking(ours, False)

    def has_made_an_update() -> bool:
        with contextlib.suppress(OSError):  # it has shown nothing since
            os.read(ours, 1 << 16)  # a full terminal would stop the run
        return runs.num_updates(tmp_path) >= 1

    runs.wait_for(has_made_an_update)
    children = runs.children_of(process)
    os.close(ours)
    process.wait(120)
    directory = runs.run_directory(tmp_path)
    assert (directory / "checkpoints" / "latest").resolve().name == f"ckpt-{runs.num_updates(tmp_path)}"
    runs.wait_for(lambda: runs.are_gone(children), 5)
    assert runs.arenas_named(directory.name) == []


def test_run_survives_closed_pipe_and_under_nohup_a_closed_terminal(tmp_path: Path) -> None:
    words = ["nohup", *torchless("run", runs.write_small(tmp_path), *QUICK, "run.learning_steps=2")]
    variables = runs.environment() | {"INTERRUPT": f"1 {signal.SIGHUP:d}"}
    process = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (0, "")
    assert saved(tmp_path, update=2)


@pytest.mark.nightly
def test_run_without_standard_streams_finishes(tmp_path: Path) -> None:
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *torchless("run", runs.write_small(tmp_path), *QUICK)]
    assert subprocess.run(words, env=runs.environment(), timeout=240).returncode == 0
    assert saved(tmp_path)


@pytest.mark.nightly
def test_unwritable_summary_is_reported_with_the_run_directory(tmp_path: Path) -> None:
    words = torchless("run", runs.write_small(tmp_path), *QUICK)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, env=runs.environment(), text=True, timeout=240
        )
    assert ended.returncode == 1
    assert str(runs.run_directory(tmp_path)) in ended.stderr
    assert saved(tmp_path)


OWN_SCRIPT = "from unstable_lite.dashboards.terminal import TerminalInterface as T; T().say('mean |Δ log p|')"


@pytest.mark.parametrize(
    ("words", "end"),
    [
        pytest.param(runs.command("envs"), "", id="envs"),
        pytest.param(runs.command("run", "--help"), "", id="help"),
        pytest.param([sys.executable, "-c", OWN_SCRIPT], "mean |? log p|\n", id="own script"),
    ],
)
def test_characters_missing_in_an_old_encoding_become_question_marks(words: list[str], end: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(words, env=environment, capture_output=True, timeout=240)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.decode("ascii").endswith(end)


def test_closing_the_terminal_ends_no_run() -> None:
    ours, theirs = pty.openpty()
    file = os.fdopen(theirs, "w")
    terminal = TerminalInterface(Console(file=file, force_terminal=True, highlight=False, markup=False))
    terminal.start(3)
    os.close(ours)
    terminal.say("not seen")
    with terminal.doing(lambda: "not seen either"):
        terminal.show_update(1, 3, "")
    terminal.stop()
    assert terminal._live is None
    with contextlib.suppress(OSError):
        file.close()
