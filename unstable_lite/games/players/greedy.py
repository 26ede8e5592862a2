"""A player that looks one move ahead: it takes a win, else blocks the opponent's win, else moves at random.

Parses the boards of ConnectFour, TicTacToe and SimpleTak as far as "does this placement win?" requires. In SimpleTak a
win is a placement that completes a path between two opposite edges, and a block is a placement in a cell where the
opponent would complete one. If the opponent has several such cells, the player blocks one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.players.scripted import ScriptedPlayer, connect_four_drops, connect_four_size, legal_actions

Cell = tuple[int, int]
"""Row from the top, column from the left."""
Wins = Callable[[Sequence[Sequence[str]], Cell], bool]
"""Test whether the mark that was just placed in a cell wins."""

_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
_NEIGHBOURS = ((0, 1), (1, 0), (0, -1), (-1, 0))
_ROW_OF_CELLS = re.compile(r"^\|?(?: +(?:\d+|[XO]) +\|?){2,}$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Position:
    rows: list[list[str]]
    """Marks; anything but X and O is an empty cell."""
    first_mark: str
    """Mark of the player who moves first."""
    cell_of: dict[str, Cell]
    """Cell that each legal action fills."""

    @property
    def marks(self) -> tuple[str, str]:
        """Marks of the current player and of the opponent."""
        second_mark = "O" if self.first_mark == "X" else "X"
        counts = [sum(row.count(mark) for row in self.rows) for mark in (self.first_mark, second_mark)]
        return (self.first_mark, second_mark) if counts[0] == counts[1] else (second_mark, self.first_mark)


def _connect_four(env_id: str, observation: str) -> _Position:
    if "Board state:\n" in observation:
        _, _, shown = observation.rpartition("Board state:\n")
        rows = [line.split() for line in shown.splitlines()[2:] if line.startswith((".", "X", "O"))]
    else:  # the variant without a board
        num_rows, num_columns = connect_four_size(observation)
        rows = [["."] * num_columns for _ in range(num_rows)]
        for turn, column in enumerate(connect_four_drops(observation)):
            rows[_lowest(rows, column)][column] = "XO"[turn % 2]
    columns = {action: int(action[5:-1]) for action in legal_actions(env_id, observation)}
    return _Position(rows, "X", {action: (_lowest(rows, column), column) for action, column in columns.items()})


def _lowest(rows: Sequence[Sequence[str]], column: int) -> int:
    return max(row for row, cells in enumerate(rows) if cells[column] == ".")


def _numbered_cells(env_id: str, observation: str) -> _Position:
    """Read a board whose empty cells show their numbers."""
    actions = legal_actions(env_id, observation)
    board = observation.rpartition("Current Board:")[2]
    rows = [line.replace("|", " ").split() for line in _ROW_OF_CELLS.findall(board)]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise EnvError(f"no square board in the observation {observation[-200:]!r}")
    return _Position(rows, "O", {action: divmod(int(action[1:-1]), len(rows)) for action in actions})


def _in_a_row(length: int) -> Wins:
    def wins(rows: Sequence[Sequence[str]], cell: Cell) -> bool:
        mark = rows[cell[0]][cell[1]]

        def run(down: int, right: int) -> int:
            """Count the marks from `cell` in one direction, without `cell` itself."""
            row, column = cell[0] + down, cell[1] + right
            count = 0
            while 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] == mark:
                row, column, count = row + down, column + right, count + 1
            return count

        return any(1 + run(down, right) + run(-down, -right) >= length for down, right in _DIRECTIONS)

    return wins


def _joins_opposite_edges(rows: Sequence[Sequence[str]], cell: Cell) -> bool:
    mark, last = rows[cell[0]][cell[1]], len(rows) - 1
    group, waiting = {cell}, [cell]
    while waiting:
        row, column = waiting.pop()
        for down, right in _NEIGHBOURS:
            beside = row + down, column + right
            is_on_board = 0 <= beside[0] <= last and 0 <= beside[1] <= last
            if is_on_board and beside not in group and rows[beside[0]][beside[1]] == mark:
                group.add(beside)
                waiting.append(beside)
    touched_rows, touched_columns = {row for row, _ in group}, {column for _, column in group}
    return {0, last} <= touched_rows or {0, last} <= touched_columns


GREEDY_GAMES: dict[str, tuple[Callable[[str, str], _Position], Wins]] = {
    "ConnectFour": (_connect_four, _in_a_row(4)),
    "TicTacToe": (_numbered_cells, _in_a_row(3)),
    "SimpleTak": (_numbered_cells, _joins_opposite_edges),
}
"""Reader of the position and test for a win, by env family."""


def greedy_actions(env_id: str, observation: str) -> list[str]:
    """Return every action that wins at once; else every one that blocks such a win; else every legal action.

    Raises UnsupportedEnvError for another env family, EnvError if the text is not from that env.
    """
    game = GREEDY_GAMES.get(env_id.partition("-v0")[0])
    if game is None:
        raise UnsupportedEnvError(
            f"no greedy player for {env_id!r}: there is one for any variant of {', '.join(GREEDY_GAMES)}"
        )
    read, wins = game
    position = read(env_id, observation)
    for mark in position.marks:
        if winning := [action for action, cell in position.cell_of.items() if _would_win(position, cell, mark, wins)]:
            return winning
    return list(position.cell_of)


def _would_win(position: _Position, cell: Cell, mark: str, wins: Wins) -> bool:
    row, column = cell
    before = position.rows[row][column]
    position.rows[row][column] = mark
    try:
        return wins(position.rows, cell)
    finally:
        position.rows[row][column] = before


class GreedyPlayer(ScriptedPlayer):
    """`scripted:greedy`: any of the actions that look best one move ahead, all equally likely."""

    def candidates(self, observation: str) -> list[str]:
        return greedy_actions(self.env_id, observation)
