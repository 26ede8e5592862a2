"""An optimal player for envs with a short solution; it reads only its seat's observation.

Optimal is not unbeatable, except in TicTacToe: a Nim seat can be lost from the start, and so can a KuhnPoker hand.

TicTacToe: minimax. Nim (the last player to take wins): Bouton's theorem (1901): leave piles whose exclusive or is zero.

KuhnPoker: dominance. In TextArena 0.7.4 bets move no chips: the pot holds only the two antes, so a hand is worth 1
regardless of the bets. Calling is never worse than folding, and betting, which may make the opponent fold, is never
worse than checking. So always betting and calling is an equilibrium of value 0, and no other strategy wins more against
any opponent. The equilibria of Kuhn's own game (1950), with their free parameter α, do not hold here: they fold queens
to bets that cost nothing to make.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, reduce
from operator import xor

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.players.scripted import ScriptedPlayer, legal_actions, nim_piles

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


def _tictactoe(observation: str) -> list[str]:
    shown, found, _ = observation.rpartition("Current Board:")[2].partition("Available Moves:")
    cells = [cell.strip() for line in shown.splitlines() if "|" in line for cell in line.split("|")]
    board = "".join(cell if cell in ("O", "X") else " " for cell in cells)
    if not found or len(board) != 9:
        raise EnvError(f"no board in the observation {observation[-200:]!r}")
    best = _tictactoe_value(board)
    return [f"[{cell}]" for cell, after in _tictactoe_moves(board) if -_tictactoe_value(after) == best]


def _nim(observation: str) -> list[str]:
    """Return the winning moves, or all moves if every move loses."""
    piles = nim_piles(observation)
    total = reduce(xor, piles.values(), 0)
    winning = [f"[{pile} {size - (size ^ total)}]" for pile, size in piles.items() if size ^ total < size]
    return winning or legal_actions("Nim-v0", observation)


def _kuhn_poker(observation: str) -> list[str]:
    return [action for action in legal_actions("KuhnPoker-v0", observation) if action in ("[bet]", "[call]")]


OPTIMAL_ACTIONS: dict[str, Callable[[str], list[str]]] = {
    "TicTacToe": _tictactoe,
    "Nim": _nim,
    "KuhnPoker": _kuhn_poker,
}
"""Reader of the best actions, by env family."""
_ACTION = {
    "TicTacToe": re.compile(r"\[\s*(\d+)\s*\]"),
    "Nim": re.compile(r"\[\s*(\d+)\s+(\d+)\s*\]"),
    "KuhnPoker": re.compile(r"\[(check|bet|fold|call)\]", re.IGNORECASE),
}
"""Pattern of an action in TextArena 0.7.4: the first match counts, with any text around it."""


def optimal_actions(env_id: str, observation: str) -> list[str]:
    """Return every best action of the player who sees `observation`.

    Raises UnsupportedEnvError for another env family, EnvError if the text is not from that env.
    """
    read = OPTIMAL_ACTIONS.get(env_id.partition("-v0")[0])
    if read is None:
        raise UnsupportedEnvError(
            f"no optimal player for {env_id!r}: there is one for any variant of {', '.join(OPTIMAL_ACTIONS)}"
        )
    return read(observation)


def is_optimal(env_id: str, observation: str, action: str) -> bool | None:
    """Return whether `action` is optimal; None if every legal action is, and for an env without a solver."""
    family = env_id.partition("-v0")[0]
    if family not in OPTIMAL_ACTIONS:
        return None
    try:
        best = optimal_actions(env_id, observation)
        is_choice = len(best) < len(legal_actions(env_id, observation))
    except EnvError:  # a user's env with the same family name
        return None
    found = _ACTION[family].search(action)
    return found is not None and f"[{' '.join(map(_spelled, found.groups()))}]" in best if is_choice else None


def _spelled(word: str) -> str:
    return str(int(word)) if word.isdecimal() else word.lower()


class OptimalPlayer(ScriptedPlayer):
    """`scripted:optimal`: any of the best actions, all equally likely."""

    def candidates(self, observation: str) -> list[str]:
        return optimal_actions(self.env_id, observation)
