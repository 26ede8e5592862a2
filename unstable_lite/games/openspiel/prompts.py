"""Prompt of a seat, names of its actions, and the action that an answer names: pure functions of a state.

A prompt is a function of the seat and its information state string if the game hides information, else of the seat
and the current board. Two different ones of a seat never share a prompt. The form that
`pyspiel.convert_to_turn_based` gives a game of simultaneous moves has the same prompts: they are made from the
simultaneous state inside it, never from its own strings, which hold the choices of seats that come before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from unstable_lite.games.openspiel.boards import connect_four, nim, tic_tac_toe
from unstable_lite.games.openspiel.dice import liars_dice, pig
from unstable_lite.games.openspiel.names import TURN_BASED
from unstable_lite.games.openspiel.poker import kuhn, leduc
from unstable_lite.games.openspiel.simultaneous import MATRIX_GAMES, goofspiel, matrix
from unstable_lite.games.openspiel.wording import Wording, generic

LEGAL_ACTIONS = "Legal actions:"
"""Beginning of the last line of each prompt; the names of the actions follow in brackets."""
_WORDINGS: dict[str, Callable[[Any], Wording | None]] = {
    "kuhn_poker": kuhn,
    "leduc_poker": leduc,
    "liars_dice": liars_dice,
    "pig": pig,
    "goofspiel": goofspiel,
    "tic_tac_toe": tic_tac_toe,
    "connect_four": connect_four,
    "nim": nim,
    **dict.fromkeys(MATRIX_GAMES, matrix),
}
"""Rules texts by game. A function returns None for parameters that it has no text for."""
_BRACKETED = re.compile(r"\[([^\[\]]*)\]")
_ROUND = str.maketrans("[]{}", "()()")
_loaded: dict[str, Wording] = {}


def prompt(state: Any, pid: int) -> str:
    """Return the text for seat `pid` at a state in which it acts. `state`: `pyspiel.State`, in either form."""
    node = _simultaneous(state)
    wording, shown = _wording(node.get_game()), _shown(node, pid)
    rules = f" {wording.rules}" if wording.rules else ""
    actions = " ".join(f"[{name}]" for name in _names(node, pid, wording, shown))
    return (
        f"You are Player {pid} in {wording.title}.{rules}\n{wording.situation(pid, shown)}\n{LEGAL_ACTIONS} {actions}"
    )


def action_names(state: Any, pid: int) -> dict[str, int]:
    """Return the legal actions of seat `pid` by the names that its prompt lists; all names differ."""
    node = _simultaneous(state)
    return _names(node, pid, _wording(node.get_game()), _shown(node, pid))


def read_action(answer: str, names: Iterable[str]) -> str | None:
    """Return the name that an answer means, or None.

    A single pair of brackets counts, with any text around it; without brackets the whole answer. Case and spaces do not
    count unless they are the only difference between two names.
    """
    known, groups = list(names), _BRACKETED.findall(answer)
    said = groups[0] if len(groups) == 1 else answer
    for simplified in (_exact, _without_case, _without_spaces):
        same = [name for name in known if simplified(name) == simplified(said)]
        if len(same) == 1:
            return same[0]
    return None


def _exact(text: str) -> str:
    return text.strip()


def _without_case(text: str) -> str:
    return " ".join(text.casefold().split())


def _without_spaces(text: str) -> str:
    return "".join(text.casefold().split())


def _simultaneous(state: Any) -> Any:
    """Return the state itself, or the one inside the turn-based form of a game."""
    return state.simultaneous_game_state() if state.get_game().get_type().short_name == TURN_BASED else state


def _shown(node: Any, pid: int) -> str:
    if node.get_game().get_type().information.name == "PERFECT_INFORMATION":
        return str(node)
    return str(node.information_state_string(pid))


def has_rules(kind: Any) -> bool:
    """Return whether games of this type have a rules text, at least with default parameters. `kind`: `GameType`."""
    return kind.short_name in _WORDINGS


def _wording(game: Any) -> Wording:
    key = str(game)
    if key not in _loaded:
        _loaded[key] = _WORDINGS.get(game.get_type().short_name, generic)(game) or generic(game)
    return _loaded[key]


def _names(node: Any, pid: int, wording: Wording, shown: str) -> dict[str, int]:
    names: dict[str, int] = {}
    for action in node.legal_actions(pid):
        name = _plain(wording.action_name(shown, action, node.action_to_string(pid, action)))
        names[name if name and name not in names else f"{name} ({action})".strip()] = action
    return names


def _plain(name: str) -> str:
    """Return the name on one line, without the brackets and braces that mark an answer."""
    words = " ".join(name.split())
    return (words[1:-1] if _BRACKETED.fullmatch(words) else words).translate(_ROUND)
