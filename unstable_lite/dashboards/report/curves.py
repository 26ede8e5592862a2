"""Curves of the report: which charts there are, and each line as numbers and texts.

Owns titles, and the text of each point: the page's script draws, and neither computes nor rounds. Knows no markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from statistics import fmean
from typing import Any, NamedTuple

from unstable_lite.dashboards.league import FIXED, name_of
from unstable_lite.dashboards.run_directory import RunData
from unstable_lite.tracking.displayed_metrics import METRICS, is_share
from unstable_lite.tracking.evaluations import Evaluation, evaluation_group
from unstable_lite.tracking.intervals import percent, percent_range, points_interval, seeds_interval
from unstable_lite.tracking.result_rows import ResultRow, SeedsEvaluation, side_by_side
from unstable_lite.types import BASE

OF_TURNS = re.compile(r"Format Success|Respone? Length|Response Length|Observation Length|Time per Turn")
IS_EDGE = re.compile(r" (low|high)$")
OF_GAMES = (
    ("Points", "Points in training games", "Against every opponent, itself included: against itself it is a half."),
    ("reward", "Reward in training games", "Of the policy's seats, over the newest 512."),
)
OF_ANSWERS = (
    ("Ended by own invalid move", "Lost by an own invalid move", "Share of games."),
    ("Format Success Rate - correct_answer_format", "Answers in the right place", "Share of turns."),
    ("Response Length (token)", "Tokens of an answer", ""),
    ("Game Length", "Turns of a game", ""),
)
"""Metrics of an env, each with its title and its meaning."""

Band = tuple[float, float] | None


class Point(NamedTuple):
    y: float
    band: Band
    text: str
    """Value, and in brackets its 95 % interval and sample size."""


def sections(runs: Sequence[RunData], rows: Sequence[Sequence[ResultRow]]) -> list[dict[str, Any]]:
    """Return the groups of charts. rows: result rows of each group of runs."""
    envs = {name.partition("/")[0]: "" for run in runs for name in run.curves if name.startswith("collection-")}
    envs = {env: f", {env[11:]}" if len(envs) > 1 else "" for env in envs}
    exact = sorted({name for run in runs for name in run.curves if re.match("exploitability(_legal)?/", name)})
    engines = sorted({name for run in runs for name in run.curves if re.match("inference/.*/tok_s$", name)})

    def of_envs(metrics: Iterable[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
        return (_chart(f"{env}/{name}", title + of, why) for env, of in envs.items() for name, title, why in metrics)

    def of_topic(topic: str) -> Iterator[dict[str, Any]]:
        shown = (metric for metric in METRICS.values() if metric.topic == topic)
        return (_chart(one.name, one.label[:1].upper() + one.label[1:], one.meaning) for one in shown)

    groups = (
        ("Does it play better?", [*evaluation_charts(runs, rows), *of_envs(OF_GAMES), *map(_exact_chart, exact)]),
        ("Is it healthy?", [*of_envs(OF_ANSWERS), *of_topic("health")]),
        (
            "How fast is it?",
            [*of_topic("speed"), *(_chart(name, f"Tokens a second, {name[10:-6]}") for name in engines)],
        ),
    )
    known = {name for run in runs for name, values in run.curves.items() if values.count(None) < len(values)}
    return [
        {"title": title, "charts": [chart for chart in charts if chart.get("runs") or chart["name"] in known]}
        for title, charts in groups
    ]


def _chart(name: str, title: str, explain: str = "") -> dict[str, Any]:
    return {"name": name, "title": title, "explain": explain, "share": is_share(name)}


def _exact_chart(name: str) -> dict[str, Any]:
    kind, _, env_id = name.partition("/")
    of, condition = (" of legal answers", ", if every answer were legal") if kind.endswith("legal") else ("", "")
    explain = f"A best response wins this much a game, exact, in its units{condition}. 0 is an equilibrium."
    return _chart(name, f"Exploitability{of}, {env_id}", explain)


def evaluation_charts(runs: Sequence[RunData], rows: Sequence[Sequence[ResultRow]]) -> list[dict[str, Any]]:
    """Return a chart for each env and opponent, in the order of the config, those of games while training last."""
    by_group = {_any(line).key: line for line in side_by_side(rows)}
    members = [[run for run in runs if run.group == group] for group in range(len(rows))]
    charts = []
    for of_runs in side_by_side([run.rows for run in runs]):
        row = _any(of_runs)
        is_one = len({one.reference for one in of_runs if one is not None}) == 1
        tag = f"{evaluation_group(row.newest.label, *row.key[1:])} {'Points' if row.newest.is_share else 'Reward'}"
        games = "Evaluation games beside the training ones" if row.is_concurrent else "Games that are not trained on"
        of_groups = by_group.get(row.key, [None] * len(rows))
        charts.append(
            _chart(tag, row.title, f"{games}. Dashed: {row.reference_text}." if is_one else f"{games}.")
            | {"share": row.newest.is_share, "reference": row.reference if is_one else None}
            | {"runs": [_evaluations(one, [run]) for one, run in zip(of_runs, runs, strict=True)]}
            | {"groups": [_evaluations(one, of) for one, of in zip(of_groups, members, strict=True)]}
        )
    return charts


def _any(line: Sequence[ResultRow | None]) -> ResultRow:
    return next(row for row in line if row is not None)


def _evaluations(row: ResultRow | None, runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Return the line of one row of a run or of several seeds, if there is one."""
    if row is None:
        return None
    evaluations = row.evaluations
    steps = [one.step for one in evaluations]
    bands = (one.interval if math.isfinite(one.interval[0]) else None for one in evaluations)
    points = [Point(one.value, band, _result(one)) for one, band in zip(evaluations, bands, strict=True)]
    return {"steps": steps, "hours": _hours(runs, steps), **_columns(points)}


