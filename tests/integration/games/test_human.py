"""Human input without a terminal."""

from __future__ import annotations

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
