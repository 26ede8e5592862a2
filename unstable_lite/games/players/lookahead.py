"""Players that look ahead in their seat's observation: greedy by one move, optimal to the end of the game.

Greedy parses the boards of ConnectFour, TicTacToe and SimpleTak as far as "does this placement win?" requires. In
SimpleTak a win is a placement that completes a path between two opposite edges, and a block is a placement in a cell
where the opponent would complete one. If the opponent has several such cells, the player blocks one of them.

Optimal knows envs with a short solution. TicTacToe: minimax. Nim (the last player to take wins): Bouton's theorem
(1901): leave piles whose exclusive or is zero. KuhnPoker: in TextArena 0.7.4 bets move no chips, so a hand is worth 1
regardless of the bets. Calling is never worse than folding, and betting, which may make the opponent fold, is never
worse than checking: always betting and calling is an equilibrium of value 0. The equilibria of Kuhn's own game (1950)
fold queens to bets that cost nothing to make. In a version whose bets cost chips KuhnPoker has no optimal player.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from functools import cache, reduce
from itertools import count, takewhile
from operator import xor

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.players.scripted import (
    ScriptedPlayer,
    connect_four_drops,
    connect_four_size,
    legal_actions,
    nim_piles,
    reader_of,
)

Cell = tuple[int, int]
"""Row from the top, column from the left."""
Position = tuple[list[list[str]], str, dict[str, Cell]]
"""Rows of marks, in which anything but X and O is an empty cell; the mark that moves first; the cell that each legal
action fills."""
Wins = Callable[[Set[Cell], Cell, int], bool]
"""Test whether a mark in these cells wins, of which the second is the newest; the number is that of the last row."""

_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
_NEIGHBOURS = ((0, 1), (1, 0), (0, -1), (-1, 0))
_ROW_OF_CELLS = re.compile(r"^\|?(?: +(?:\d+|[XO]) +\|?){2,}$", re.MULTILINE)


def _connect_four(env_id: str, observation: str) -> Position:
    if "Board state:\n" in observation:
        _, _, shown = observation.rpartition("Board state:\n")
        rows = [line.split() for line in shown.splitlines()[2:] if line.startswith((".", "X", "O"))]
    else:  # the variant without a board
        num_rows, num_columns = connect_four_size(observation)
        rows = [["."] * num_columns for _ in range(num_rows)]
        for turn, column in enumerate(connect_four_drops(observation)):
            rows[_lowest(rows, column)][column] = "XO"[turn % 2]
    columns = {action: int(action[5:-1]) for action in legal_actions(env_id, observation)}
    return rows, "X", {action: (_lowest(rows, column), column) for action, column in columns.items()}


def _lowest(rows: list[list[str]], column: int) -> int:
    return max(row for row, cells in enumerate(rows) if cells[column] == ".")


def _numbered_cells(env_id: str, observation: str) -> Position:
    """Read a board whose empty cells show their numbers."""
    actions = legal_actions(env_id, observation)
    board = observation.rpartition("Current Board:")[2]
    rows = [line.replace("|", " ").split() for line in _ROW_OF_CELLS.findall(board)]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise EnvError(f"no square board in the observation {observation[-200:]!r}")
    return rows, "O", {action: divmod(int(action[1:-1]), len(rows)) for action in actions}


def _in_a_row(length: int) -> Wins:
    def wins(marked: Set[Cell], cell: Cell, _last: int) -> bool:
        def run(down: int, right: int) -> int:
            """Count the marks from `cell` in one direction, without `cell` itself."""
            cells = ((cell[0] + down * step, cell[1] + right * step) for step in count(1))
            return sum(1 for _ in takewhile(marked.__contains__, cells))

        return any(1 + run(down, right) + run(-down, -right) >= length for down, right in _DIRECTIONS)

    return wins


def _joins_opposite_edges(marked: Set[Cell], cell: Cell, last: int) -> bool:
    group, waiting = {cell}, [cell]
    while waiting:
        row, column = waiting.pop()
        beside = {(row + down, column + right) for down, right in _NEIGHBOURS} & marked - group
        group |= beside
        waiting += beside
    return any({0, last} <= {cell[axis] for cell in group} for axis in (0, 1))


GREEDY_GAMES: dict[str, tuple[Callable[[str, str], Position], Wins]] = {
    "ConnectFour": (_connect_four, _in_a_row(4)),
    "TicTacToe": (_numbered_cells, _in_a_row(3)),
    "SimpleTak": (_numbered_cells, _joins_opposite_edges),
}
"""Reader of the position and test for a win, by env family."""


def greedy_actions(env_id: str, observation: str) -> list[str]:
    """Return every action that wins at once; else every one that blocks such a win; else every legal action.

    Raises UnsupportedEnvError for another env family, EnvError if the text is not from that env.
    """
    read, wins = reader_of(GREEDY_GAMES, env_id, "greedy player")
    rows, first_mark, cell_of = read(env_id, observation)
    marked: dict[str, set[Cell]] = {first_mark: set(), "XO".replace(first_mark, ""): set()}
    for row, cells in enumerate(rows):
        for column, mark in enumerate(cells):
            if mark in marked:
                marked[mark].add((row, column))
    # The marks of the player to move, who is the first if both have as many, then those of the opponent.
    for cells_of_one in sorted(marked.values(), key=len):
        if winning := [action for action, cell in cell_of.items() if wins({*cells_of_one, cell}, cell, len(rows) - 1)]:
            return winning
    return list(cell_of)


class GreedyPlayer(ScriptedPlayer):
    """`scripted:greedy`: any of the actions that look best one move ahead, all equally likely."""

    def candidates(self, observation: str) -> list[str]:
        return greedy_actions(self.env_id, observation)


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def _tictactoe_value(board: str) -> int:
    """Return the value for the mark to move: > 0 a win, 0 a draw, < 0 a loss; larger if sooner. O moves first."""
    if any(board[a] == board[b] == board[c] != " " for a, b, c in _LINES):
        return -1 - board.count(" ")
    return max((-_tictactoe_value(after) for _, after in _tictactoe_moves(board)), default=0)


def _tictactoe_moves(board: str) -> list[tuple[int, str]]:
    mark = "O" if board.count("O") == board.count("X") else "X"
    return [(cell, board[:cell] + mark + board[cell + 1 :]) for cell in range(9) if board[cell] == " "]


def _best_of_tictactoe(observation: str) -> list[str]:
    shown, found, _ = observation.rpartition("Current Board:")[2].partition("Available Moves:")
    cells = [cell.strip() for line in shown.splitlines() if "|" in line for cell in line.split("|")]
    board = "".join(cell if cell in ("O", "X") else " " for cell in cells)
    if not found or len(board) != 9:
        raise EnvError(f"no board in the observation {observation[-200:]!r}")
    best = _tictactoe_value(board)
    return [f"[{cell}]" for cell, after in _tictactoe_moves(board) if -_tictactoe_value(after) == best]


def _best_of_nim(observation: str) -> list[str]:
    """Return the winning moves, or all moves if every move loses."""
    piles = nim_piles(observation)
    total = reduce(xor, piles.values(), 0)
    winning = [f"[{pile} {size - (size ^ total)}]" for pile, size in piles.items() if size ^ total < size]
    return winning or legal_actions("Nim-v0", observation)


OPTIMAL_ACTIONS: dict[str, Callable[[str], list[str]]] = {
    "TicTacToe": _best_of_tictactoe,
    "Nim": _best_of_nim,
    "KuhnPoker": lambda shown: [one for one in legal_actions("KuhnPoker-v0", shown) if one in ("[bet]", "[call]")],
}
"""Reader of the best actions, by env family."""
_ACTION = {
    "TicTacToe": re.compile(r"\[\s*(\d+)\s*\]"),
    "Nim": re.compile(r"\[\s*(\d+)\s+(\d+)\s*\]"),
    "KuhnPoker": re.compile(r"\[(check|bet|fold|call)\]", re.IGNORECASE),
}
"""Pattern of an action in TextArena 0.7.4: the first match counts, with any text around it."""


def has_solver(env_id: str) -> bool:
    """Return whether the best actions are known: in KuhnPoker only if TextArena pays no bets."""
    family = env_id.partition("-v0")[0]
    if family == "KuhnPoker":
        from unstable_lite.games.environments import kuhn_pays_bets  # imports TextArena, which other games do not need

        return not kuhn_pays_bets()
    return family in OPTIMAL_ACTIONS


def optimal_actions(env_id: str, observation: str) -> list[str]:
    """Return every best action of the player who sees `observation`.

    Raises UnsupportedEnvError for another env family, EnvError if the text is not from that env.
    """
    actions_of = reader_of(OPTIMAL_ACTIONS, env_id, "optimal player")
    if not has_solver(env_id):
        raise UnsupportedEnvError(
            f"no optimal player for {env_id!r}, whose bets cost chips in this version of TextArena: use "
            "openspiel:kuhn_poker with scripted:cfr"
        )
    return actions_of(observation)


def is_optimal(env_id: str, observation: str, action: str) -> bool | None:
    """Return whether `action` is optimal; None if every legal action is, and for an env without a solver."""
    if not has_solver(env_id):
        return None
    try:
        best = optimal_actions(env_id, observation)
        is_choice = len(best) < len(legal_actions(env_id, observation))
    except EnvError:  # a user's env with the same family name
        return None
    found = _ACTION[env_id.partition("-v0")[0]].search(action)
    words = [str(int(word)) if word.isdecimal() else word.lower() for word in found.groups()] if found else []
    return f"[{' '.join(words)}]" in best if is_choice else None


class OptimalPlayer(ScriptedPlayer):
    """`scripted:optimal`: any of the best actions, all equally likely."""

    def candidates(self, observation: str) -> list[str]:
        return optimal_actions(self.env_id, observation)
