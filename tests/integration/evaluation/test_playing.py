"""A person at the terminal against a model, and two watched models."""

import subprocess
from pathlib import Path

import pytest
from test_evaluator import SCRIPTED
from typer.testing import CliRunner

from fakes import runs
from fakes.handmade_adapters import write_run
from unstable_lite.cli.app import app

SETTINGS = [word for setting in SCRIPTED for word in ("--set", setting)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=2)


def play(typed: str, *arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        runs.command("play", *SETTINGS, *arguments), input=typed, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def watched(*arguments: str | Path) -> str:
    return runs.output_of(runs.invoke("play", *SETTINGS, "--watch", *arguments))


def test_person_plays_to_the_end_and_sees_every_turn(run: Path) -> None:
    out = runs.output_of(play("[0 9]\n[0 9]\n", run, "--seat", "0"))
    assert out.count("is not legal here") == 1
    assert "your turn" in out and "pile 0: 3" in out
    assert "player 0, you: [0 9]" in out
    assert "player 0, you: loss by an invalid move (-1)" in out
    assert "player 1, ckpt-2: win (+1)" in out
    out = runs.output_of(play("0 1\n" * 30, run, "--seat", "1", "--set", 'engine.replies=["\\\\boxed{[1 1]}"]'))
    assert out.index("player 0, ckpt-2: \\boxed{[") < out.index("your turn")
    assert "player 1, you: 0 1  →  [0 1]" in out
    assert "the end" in out


def test_person_who_leaves_early_or_has_no_input_gets_a_clear_error(run: Path) -> None:
    command = runs.command("play", *SETTINGS, run, "--seat", "0")
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True, timeout=120)
    for code, _, err in (play("", run, "--seat", "0"), (closed.returncode, closed.stdout, closed.stderr)):
        assert (code, "input has ended" in err, "Traceback" in err) == (1, True, False)


def test_two_models_can_be_watched(run: Path) -> None:
    out = watched(run, "scripted:random", "--env", "TicTacToe-v0-train", "--seat", "1")
    assert "player 0, fixed-scripted:random: [" in out
    assert "player 1, ckpt-2: \\boxed{[" in out
    assert "the end" in out


def test_budget_for_thinking_holds_in_a_watched_game(run: Path) -> None:
    settings = ("engine.thinking_tokens=10", 'engine.replies=["<think> so I take one"]')
    changes = [word for setting in settings for word in ("--set", setting)]
    out = watched(run, "scripted:random", *changes)
    assert "<think> so\n</think>\n\n<think> so I take one" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("base", "base", "--watch"), "--config"),
        (("RUN", "base", "scripted:random", "--watch"), "two models, got 3"),
        (("RUN", "base"), "two models, got 3"),
        (("RUN", "--seat", "2"), "Nim-v0-train has the seats 0 to 1"),
        (("unknown",), "names no model"),
    ],
)
def test_impossible_game_is_refused(run: Path, arguments: tuple[str, ...], problem: str) -> None:
    words = (str(run) if word == "RUN" else word for word in arguments)
    ended = CliRunner().invoke(app, ["play", *SETTINGS, *words], catch_exceptions=False)
    assert ended.exit_code != 0 and problem in ended.output
    assert "waiting for" not in ended.output  # no engine was started
