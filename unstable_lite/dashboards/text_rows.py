"""Rows of text for a terminal: tables, wrapped texts and sparklines. Knows no runs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from statistics import fmean

from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
SPIKE = "!"
"""Mark of a sparkline's cell that contains a spike."""


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
            cell.truncate(wide, overflow="ellipsis")
            cell.align("right" if side == "r" else "left", wide)
        lines.append(Text(" " * gap).join(cells))
    return lines


def labelled(label: str, text: str, label_width: int, width: int, most: int, style: str = "") -> list[Text]:
    """Return a label with a text, wrapped at words into at most `most` rows."""
    room = width - label_width - 2
    rows = textwrap.wrap(text, room, max_lines=most, placeholder=" …", break_on_hyphens=False)
    heads = [label, *[""] * (len(rows) - 1)]
    return [Text.assemble(head.ljust(label_width), "  ", (row, style)) for head, row in zip(heads, rows, strict=True)]


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
