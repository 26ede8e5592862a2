"""Listener that keeps the records of games."""

from __future__ import annotations

from collections.abc import Callable

from unstable_lite.types import GameRecord, GameSpec


class Records(list[GameRecord]):
    """Finished games in the order in which they were counted."""

    def begin_game(self, spec: GameSpec) -> None:
        pass

    def add_record(self, record: GameRecord) -> None:
        self.append(record)


class Observer:
    """Listener that calls a function for every finished game."""

    def __init__(self, observe: Callable[[GameRecord], None]) -> None:
        self.add_record = observe

    def begin_game(self, spec: GameSpec) -> None:
        pass
