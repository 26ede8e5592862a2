"""Elo ratings against scripted players, on a scale that is the same on every machine and day.

The rungs are scripted players. They are rated from the games among themselves alone, which the seed determines, and a
model only from its games against the rungs. So a model's rating does not depend on the other models of a ladder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from unstable_lite.dashboards.terminal import plain_table
from unstable_lite.evaluation.plan import ANCHOR, RUNGS
from unstable_lite.evaluation.results import write_csv
from unstable_lite.tracking.evaluations import POINTS
from unstable_lite.tracking.intervals import Z_95, bisect, percent
from unstable_lite.types import Outcome

LIMIT = 10_000.0
"""Largest distance between two ratings that is searched."""
SWEEPS = 500
"""Most passes over the rungs until no rating moves."""
MOVED = 0.001
"""Smallest change of a rating that counts."""

Met = Sequence[tuple[float, float, int]]
"""Rating of each opponent, points of the player against it, and games."""


class RatedGame(NamedTuple):
    """Outcome for `model` against `opponent`."""

    env_id: str
    model: str
    opponent: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of one model on the ladder of one env."""

    env_id: str
    model: str
    rating: float
    """Elo rating: 400 more are odds of 10 to 1, in points."""
    low: float
    high: float
    """95 % interval by the likelihood ratio, given the ratings of the opponents; NaN for the anchor."""
    games: int
    points: Mapping[str, float]
    """Share of the points against each rung that it met."""


def rate(games: Sequence[RatedGame]) -> list[Place]:
    """Return the places by env and descending rating, by maximum likelihood (Bradley and Terry 1952).

    A draw is half a win. One drawn game is added against each opponent, so that a rating is finite even if all games
    were won or lost.
    """
    places: list[Place] = []
    for env_id in dict.fromkeys(game.env_id for game in games):
        scores: dict[str, dict[str, list[float]]] = {}
        for game in games:
            if game.env_id == env_id:
                points = POINTS[game.outcome]
                scores.setdefault(game.model, {}).setdefault(game.opponent, []).append(points)
                scores.setdefault(game.opponent, {}).setdefault(game.model, []).append(1 - points)
        ratings = dict.fromkeys(RUNGS, 0.0)
        for _ in range(SWEEPS):
            before = dict(ratings)
            for rung in RUNGS:
                if rung != ANCHOR:
                    ratings[rung] = _rating(_met(scores.get(rung, {}), ratings))
            if all(abs(ratings[rung] - before[rung]) < MOVED for rung in RUNGS):
                break
        placed = [_place(env_id, model, scores[model], ratings) for model in scores]
        places += sorted(placed, key=lambda place: -place.rating)
    return places


def _place(env_id: str, model: str, by_opponent: Mapping[str, Sequence[float]], ratings: Mapping[str, float]) -> Place:
    against = {rung: by_opponent[rung] for rung in RUNGS if rung in by_opponent}
    met = _met(against, ratings)
    best, (low, high) = _rating(met), (math.nan, math.nan)
    if model != ANCHOR:  # the ratings at which the log-likelihood is Z_95² / 2 below its maximum
        least = _log_likelihood(met, best) - Z_95**2 / 2
        low, high = (
            bisect(best, outside, lambda rating: _log_likelihood(met, rating) >= least)
            for outside in (best - LIMIT, best + LIMIT)
        )
    return Place(
        env_id=env_id,
        model=model,
        rating=ratings.get(model, best),
        low=low,
        high=high,
        games=sum(map(len, against.values())),
        points={rung: fmean(points) for rung, points in against.items()},
    )


def _met(by_opponent: Mapping[str, Sequence[float]], ratings: Mapping[str, float]) -> Met:
    """Return the results against the rungs, with one drawn game added against each."""
    return [
        (ratings[opponent], sum(points) + 0.5, len(points) + 1)
        for opponent, points in by_opponent.items()
        if opponent in ratings
    ]


def _rating(met: Met) -> float:
    """Return the rating at which the expected points are those that were won."""
    won = sum(points for _, points, _ in met)
    return bisect(-LIMIT, LIMIT, lambda rating: sum(n * _expected(rating - other) for other, _, n in met) < won)


def _log_likelihood(met: Met, rating: float) -> float:
    return sum(
        points * math.log(_expected(rating - other)) + (n - points) * math.log(_expected(other - rating))
        for other, points, n in met
    )


def _expected(difference: float) -> float:
    """Return the expected share of points of a player that is rated `difference` higher."""
    return float(1 / (1 + 10 ** (-difference / 400)))


def write_places(directory: Path, places: Sequence[Place]) -> None:
    """Write ladder.csv: a row for each env and model, with its share of points against each rung."""
    rows = []
    for place in places:
        row = asdict(place)
        points = row.pop("points")
        rows.append(row | {f"points against {rung}": points.get(rung) for rung in RUNGS})
    write_csv(directory / "ladder.csv", list(rows[0]), rows)


def places_tables(places: Sequence[Place]) -> list[Table]:
    """Return the ladder as tables for a terminal, one for each env."""
    columns = ("rating", "95 %", "games", *(rung.removeprefix("scripted:").replace(":", "\n") for rung in RUNGS))
    tables: dict[str, Table] = {}
    for place in places:
        title = f"{place.env_id}: Elo, {ANCHOR} = 0; points against each scripted player"
        interval = f"{place.low:+.0f} – {place.high:+.0f}" if math.isfinite(place.low) else "–"
        points = (percent(place.points[rung], 0) if rung in place.points else "–" for rung in RUNGS)
        table = tables.setdefault(place.env_id, plain_table(title, ["model"], columns))
        table.add_row(place.model, f"{place.rating:+.0f}", interval, str(place.games), *points)
    return list(tables.values())
