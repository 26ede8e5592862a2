"""Outputs of a study: a table in markdown, plots in SVG, and one HTML page with both. They need the JSON alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bench.plot import Chart, to_svg
from bench.study.reading import Study
from bench.study.statistics import supports_no_claim

COLUMNS = 3
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere;max-width:1440px;margin:0 auto;
padding:0 1rem;color:light-dark(#1a1a1a,#e6e6e6);background:light-dark(#fff,#16181b);color-scheme:light dark}
.charts{display:flex;flex-wrap:wrap;gap:.5rem}.charts svg{width:min(460px,100%);height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .6rem;border-bottom:1px solid light-dark(#ddd,#34373c);text-align:left;white-space:nowrap}
.note{border-left:4px solid #b45309;padding:.3rem .8rem;background:light-dark(#fff7ed,#2b2118)}
"""
METHOD = (
    "Interquartile means (IQM) with 95 % percentile bootstrap intervals over seeds. A difference is the interquartile "
    "mean of the differences on paired seeds. With few seeds these intervals are too narrow."
)

WIDE = 8
"""Ratio of the highest to the lowest dot from which an axis of the scatter plot is logarithmic."""

Content = Mapping[str, Any]
Table = list[list[str]]


def to_markdown(study: Study, content: Content, notes: Sequence[str]) -> str:
    """Return question, notes, and the two tables. `content`: what `write_results` returned."""
    method = _method(study, content)
    lines = [f"**{study.question}**", "", f"Primary measure, named before the runs: {study.primary}. {method}", ""]
    for note in notes:
        lines += [note, ""]
    for table in (_aggregates(study, content), _differences(content)):
        if len(table) > 1:
            head, *rows = [f"| {' | '.join(cell.replace('|', '∣') for cell in row)} |" for row in table]
            lines += [head, re.sub(r"[^|]+", " --- ", head), *rows, ""]
    return "\n".join(lines)


def to_plots(study: Study, content: Content) -> dict[str, str]:
    """Return SVG by the end of its file's name: all plots, and the one of two measures against each other."""
    plots = {".svg": to_svg([chart for _, charts in _sections(study, content) for chart in charts], COLUMNS)}
    if study.scatter is not None:
        plots["-scatter.svg"] = to_svg([_scatter(study, content, *study.scatter)])
    return plots


def to_html(study: Study, content: Content, notes: Sequence[str]) -> str:
    """Return the page: one file without scripts that loads nothing."""
    title = escape(study.name)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    text = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{escape(study.question)}</p>",
        f"<p>Primary measure, named before the runs: <strong>{escape(study.primary)}</strong>. "
        f"{escape(_method(study, content))}</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _html_table("aggregates", _aggregates(study, content)),
        "<h2>Differences</h2>",
        _html_table("differences", _differences(content)),
    ]
    for heading, charts in _sections(study, content):
        drawn = "".join(to_svg([chart]) for chart in charts)
        text.append(f'<h2>{escape(heading)}</h2><div class="charts">{drawn}</div>')
    text += ["<h2>Runs</h2>", _html_table("runs", _runs(study, content)), "</body></html>\n"]
    return "\n".join(text)


def note_of(study: Study, content: Content) -> list[str]:
    """Return the note that every output has if there are too few seeds."""
    return [note] if (note := supports_no_claim(study, _current(content))) else []


def _method(study: Study, content: Content) -> str:
    """Return what the tables have, and the mean differences of the primary measure."""
    rows = [row for row in content["differences"] if row["measure"] == study.primary and row.get("interval_of_mean")]
    means = [
        f"{row['arm']} {number(row['mean'])} ({' to '.join(map(number, row['interval_of_mean']))}; n = {row['n']})"
        for row in rows
    ]
    from_first = f" Mean differences of the primary measure from {study.arms[0].name}, with 95 % t intervals: "
    return METHOD + (f"{from_first}{', '.join(means)}." if means else "")


def _current(content: Content) -> list[Mapping[str, Any]]:
    """Return the runs that the aggregates cover."""
    covered = {(row["arm"], seed) for row in content["aggregates"] for seed in row["seeds"]}
    return [run for run in content["runs"] if (run["arm"], run["seed"]) in covered]


