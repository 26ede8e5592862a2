"""Counts of collected steps, by env and length of the game: played, trained on, dropped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from unstable_lite.types import Step

LENGTHS = (4, 8, 16, 32, 64)
"""Largest number of turns in each class of game length; longer games form one more class."""
UNKNOWN_LENGTH = "unknown turns"
"""Class of steps that were added without their game."""


def length_class(num_turns: int) -> str:
    """Return the class of a game's length, as metrics name it: `9-16 turns`, `65+ turns`."""
    index = bisect_left(LENGTHS, num_turns)
    least = LENGTHS[index - 1] + 1 if index else 1
    return f"{least}-{LENGTHS[index]} turns" if index < len(LENGTHS) else f"{least}+ turns"


@dataclass(slots=True)
class StepCounts:
    """Fate of the collected steps of one env's games in one class of length, since the start of the run."""

    played: int = 0
    """Number of steps of games that ended and were not void."""
    trained: int = 0
    """Number of steps that the learner took."""
    dropped: int = 0
    """Number of steps that became too stale."""


class CountsByLength(dict[tuple[str, str], StepCounts]):
    """Counts by env id and class of game length."""

    @classmethod
    def of(cls, state: Iterable[Iterable[Any]]) -> CountsByLength:
        """Return the counts that `state_dict` returned."""
        return cls({(env_id, turns): StepCounts(*counts) for env_id, turns, *counts in state})

    def state_dict(self) -> list[list[Any]]:
        return [[*key, c.played, c.trained, c.dropped] for key, c in self.items()]

    def add(self, steps: Iterable[Step], fate: Literal["played", "trained", "dropped"]) -> None:
        for step in steps:
            key = step.env_id, step.step_info.get("game_length", UNKNOWN_LENGTH)
            counts = self.get(key)
            if counts is None:
                counts = self[key] = StepCounts()
            setattr(counts, fate, getattr(counts, fate) + 1)

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics, of each class of length and of all."""
        metrics: dict[str, float] = {}
        for (env_id, turns), counts in self.items():
            of_class = {"Played": counts.played, "Trained": counts.trained, "Dropped": counts.dropped}
            for fate, count in of_class.items():
                total = f"collection-{env_id}/Steps {fate}"
                metrics[total] = metrics.get(total, 0) + count
                metrics[f"{total} ({turns})"] = count
        return metrics

    def most_dropped(self) -> str | None:
        """Return the env and class of game length with the largest share of dropped steps, and that share; or None."""
        shares = {key: c.dropped / c.played for key, c in self.items() if c.dropped and c.played}
        if not shares:
            return None
        env_id, turns = max(shares, key=shares.__getitem__)
        return f"{env_id}, {turns}: {shares[env_id, turns]:.1%}"
