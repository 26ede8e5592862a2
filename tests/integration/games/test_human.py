"""Human input without a terminal."""

import subprocess
import sys
from pathlib import Path

ASK = r"""
from unstable_lite.errors import OpponentError
from unstable_lite.games.players.human import HumanPlayer
from unstable_lite.orchestrator.event_loop import run_in_loop

async def play():
    player = HumanPlayer("E", 0)
    try:
        while True:
            print((await player.act("a board \x9b2J")).action)
    except OpponentError as error:
        print(error)

run_in_loop(play())
"""


def test_typing_mistake_does_not_lose_the_game() -> None:
    board = "[GAME] Current Pile:\n  pile 0: 1\n  pile 1: 2\n"
    script = ASK.replace('"E"', '"Nim-v0-train"').replace('"a board \\x9b2J"', repr(board))
    assert script != ASK and repr(board) in script
    lines = ["", "hello", "1  1", "0 9", "0 9"]  # nothing, a word, a move with two spaces, an illegal move twice
    given = "\n".join(lines) + "\n"
    ended = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "[hello] is not legal here. Type one of [0 1], [1 1], [1 2], or the same again." in ended.stdout
    played = [line for line in ended.stdout.splitlines() if line.startswith("> [") and "legal" not in line]
    assert played == ["> [1  1]", "> [0 9]"]
    assert ended.stdout.count("is not legal here") == 2


def test_moves_come_from_a_file_a_pipe_or_nowhere(tmp_path: Path) -> None:
    (tmp_path / "moves").write_text("1 2\n[3]\n")
    for given in (f"< {tmp_path / 'moves'}", "< /dev/null", f"< <(cat {tmp_path / 'moves'})"):
        command = ["bash", "-c", f'exec "$0" -c "$1" {given}', sys.executable, ASK]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        moves = [] if "null" in given else ["[1 2]", "[3]"]
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [line.removeprefix("> ") for line in ended.stdout.splitlines() if "[" in line] == moves
        assert "a board \\x9b2J\n" in ended.stdout
        assert "input has ended" in ended.stdout
