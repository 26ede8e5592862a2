"""Wordings of TicTacToe, ConnectFour and Nim, made from the current board alone."""

from __future__ import annotations

import re
from typing import Any

from unstable_lite.games.openspiel.wording import Wording

_MARKS = ("x", "o")
_NIM_ACTION = re.compile(r"pile:(\d+), take:(\d+);")


def tic_tac_toe(_game: Any) -> Wording:
    def situation(seat: int, shown: str) -> str:
        cells = [str(cell) if mark == "." else mark for cell, mark in enumerate(shown.replace("\n", ""))]
        rows = "\n".join(" ".join(cells[start : start + 3]) for start in (0, 3, 6))
        return f"Your mark: {_MARKS[seat]}\nBoard:\n{rows}"

    rules = "Players mark empty cells in turn. Three marks in a row, column or diagonal win; a full board is a draw."
    return Wording("TicTacToe", rules, situation, lambda _shown, action, _: str(action))


def connect_four(game: Any) -> Wording:
    parameters = game.get_parameters()
    rows, columns, length = parameters["rows"], parameters["columns"], parameters["x_in_row"]

    def situation(seat: int, shown: str) -> str:
        lines = [" ".join(map(str, range(columns))), *(" ".join(line) for line in shown.split())]
        return f"Your mark: {_MARKS[seat]}\nBoard:\n" + "\n".join(lines)

    rules = (
        f"The board has {rows} rows and {columns} columns. Players drop a disc into a column in turn. "
        f"{length} discs in a row, column or diagonal win; a full board is a draw."
    )
    return Wording("ConnectFour", rules, situation, lambda _shown, action, _: f"col {action}")


def nim(game: Any) -> Wording:
    who = "loses" if game.get_parameters()["is_misere"] else "wins"

    def situation(_seat: int, shown: str) -> str:
        sizes = shown.partition(":")[2].split()
        return "Piles: " + ", ".join(f"pile {pile} has {size}" for pile, size in enumerate(sizes))

    def action_name(_shown: str, _action: int, openspiel_name: str) -> str:
        taken = _NIM_ACTION.fullmatch(openspiel_name)
        assert taken is not None, openspiel_name
        return f"{int(taken[1]) - 1} {taken[2]}"

    rules = (
        f"Players take objects from one pile in turn. Whoever takes the last object {who}. [0 2] takes 2 from pile 0."
    )
    return Wording("Nim", rules, situation, action_name)
