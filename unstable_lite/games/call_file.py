"""File in which an env process records the game whose call is running, readable after the process died."""

from __future__ import annotations

import os
from pathlib import Path

NO_GAME = -1


def file_of_call(endpoint: str, name: str) -> Path:
    """Return the file's path: in the socket's directory, which only this user can read."""
    return Path(endpoint.removeprefix("ipc://")).with_name(f"{name}.call")


def game_under_way(path: Path) -> int:
    """Return the game whose call is running, or was running when the process died."""
    return int.from_bytes(path.read_bytes(), "little", signed=True)


def write_game(file: int, game: int) -> None:
    os.pwrite(file, game.to_bytes(8, "little", signed=True), 0)
