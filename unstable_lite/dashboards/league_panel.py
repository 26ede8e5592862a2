"""Panel of the dashboard with the players that matter: their ratings, and who beats whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unstable_lite.dashboards.standings import League, Results, Standing, choose, find_strongest, name_of

KEY = "m"
"""Key that shows this panel on the whole screen, and then the dashboard again."""
AROUND = 4
"""Width of a panel's border and padding."""
GAP = 2
"""Spaces between the columns of two opponents."""
NAME = 17
"""Width that names may take if the panel is narrow: that of `ckpt-10 strongest`."""


def league_panel(league: League, width: int, height: int, is_whole: bool = False) -> Panel:
    """Return a panel of this size, with a row for each model and a column for each opponent that they met most.

    is_whole: whether it has the whole screen, so that no key shows more.
    """
    ladder, results, inner = league.ladder, league.results, width - AROUND
    shown, strongest = choose(ladder, results.games, height - 3), find_strongest(ladder, results.games)
    ranks = {row.uid: rank for rank, row in enumerate(ladder, start=1)}
    columns = [
        _column("#", (Text(str(ranks[row.uid]), style="dim") for row in shown)),
        _column("model", (_name(row, row.uid == strongest) for row in shown)),
        _column("μ±σ", (Text(f"{row.mu:.1f}±{row.sigma:.1f}") for row in shown)),
        _column("games", (Text(f"{row.games:,}") for row in shown)),
    ]
    widths = [_width(column) for column in columns]
    others = sum(widths) - widths[1] + len(widths) - 1
    longest, widths[1] = widths[1], min(widths[1], inner - others, max(NAME, width // 3))
    room = inner - others - widths[1]
    opponents = results.opponents([row.uid for row in shown])
    fitting = dict[str, list[Text]]()
    for uid in opponents:
        column = _column(f"vs {ranks[uid]}", _cells([row.uid for row in shown], uid, results))
        if room < GAP + _width(column):
            break
        room -= GAP + _width(column)
        fitting[uid] = column
    widths[1] += min(room, longest - widths[1])
    for uid in sorted(fitting, key=ranks.__getitem__):
        columns.append(fitting[uid])
        widths.append(GAP - 1 + _width(fitting[uid]))

    return Panel(
        _grid(columns, widths) if shown else Text("no games between different models yet", style="dim"),
        title=f"ladder: {len(shown)} of {len(ladder)} rated models",
        title_align="left",
        subtitle=_hints(len(fitting), len(opponents), is_whole, width) or None,
        subtitle_align="left",
    )


def _grid(columns: Sequence[Sequence[Text]], widths: Sequence[int]) -> Table:
    """Return a table of these columns; the second one has the names."""
    table = Table.grid(padding=(0, 1))
    for number, width in enumerate(widths):
        table.add_column(justify="left" if number == 1 else "right", no_wrap=True, overflow="ellipsis", width=width)
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    return table


def _hints(fitting: int, opponents: int, is_whole: bool, width: int) -> str:
    """Return the meaning of the cells, the number of opponents with a column, and the effect of the key."""
    key = "back" if is_whole else "" if fitting == opponents else "more" if fitting else "who beats whom"
    hints = [
        "row's points, games" * bool(fitting),
        f"{fitting} of {opponents} opponents" * (0 < fitting < opponents),
        f"{KEY}: {key}" * bool(key),
    ]
    longer = [hints[0], "coloured if not a half (95 %)" * bool(fitting), *hints[1:]]
    texts = [" · ".join(filter(None, each)) for each in (longer, hints, hints[1:])]
    return next((text for text in texts if len(text) <= width - 6), texts[-1])


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
