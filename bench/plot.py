"""Line charts for pages of results, as SVG text of a few kilobytes each."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 300, 64, 16, 34, 46
COLOURS = ("#3b7dd8", "#c04fa3", "#2e8b57", "#8d63d2", "#0f8aa0", "#747c87", "#6b8a1e")
"""Colours of lines and marks: at least 3 to 1 on the paper of both styles, without red and yellow."""
MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-4.5L4.5 3.5h-9z",
    "M0-5L5 0L0 5L-5 0z",
    "M0 4.5L4.5-3.5h-9z",
    "M-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "M-4.5-1.2h9v2.4h-9z",
)
"""Shapes of marks: circle, square, triangle, diamond, the other triangle, cross, bar."""
STYLE = (
    "text{fill:#1a1a1a}.paper{fill:#fff}.grid{stroke:#e4e4e4}"
    "@media (prefers-color-scheme:dark){text{fill:#e6e6e6}.paper{fill:#16181b}.grid{stroke:#34373c}}"
)
LEGEND_LINE = 13
CHAR_WIDTH = 6.2
"""Mean width of a character of the font, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points by name. Values that are not finite are left out, as are non-positive ones on a logarithmic axis. A point
    whose x is NaN ends a line; the next one begins another of the same name and colour."""
    log_x: bool = True
    log_y: bool = False
    marks: Literal["both", "lines", "dots"] = "both"
    """Thin lines without dots, dots without lines, or both."""
    has_legend: bool = True
    x_names: Sequence[str] = ()
    """Names of 0, 1, … on the x axis, instead of numbers."""
    y_includes: Sequence[float] = (0.0,)
    """Values that a linear y axis shows in any case, for charts with equal axes."""


def to_svg(charts: Sequence[Chart], columns: int = 2) -> str:
    """Draw all charts side by side."""
    columns = min(columns, len(charts))
    rows = math.ceil(len(charts) / columns)
    drawn = [
        f'<g transform="translate({(index % columns) * WIDTH},{(index // columns) * HEIGHT})">{_draw(chart)}</g>'
        for index, chart in enumerate(charts)
    ]
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}" viewBox="0 0 {columns * WIDTH} {rows * HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    background = f'<style>{STYLE}</style><rect width="100%" height="100%" class="paper"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(drawn)}</svg>\n'


def _draw(chart: Chart) -> str:
    lines = {name: _parts(chart, points) for name, points in chart.lines.items()}
    points = [point for parts in lines.values() for part in parts for point in part]
    text = [_text(WIDTH / 2, 18, chart.title, "middle", "bold")]
    text.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x_label, "middle"))
    text.append(
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
        f"{escape(chart.y_label)}</text>"
    )
    if not points:
        return "".join([*text, _text(WIDTH / 2, HEIGHT / 2, "nothing was measured", "middle")])
    legend, top = _legend([*lines]) if chart.has_legend else ([], TOP)
    text += legend
    x_values = [-0.5, len(chart.x_names) - 0.5] if chart.x_names else [x for x, _ in points]
    x_axis = _Axis(x_values, LEFT, WIDTH - RIGHT, chart.log_x)
    y_values = [y for _, y in points] + ([] if chart.log_y else [*chart.y_includes])
    y_axis = _Axis(y_values, HEIGHT - BOTTOM, top, chart.log_y)
    names = [(float(index), name) for index, name in enumerate(chart.x_names)]
    ticks = names or [(x, _short(x)) for x in x_axis.ticks]
    for x, name in ticks:
        place = x_axis.place(x)
        text.append(f'<path d="M{place:.1f} {top}V{HEIGHT - BOTTOM}" class="grid"/>')
        fitting = int((WIDTH - LEFT - RIGHT) / len(ticks) / CHAR_WIDTH)
        for number, line in enumerate(textwrap.wrap(name, max(fitting, 4), max_lines=3, placeholder="…")):
            text.append(_text(place, HEIGHT - BOTTOM + 16 + 12 * number, line, "middle"))
    for y in y_axis.ticks:
        place = y_axis.place(y)
        text.append(f'<path d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        text.append(_text(LEFT - 6, place + 4, _short(y), "end"))
    for index, parts in enumerate(lines.values()):
        colour = COLOURS[index % len(COLOURS)]
        for part in parts:
            if chart.marks != "dots":
                path = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in part)
                width = 1.8 if chart.marks == "both" else 1
                text.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
            if chart.marks != "lines":
                text += [_mark(x_axis.place(x), y_axis.place(y), index, chart.marks) for x, y in part]
    return "".join(text)


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """Return marks and names side by side in as many lines as they need, and the top of the plot below them."""
    drawn: list[str] = []
    x, y = float(LEFT), TOP - 4
    for index, name in enumerate(names):
        width = 26 + CHAR_WIDTH * len(name)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + LEGEND_LINE
        drawn += [_mark(x + 5, y - 4, index, "dots"), _text(x + 13, y, name, "start")]
        x += width
    return drawn, y + LEGEND_LINE - 2


def _mark(x: float, y: float, index: int, marks: str) -> str:
    shape, colour = MARKS[(index + index // len(COLOURS)) % len(MARKS)], COLOURS[index % len(COLOURS)]
    size = " scale(0.6)" if marks == "both" else ""
    return f'<path d="{shape}" transform="translate({x:.1f},{y:.1f}){size}" fill="{colour}" fill-opacity="0.85"/>'


def _parts(chart: Chart, points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the points that can be drawn, as the lines that points without an x divide."""
    parts = list[list[tuple[float, float]]]([[]])
    for x, y in points:
        if math.isnan(x):
            parts.append([])
        elif math.isfinite(x) and math.isfinite(y) and (x > 0 or not chart.log_x) and (y > 0 or not chart.log_y):
            parts[-1].append((x, y))
    return [part for part in parts if part]


class _Axis:
    def __init__(self, values: Sequence[float], begin: float, end: float, is_log: bool) -> None:
        self._is_log = is_log
        self._begin, self._end = begin, end
        self._low, self._high = self._scaled(min(values)), self._scaled(max(values))
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5
        if is_log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            factors = (1,) if len(powers) > 3 else (1, 2, 5)
            candidates = [factor * 10.0**power for power in powers for factor in factors]
        else:
            size = 10 ** math.floor(math.log10(self._high - self._low))
            step = next(s * size for s in (0.1, 0.2, 0.5, 1, 2) if (self._high - self._low) / (s * size) <= 6)
            candidates = [step * n for n in range(math.floor(self._low / step), math.ceil(self._high / step) + 1)]
            self._high = max(self._high, candidates[-1])
        slack = 1e-9 * (self._high - self._low)
        self.ticks = [c for c in candidates if self._low - slack <= self._scaled(c) <= self._high + slack]

    def place(self, value: float) -> float:
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_log else value


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
