"""Rows of text for a terminal: tables, wrapped texts and sparklines. Knows no runs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from statistics import fmean

from rich.cells import cell_len, set_cell_size
from rich.text import Text

WORD = re.compile(r" *\S+ *")
BARS = "▁▂▃▄▅▆▇█"
MOST_LABEL = 30
"""Most columns of a label, so that the columns beside it stay aligned; a report has the whole one."""
SPIKE = "!"
"""Mark of a sparkline's cell that contains a spike."""


def shortened(label: str, width: int = MOST_LABEL) -> str:
    """Return the label without its middle if it is wider: its ends name env and opponent."""
    if cell_len(label) <= width:
        return label
    ends = set_cell_size(label, (width - 1) // 2), set_cell_size(label[::-1], width // 2)[::-1]
    return f"{ends[0].rstrip()}…{ends[1].lstrip()}"


def all_shortened(labels: Sequence[str]) -> list[str]:
    """Return the labels of one column shortened, or as they are if two of them would then be alike."""
    short = [shortened(label) for label in labels]
    return short if len({*short}) == len({*labels}) else [*labels]


def aligned(table: Sequence[Sequence[Text]], justify: str, width: int | None = None, gap: int = 2) -> list[Text]:
    """Return a line for each row, with a gap between columns; the first one is cut if `width` needs that.

    justify: `l` or `r` for each column.
    """
    widths = [max(cell.cell_len for cell in column) for column in zip(*table, strict=True)]
    if width is not None:
        widths[0] = max(min(widths[0], width - sum(widths[1:]) - gap * (len(widths) - 1)), 1)
    lines = []
    for row in table:
        cells = [cell.copy() for cell in row]
        for cell, side, wide in zip(cells, justify, widths, strict=True):
            cell.plain = shortened(cell.plain, wide)
            cell.align("right" if side == "r" else "left", wide)
        lines.append(Text(" " * gap).join(cells))
    return lines


def hanging(line: Text, width: int, most: int | None = None) -> list[Text]:
    """Return the line wrapped: between columns, which two spaces part, else between words, which are never cut.

    What follows begins below the second column. most: number of rows, of which the last one may end with an ellipsis.
    """
    columns = [*re.finditer(r" *\S+(?: \S+)* *", line.plain)]
    indent = columns[0].end() if len(columns) > 1 and columns[0].end() <= width // 2 else 2
    breaks, used = list[int](), 0
    for column in columns:
        is_whole = cell_len(column[0].rstrip()) <= width - indent
        for part in [column] if is_whole else WORD.finditer(line.plain, *column.span()):
            if used > indent and used + cell_len(part[0].rstrip()) > width:
                breaks.append(part.start())
                used = indent
            used += cell_len(part[0])
    rows = [Text(" " * indent * (number > 0)).append_text(row) for number, row in enumerate(line.divide(breaks))]
    for row in rows:
        row.rstrip()
    if most is not None and len(rows) > most:
        last = rows[most - 1]
        if last.cell_len > width - 2:
            last.right_crop(len(last) - last.plain.rfind(" ", 0, width - 1))
        last.append(" …")
    return rows[:most]


def sparkline(
    values: Sequence[float], width: int, is_share: bool = False, spikes: Collection[int] = ()
) -> tuple[str, float, float]:
    """Return a sparkline of all values, and the least and the greatest of its cells (NaN without a value).

    A cell is the mean of an equal part of the values; there are at most `width`. The scale is from 0 to 1 for shares,
    else from the least to the greatest cell or to 0. spikes: places of values that are marked, and left out of means.
    """
    count = min(width, len(values))
    parts = [range(len(values) * n // count, len(values) * (n + 1) // count) for n in range(count)]
    kept = [[values[n] for n in part if n not in spikes and math.isfinite(values[n])] for part in parts]
    means = [fmean(part) if part else math.nan for part in kept]
    known = [mean for mean in means if math.isfinite(mean)] or [math.nan]
    low, high = (0.0, 1.0) if is_share else (min(0.0, *known), max(0.0, *known))
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = [BARS[round((min(max(mean, low), high) - low) * scale)] if math.isfinite(mean) else " " for mean in means]
    bars = [SPIKE if any(n in spikes for n in part) else bar for bar, part in zip(bars, parts, strict=True)]
    return "".join(bars), min(known), max(known)
