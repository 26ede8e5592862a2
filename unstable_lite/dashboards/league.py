"""Models of a league as dashboards show them: ratings, who beat whom, which of many models to show, their panel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unstable_lite.adapters.frozen import update_of
from unstable_lite.tracking.intervals import points_interval
from unstable_lite.types import BASE, INITIAL

FIXED = "fixed-"
"""Beginning of a fixed opponent's uid."""
STARTS = (BASE, INITIAL)
"""Uids of the models that a run begins with."""
AROUND = 4
"""Width of a panel's border and padding."""
GAP = 2
"""Spaces between the columns of two opponents."""
NAME = 17
"""Width that names may take if the panel is narrow: that of `ckpt-10 strongest`."""

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
        new_games = result.games - self._met.get((one, other), Result(0)).games
        self._met[one, other] = result
        self._met[other, one] = Result(result.games, result.lost, result.drawn, result.won)
        self.games.update({one: new_games, other: new_games})

    def of(self, one: str, other: str) -> Result | None:
        """Return the results of `one` against `other`; None if they did not meet."""
        return self._met.get((one, other))

    def opponents(self, uids: Sequence[str]) -> list[str]:
        """Return those of these models that met others of them, those with the most games first."""
        games = Counter({uid: sum(met.games for other in uids if (met := self.of(uid, other))) for uid in uids})
        return [uid for uid, num_games in games.most_common() if num_games]


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


def league_panel(league: League, width: int, height: int) -> Panel:
    """Return a panel of this size, with a row for each model and a column for each opponent that they met most."""
    ladder, results = league.ladder, league.results
    shown, strongest = choose(ladder, results.games, height - 3), find_strongest(ladder, results.games)
    ranks = {row.uid: rank for rank, row in enumerate(ladder, start=1)}
    uids = [row.uid for row in shown]
    names = [Text("model", style="dim"), *(_name(row, row.uid == strongest) for row in shown)]
    columns = [
        _column("#", (Text(str(ranks[uid]), style="dim") for uid in uids)),
        names,
        _column("μ±σ", (Text(f"{row.mu:.1f}±{row.sigma:.1f}") for row in shown)),
        _column("games", (Text(f"{row.games:,}") for row in shown)),
    ]
    room = width - AROUND - sum(map(_width, columns)) + _width(names) - len(columns) + 1
    name_width = min(_width(names), room, max(NAME, width // 3))
    room -= name_width
    opponents, fitting = results.opponents(uids), dict[str, list[Text]]()
    for uid in opponents:
        column = _column(f"vs {ranks[uid]}", _cells(uids, uid, results))
        if room < GAP + _width(column):
            break
        room -= GAP + _width(column)
        fitting[uid] = column
    table = Table.grid(padding=(0, 1))
    for column in columns:
        is_name = column is names
        wide = min(_width(names), name_width + room) if is_name else _width(column)
        table.add_column(justify="left" if is_name else "right", no_wrap=True, overflow="ellipsis", width=wide)
    for uid in sorted(fitting, key=ranks.__getitem__):
        columns.append(fitting[uid])
        table.add_column(justify="right", no_wrap=True, width=GAP - 1 + _width(fitting[uid]))
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    return Panel(
        table if shown else Text("no games between different models yet", style="dim"),
        title=f"ladder: {len(shown)} of {len(ladder)} rated models",
        title_align="left",
        subtitle=_hints(len(fitting), len(opponents), width) or None,
        subtitle_align="left",
    )


def _hints(fitting: int, opponents: int, width: int) -> str:
    """Return the meaning of the cells, and the number of opponents with a column, as far as they fit."""
    omitted = f"{fitting} of {opponents} opponents fit" * (fitting < opponents)
    hints = [*["row's points, games", "coloured if not a half (95 %)"] * bool(fitting), *[omitted] * bool(omitted)]
    for dropped in (1, 0):
        if len(" · ".join(hints)) > width - 6 and fitting and len(hints) > 1:
            del hints[dropped]
    text = " · ".join(hints)
    return text if len(text) <= width - 6 else ""


def _column(head: str, cells: Iterable[Text]) -> list[Text]:
    return [Text(head, style="dim"), *cells]


def _width(column: Iterable[Text]) -> int:
    return max(text.cell_len for text in column)


def _name(row: Standing, is_strongest: bool) -> Text:
    style = "bold green" if row.is_current else "" if row.is_active else "dim"
    roles = " current" * row.is_current + " strongest" * is_strongest
    return Text.assemble((name_of(row.uid), style), (roles, "cyan"))


def _cells(uids: Sequence[str], opponent: str, results: Results) -> Iterator[Text]:
    """Yield the points of each model against one opponent and the number of games, coloured if far from a half."""
    of = {uid: result for uid in uids if (result := results.of(uid, opponent)) is not None}
    digits = max((len(str(result.games)) for result in of.values()), default=0)
    for uid in uids:
        if uid not in of:
            yield Text("·" * (uid == opponent), style="dim")
        elif of[uid].n:
            low, high = of[uid].interval
            style = "green" if low > 0.5 else "red" if high < 0.5 else ""
            yield Text.assemble((f"{of[uid].points:.0%}", style), (f" {of[uid].n:>{digits}}", "dim"))
        else:
            yield Text(f"? {of[uid].games:>{digits}}", style="dim")
