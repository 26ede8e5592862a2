"""Models of a league as dashboards show them: ratings, who beat whom, which of many models to show, their ladder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from unstable_lite.adapters.frozen import update_of
from unstable_lite.dashboards.text_rows import aligned
from unstable_lite.tracking.intervals import percent, points_interval
from unstable_lite.tracking.result_rows import SCRIPTED
from unstable_lite.types import BASE, INITIAL, policy_of

FIXED = "fixed-"
"""Beginning of a fixed opponent's uid."""
STARTS = (BASE, INITIAL)
"""Uids of the models that a run begins with."""
ABOUT = {
    BASE: "the model before training",
    "scripted:blind-random": "moves from a fixed list, without a look at the position",
}
"""Explanations of opponents whose names do not say who they are."""
LONGEST_HEAD = 16


class Standing(NamedTuple):
    uid: str
    mu: float
    sigma: float
    games: int
    """Number of all its games, mirror games included."""
    is_active: bool = False
    is_current: bool = False

    @property
    def low(self) -> float:
        """μ − 2σ, by which models are compared: only games can raise it."""
        return self.mu - 2 * self.sigma

    @property
    def high(self) -> float:
        return self.mu + 2 * self.sigma


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
        return points_interval(self.won, self.drawn, self.lost)


class League:
    """Ratings of models, and the results of all pairs of different ones."""

    def __init__(self) -> None:
        self.games = Counter[str]()
        """Number of games against other models by uid; a game of three models counts twice for each."""
        self._met: dict[tuple[str, str], Result] = {}
        self._standings: dict[str, Standing] = {}

    def add(self, models: Mapping[str, Sequence[Any]], matches: Iterable[Sequence[Any]]) -> None:
        """Add one line of league.jsonl, whose results take the place of earlier ones."""
        for uid, row in models.items():
            self._standings[uid] = Standing(uid, *row)
        for one, other, *counts in matches:
            if one != other:
                result = Result(*counts)
                new_games = result.games - self._met.get((one, other), Result(0)).games
                self._met[one, other] = result
                self._met[other, one] = Result(result.games, result.lost, result.drawn, result.won)
                self.games.update({one: new_games, other: new_games})

    def of(self, one: str, other: str) -> Result | None:
        """Return the results of `one` against `other`; None if they did not meet."""
        return self._met.get((one, other))

    def totals(self) -> dict[str, Result]:
        """Return the results of each model against all others; a game of three models counts twice."""
        of_pairs: dict[str, list[Result]] = {}
        for (uid, _), result in self._met.items():
            of_pairs.setdefault(uid, []).append(result)
        return {uid: Result(*map(sum, zip(*results, strict=True))) for uid, results in of_pairs.items()}

    def opponents(self, uids: Sequence[str]) -> list[str]:
        """Return those of these models that met others of them, those with the most games first."""
        games = Counter({uid: sum(met.games for other in uids if (met := self.of(uid, other))) for uid in uids})
        return [uid for uid, num_games in games.most_common() if num_games]

    @property
    def ladder(self) -> list[Standing]:
        """Models with games against others and the current policy, by μ − 2σ; the rest only inherited their ratings."""
        met = [standing for standing in self._standings.values() if self.games[standing.uid] or standing.is_current]
        return sorted(met, key=lambda standing: -standing.low)


def name_of(uid: str) -> str:
    """Return the name for display: without the beginning of fixed opponents, but for the base as a fixed opponent."""
    return uid if uid == FIXED + BASE else uid.removeprefix(FIXED)


def about(opponent: str) -> str:
    """Return an explanation of an opponent, as results name it, if it needs one."""
    return ABOUT.get(opponent.partition(",")[0], "")


@cache
def age(uid: str) -> tuple[bool, int, str]:
    """Return a sort key: the models that a run began with, its checkpoints by number, fixed opponents."""
    update = None if uid.startswith(FIXED) else 0 if _is_start(uid) else update_of(Path(uid))
    return update is None, update or 0, uid


def find_strongest(standings: Iterable[Standing], games: Counter[str]) -> str | None:
    """Return the uid of the checkpoint with the highest μ − 2σ; None if none met another model.

    A fresh checkpoint inherits its predecessor's μ, but has a large σ until it has played.
    """
    own = [standing for standing in standings if not _is_fixed(standing.uid) and games[standing.uid]]
    return max(own, key=lambda standing: standing.low).uid if own else None


def choose(standings: Sequence[Standing], games: Counter[str], room: int) -> list[Standing]:
    """Return at most `room` of the models, those that matter, in the given order.

    These are the current policies, the strongest checkpoint, the base, fixed opponents with the most games, and past
    checkpoints spread over the run: of each part of the run the one with the most games. If not all fit, fixed
    opponents take up to half of the rest. games: number of games against other models.
    """
    own = sorted((standing.uid for standing in standings if not _is_fixed(standing.uid)), key=age)
    fixed = sorted((standing.uid for standing in standings if _is_fixed(standing.uid)), key=lambda uid: -games[uid])
    current = [standing.uid for standing in standings if standing.is_current]
    strongest = find_strongest(standings, games)
    wanted = list(dict.fromkeys([*current, *([strongest] if strongest else []), *filter(_is_start, own)]))
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


def _is_start(uid: str) -> bool:
    return uid.rpartition("/")[2] in STARTS


def ladder_lines(league: League, width: int, height: int, has_results: bool) -> list[Text]:
    """Return at most this many rows: a head, and the newest policy, the strongest, the base and fixed opponents.

    has_results: whether there are columns with the results against these models, as far as they fit.
    """
    ladder, games = league.ladder, league.games
    strongest, title = find_strongest(ladder, games), Text("ladder", style="bold")
    if not any(games.values()):
        return [title, Text("no games between different models yet")]
    # Not the past checkpoints, of which others would be shown at each update.
    starts = {strongest, *(row.uid for row in ladder if _is_start(row.uid))}
    lasting = [row for row in ladder if row.is_current or row.uid in starts or _is_fixed(row.uid)]
    shown = choose(lasting, games, height - 1)
    title.append(f" {len(shown)} of {len(ladder)} models", style="dim not bold")
    table = [[title, Text("μ ± σ", style="dim"), Text("games", style="dim")]]
    for row in shown:
        roles = " newest" * row.is_current + " strongest" * (row.uid == strongest)
        rating = Text(f"{row.mu:.1f} ± {row.sigma:.1f}")
        table.append([Text.assemble(_short(row.uid), (roles, "bold")), rating, Text(f"{games[row.uid]:,}")])
    lines = aligned(table, "lrr", width)
    uids = [row.uid for row in shown]
    for opponent in league.opponents(uids) if has_results else ():
        is_newest = any(row.is_current for row in shown if row.uid == opponent)
        head = Text(f"vs {policy_of(opponent) or 'newest' if is_newest else _short(opponent)}", style="dim")
        head.truncate(LONGEST_HEAD, overflow="ellipsis")
        column = [head, *(_cell(league.of(uid, opponent), uid == opponent) for uid in uids)]
        if lines[0].cell_len + 2 + max(cell.cell_len for cell in column) > width:
            break
        lines = aligned([*zip(lines, column, strict=True)], "lr")
    return lines


def _short(uid: str) -> str:
    return name_of(uid).removeprefix(SCRIPTED)


def _cell(result: Result | None, is_same: bool) -> Text:
    """Return the points and the number of games with a known result."""
    if result is None:
        return Text("·" * is_same, style="dim")
    if not result.n:
        return Text(f"? {result.games:,}", style="dim")
    return Text.assemble(percent(result.points), (f" {result.n:,}", "dim"))
