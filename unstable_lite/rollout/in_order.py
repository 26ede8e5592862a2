"""Release of game results in the order in which the games began.

Short games end first: until the first wave of games is over, a mean over the finished games is the mean of short games.
In the order in which they began, they are an unbiased sample.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 8
"""Number of finished games that may wait for one game, per game of the largest number ever in flight at once. A game
that outlasts so many others is no longer waited for, so that a game that hangs stops no curve and memory stays bounded.
"""


class InOrder(Generic[T]):
    """Results of games by game number.

    Waiting results are not saved. A resumed run does not finish the games that were in flight, and without those the
    finished games behind them are a sample of short ones.
    """

    def __init__(self) -> None:
        self._begun: deque[int] = deque()
        """Games that were not released yet, in order."""
        self._in_flight: set[int] = set()
        self._ended: dict[int, T] = {}
        self._most_in_flight = 0

    def begin(self, number: int) -> None:
        self._begun.append(number)
        self._in_flight.add(number)
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight))

    def end(self, number: int, left: T) -> list[T]:
        """Return the results to release now, at once for a game that did not begin here or is no longer waited for."""
        if number not in self._in_flight:
            return [left]
        self._in_flight.discard(number)
        self._ended[number] = left
        released = []
        while self._begun:
            first = self._begun[0]
            if first in self._ended:
                released.append(self._ended.pop(first))
            elif len(self._ended) > PATIENCE * self._most_in_flight:
                self._in_flight.discard(first)
            else:
                break
            self._begun.popleft()
        return released