def _aggregates(study: Study, content: Content) -> Table:
    rows = sorted(content["aggregates"], key=lambda row: row["measure"] != study.primary)
    table = [["measure", "arm", "n", "mean", "IQM", "95 %"]]
    return table + [[_marked(study, row), row["arm"], str(row["n"]), *_numbers(row)] for row in rows]


def _differences(content: Content) -> Table:
    rows = content["differences"]
    table = [["measure", f"arm, minus {rows[0]['from'] if rows else ''}", "n", "mean", "IQM", "95 %", "paired seeds"]]
    for row in rows:
        seeds = ", ".join(map(str, row["seeds"]))
        table.append([row["measure"], row["arm"], str(row["n"]), *_numbers(row), seeds])
    return table


def _runs(study: Study, content: Content) -> Table:
    table = [["arm", "seed", *study.measures, "updates", "games", "seconds", "alarms", "run directory"]]
    for run in _current(content):
        values = [number(run["measures"].get(measure)) for measure in study.measures]
        rest = [str(run["updates"]), number(run["games"]), number(run["seconds"]), str(run["alarms"]), run["directory"]]
        table.append([run["arm"], str(run["seed"]), *values, *rest])
    return table


def _marked(study: Study, row: Mapping[str, Any]) -> str:
    return f"{row['measure']} (primary)" if row["measure"] == study.primary else str(row["measure"])


def _numbers(row: Mapping[str, Any]) -> list[str]:
    between = " – ".join(map(number, row["interval"])) if row["interval"] else "–"
    return [number(row["mean"]), number(row["iqm"]), between]


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _html_table(name: str, table: Table) -> str:
    head, *rows = table
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table id="{name}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _sections(study: Study, content: Content) -> Iterator[tuple[str, list[Chart]]]:
    """Yield heading and charts: two measures against each other, each measure's dots, and the curves of each arm."""
    runs, arms = _current(content), [arm.name for arm in study.arms]
    if study.scatter is not None:
        yield "One dot per run", [_scatter(study, content, *study.scatter)]
    dots = []
    for measure in sorted(study.measures, key=lambda name: name != study.primary):
        of_arms = [[run for run in runs if run["arm"] == arm] for arm in arms]
        lines = {
            arm: [(index + _shift(place, len(of_arm)), _value(run, measure)) for place, run in enumerate(of_arm)]
            for index, (arm, of_arm) in enumerate(zip(arms, of_arms, strict=True))
        }
        own: Any = {"marks": "dots", "has_legend": False, "x_names": arms, "log_x": False, "y_includes": ()}
        dots.append(Chart(title=_marked(study, {"measure": measure}), x_label="", y_label="", lines=lines, **own))
    yield "Measures, one dot per run", dots
    for series in dict.fromkeys(name for run in runs for name in run["curves"]):
        values = [value for run in runs for _, value in run["curves"].get(series, ())]
        charts = []
        for arm in arms:
            curves = [run["curves"].get(series, ()) for run in runs if run["arm"] == arm]
            points = [point for curve in curves for point in [*map(tuple, curve), (math.nan, math.nan)]]
            lines = {name: points if name == arm else [] for name in arms}  # each arm keeps its colour
            own = {"marks": "lines", "has_legend": False, "log_x": False, "y_includes": (min(values), max(values))}
            charts.append(Chart(title=arm, x_label="update", y_label=series, lines=lines, **own))
        yield series, charts


def _scatter(study: Study, content: Content, x: str, y: str) -> Chart:
    lines: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in study.arms}
    for run in _current(content):
        lines[run["arm"]].append((_value(run, x), _value(run, y)))
    axes = [[dot[axis] for dots in lines.values() for dot in dots if dot[axis] == dot[axis]] for axis in (0, 1)]
    log_x, log_y = (bool(axis) and min(axis) > 0 and max(axis) > WIDE * min(axis) for axis in axes)
    return Chart(title="", x_label=x, y_label=y, lines=lines, log_x=log_x, log_y=log_y, marks="dots", y_includes=())


def _value(run: Mapping[str, Any], measure: str) -> float:
    value = run["measures"].get(measure)
    return math.nan if value is None else float(value)


def _shift(index: int, count: int) -> float:
    """Return the place of a dot beside the middle of its arm, so that equal values do not hide each other."""
    return 0.4 * ((index + 0.5) / count - 0.5)