def _result(one: Evaluation) -> str:
    seeds = f", {len(one.of_seeds)} seeds" if isinstance(one, SeedsEvaluation) else ""
    interval = "" if one.interval_text == "–" else f"{one.interval_text}, "
    return f"{one.value_text} ({interval}n = {one.n:,}{seeds})"


def run_data(run: RunData) -> dict[str, Any]:
    return {
        "label": run.label,
        "group": run.group,
        "steps": run.steps,
        "hours": _hours([run], run.steps),
        "curves": {name: _columns(metric_points(run, name)) for name in run.curves},
        "ladder": list(_ladder_lines(run)),
        "cap": run.config.get("learner", {}).get("importance_weight_cap"),
    }


def group_data(label: str, runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the means over a group's seeds, wherever at least two of them have a value."""
    steps = sorted({step for run in runs for step in run.steps}) if len(runs) > 1 else []
    curves = {}
    for name in dict.fromkeys(name for run in runs for name in run.curves) if steps else ():
        of_runs = [dict(zip(run.steps, run.curves.get(name, ()), strict=False)) for run in runs]
        found = ([y for of_run in of_runs if (y := of_run.get(step)) is not None] for step in steps)
        curves[name] = _columns([_mean(values, is_share(name)) if len(values) > 1 else None for values in found])
    return {"label": label, "steps": steps, "hours": _hours(runs, steps), "curves": curves}


def _mean(values: Sequence[float], is_share: bool) -> Point:
    mean, least, most = fmean(values), min(values), max(values)
    band = seeds_interval(values, *(0.0, 1.0) if is_share else ()) if most - least > 1e-9 * max(1, abs(mean)) else None
    return Point(mean, band, _text(mean, band, is_share, f"{len(values)} seeds"))


def _hours(runs: Sequence[RunData], steps: Sequence[int]) -> list[float | None]:
    """Return the mean duration of the runs at each of `steps`; None if it is not known."""
    known = ([run.hours_at[step] for run in runs if step in run.hours_at] for step in steps)
    return [fmean(hours) if hours else None for hours in known]


def metric_points(run: RunData, name: str) -> list[Point | None]:
    """Return a metric at each update; a share of games or turns with its 95 % interval."""
    values = run.curves[name]
    counts = run.curves.get(_count_of(name) or "", repeat(None))
    return [
        None if y is None else Point(y, band, _text(y, band, is_share(name), f"n = {n:,.0f}" if n else ""))
        for y, n, band in zip(values, counts, _bands(run, name), strict=False)
    ]


def _bands(run: RunData, name: str) -> Iterator[Band]:
    values, counts = run.curves[name], run.curves.get(_count_of(name) or "")
    if counts is None or not is_share(name) or IS_EDGE.search(name):
        yield from repeat(None, len(values))
        return
    won = run.curves.get(re.sub("Points$", "Win Rate", name), values)
    lows, highs = (run.curves.get(f"{name} {edge}", repeat(None)) for edge in ("low", "high"))
    for share, n, win, low, high in zip(values, counts, won, lows, highs, strict=False):
        if low is not None and high is not None:
            yield low, high
        elif share is None or not n or win is None:
            yield None
        else:
            wins, draws = round(win * n), round(2 * (share - win) * n)
            yield points_interval(wins, draws, round(n) - wins - draws)


def _count_of(name: str) -> str | None:
    """Return the metric that is the number of entries of a mean."""
    group, _, metric = name.rpartition("/")
    if not group.startswith(("collection-", "evaluation-")):
        return None
    own, seat = re.match(r"(concurrent )?checkpoint ", metric), re.search(r"\(pid=\d+\)$", metric)
    if own:
        return f"{group}/{own[0]}n"
    if seat:
        return f"{group}/n {seat[0]}"
    of = " (turns)" if OF_TURNS.match(metric) else " (answered)" * metric.startswith("Time per Token")
    return f"{group}/n{of}"


def _ladder_lines(run: RunData) -> Iterator[dict[str, Any]]:
    """Yield the ratings, μ ± 2σ, of the policy, the base and fixed opponents. They hold until they change."""
    mus, sigmas = (run.curves.get(f"trueskill/current {name}", ()) for name in ("mu", "sigma"))
    rated = zip(run.steps, mus, sigmas, strict=False)
    policy = [(step, mu, sigma) for step, mu, sigma in rated if mu is not None and sigma is not None]
    lines: dict[str, Sequence[Sequence[Any]]] = {"current policy": policy}
    lines |= {name_of(uid): rows for uid, rows in run.ladder_rows.items() if uid == BASE or uid.startswith(FIXED)}
    for label, changes in lines.items():
        rows = [(step, mu, sigma) for step, mu, sigma, *_ in changes]
        if rows and run.steps and run.steps[-1] > rows[-1][0]:
            rows.append((run.steps[-1], *rows[-1][1:]))
        points = [Point(mu, (mu - 2 * sd, mu + 2 * sd), f"{mu:.1f} (± {2 * sd:.1f})") for _, mu, sd in rows]
        if steps := [step for step, *_ in rows]:
            yield {"label": label, "steps": steps, "hours": _hours([run], steps), **_columns(points)}


def _columns(points: Sequence[Point | None]) -> dict[str, list[Any]]:
    """Return the points by part; low and high only if any point has them."""
    columns: dict[str, list[Any]] = {
        "y": [None if point is None else float(f"{point.y:.6g}") for point in points],
        "text": [None if point is None else point.text for point in points],
    }
    if any(point is not None and point.band is not None for point in points):
        for edge, name in enumerate(("low", "high")):
            bands = (point.band if point is not None else None for point in points)
            columns[name] = [None if band is None else float(f"{band[edge]:.4g}") for band in bands]
    return columns


def _text(value: float, band: Band, is_share: bool, sample: str) -> str:
    shown, interval = percent(value) if is_share else number(value), ""
    if band is not None:
        interval = percent_range(*band) if is_share else " to ".join(map(number, band))
    details = ", ".join(filter(None, (interval, sample)))
    return f"{shown} ({details})" if details else shown


def number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"
