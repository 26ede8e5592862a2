"""Models of a league as dashboards show them: their ratings, who beat whom, and which of many models to show.

Knows neither files nor screens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from unstable_lite.adapters.run_adapters import update_of
from unstable_lite.tracking.intervals import points_interval
from unstable_lite.types import BASE, INITIAL

FIXED = "fixed-"
"""Beginning of a fixed opponent's uid."""
STARTS = (BASE, INITIAL)
"""Uids of the models that a run begins with."""

interval_of = lru_cache(maxsize=10_000)(points_interval)  # a dashboard asks for the same ones every second


class Standing(NamedTuple):
    uid: str
    mu: float
    sigma: float
    games: int
    """Number of all its games, mirror games included."""
    is_active: bool = False
    is_current: bool = False


class Result(NamedTuple):
    """Games of one model against another one."""

    games: int
    won: int = 0
    drawn: int = 0
    lost: int = 0

    @property
    def n(self) -> int:
        """Number of games with a known winner or draw; runs of earlier versions recorded only the number of games."""
        return self.won + self.drawn + self.lost

    @property
    def points(self) -> float:
        """Share of the points, a draw being half of one; NaN if `n` is 0."""
        return (self.won + self.drawn / 2) / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the points."""
        return interval_of(self.won, self.drawn, self.lost)


class Results:
    """Results of all pairs of different models."""

    def __init__(self) -> None:
        self.games = Counter[str]()
        """Number of games against other models by uid; a game of three models counts twice for each."""
        self._met: dict[tuple[str, str], Result] = {}

    def set(self, one: str, other: str, result: Result) -> None:
        """Set the results of `one` against `other`, in place of earlier ones."""
        if other < one:
            one, other, result = other, one, _reversed(result)
        before = self._met.get((one, other), Result(0))
        self._met[one, other] = result
        for uid in (one, other):
            self.games[uid] += result.games - before.games

    def of(self, one: str, other: str) -> Result | None:
        """Return the results of `one` against `other`; None if they did not meet."""
        if other < one:
            result = self._met.get((other, one))
            return None if result is None else _reversed(result)
        return self._met.get((one, other))

    def opponents(self, uids: Sequence[str]) -> list[str]:
        """Return those of these models that met others of them, those with the most games first."""
        games = Counter[str]()
        for i, one in enumerate(uids):
            for other in uids[:i]:
                if (result := self.of(one, other)) is not None:
                    games[one] += result.games
                    games[other] += result.games
        return [uid for uid, _ in games.most_common()]


class League:
    def __init__(self) -> None:
        self.results = Results()
        self._standings: dict[str, Standing] = {}

    def add(self, models: Mapping[str, Sequence[Any]], matches: Iterable[Sequence[Any]]) -> None:
        """Add one line of league.jsonl."""
        for uid, row in models.items():
            self._standings[uid] = Standing(uid, *row)
        for one, other, *counts in matches:
            if one != other:
                self.results.set(one, other, Result(*counts))

    @property
    def ladder(self) -> list[Standing]:
        """Models with games against others and the current policy, the strongest first; the rest only inherited."""
        games = self.results.games
        met = [standing for standing in self._standings.values() if games[standing.uid] or standing.is_current]
        return sorted(met, key=lambda standing: -standing.mu)


def name_of(uid: str) -> str:
    """Return the name for display: without the beginning of fixed opponents, but for the base as a fixed opponent."""
    return uid if uid == FIXED + BASE else uid.removeprefix(FIXED)


@cache
def age(uid: str) -> tuple[bool, int, str]:
    """Return a sort key: the models that a run began with, its checkpoints by number, fixed opponents."""
    update = 0 if uid in STARTS else update_of(Path(uid))
    return update is None, update or 0, uid


def find_strongest(standings: Iterable[Standing], games: Counter[str]) -> str | None:
    """Return the uid of the checkpoint with the highest μ − 2σ; None if none met another model.

    A fresh checkpoint inherits its predecessor's μ, but has a large σ until it has played.
    """
    own = [standing for standing in standings if not _is_fixed(standing.uid) and games[standing.uid]]
    return max(own, key=lambda standing: standing.mu - 2 * standing.sigma).uid if own else None


def choose(standings: Sequence[Standing], games: Counter[str], room: int) -> list[Standing]:
    """Return at most `room` of the models, those that matter, in the given order.

    These are the current policy, the strongest checkpoint, the base, fixed opponents with the most games, and past
    checkpoints spread over the run: of each part of the run the one with the most games. If not all fit, fixed
    opponents take up to half of the rest. games: number of games against other models.
    """
    own = sorted((standing.uid for standing in standings if not _is_fixed(standing.uid)), key=age)
    fixed = sorted((standing.uid for standing in standings if _is_fixed(standing.uid)), key=lambda uid: -games[uid])
    current = [standing.uid for standing in standings if standing.is_current]
    strongest = find_strongest(standings, games)
    starts = [uid for uid in own if uid in STARTS]
    wanted = list(dict.fromkeys([*current, *([strongest] if strongest else []), *starts]))
    past = [uid for uid in own if uid not in wanted]
    left = max(room - len(wanted), 0)
    wanted += fixed[: max((left + 1) // 2, left - len(past))]
    parts = min(room - len(wanted), len(past))
    for part in range(parts):
        of_part = past[len(past) * part // parts : len(past) * (part + 1) // parts]
        wanted.append(max(of_part, key=lambda uid: games[uid]))
    return [standing for standing in standings if standing.uid in wanted[:room]]


def _is_fixed(uid: str) -> bool:
    return age(uid)[0]


def _reversed(result: Result) -> Result:
    return Result(result.games, result.lost, result.drawn, result.won)
