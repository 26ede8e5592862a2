"""Words of one game: its rules, the situation of a seat, and the names of its actions.

A wording gets only strings of OpenSpiel that hold nothing a seat may not see, so no prompt can leak more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Situation = Callable[[int, str], str]
"""Function from (seat, OpenSpiel's string for it) to text. Two different strings of a seat give two different texts."""
ActionName = Callable[[str, int, str], str]
"""Function from (OpenSpiel's string for the seat, action, OpenSpiel's name of it) to its name in prompts."""


@dataclass(frozen=True, slots=True)
class Wording:
    title: str
    rules: str
    """Rules with the game's own parameters; may be empty."""
    situation: Situation
    action_name: ActionName


def name_by_openspiel(_shown: str, _action: int, openspiel_name: str) -> str:
    return openspiel_name


def generic(game: Any) -> Wording:
    """Return the wording of any game: OpenSpiel's own text of the state. `game`: `pyspiel.Game`."""
    parameters = str(game).partition("(")[2].removesuffix(")")
    title = game.get_type().long_name + (f" ({parameters})" if parameters else "")
    return Wording(title, "", lambda _seat, shown: shown.rstrip("\n"), name_by_openspiel)


def by_player(values: Iterable[str]) -> str:
    """Return one value for each player, such as `Player 0: 3, Player 1: 1`."""
    return ", ".join(f"Player {pid}: {value}" for pid, value in enumerate(values))
