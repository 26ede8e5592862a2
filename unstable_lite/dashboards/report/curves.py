"""Curves of the report: which charts there are, and each line as numbers and texts.

Owns titles, and the text of each point: the page's script draws, and neither computes nor rounds. Knows no markup.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from statistics import fmean
from typing import Any, NamedTuple

from unstable_lite.dashboards.league import FIXED, Result, name_of
from unstable_lite.dashboards.run_directory import Group, RunData
from unstable_lite.tracking.displayed_metrics import METRICS, TOPICS, Metric, is_share, metrics_of_env, named
from unstable_lite.tracking.evaluations import evaluation_group
from unstable_lite.tracking.intervals import percent, percent_range, points_interval, seeds_interval
from unstable_lite.tracking.result_rows import ResultRow, SeedsEvaluation, seeds_rows, side_by_side, with_games
from unstable_lite.types import BASE, policy_of, uid_of

OF_TURNS = re.compile(r"Format Success|Respone? Length|Response Length|Observation Length|Time per Turn")
IS_EDGE = re.compile(r" (low|high)$")
PARTS = 20
"""Parts of a run, for results that are rare."""

Band = tuple[float, float] | None
Line = dict[str, Any]
"""Label, number of the group, number of the run unless it is the mean of the group's seeds, and points."""


class Point(NamedTuple):
    step: int
    hours: float | None
    """Duration of the run by then, if it is known."""
    y: float
    low: float | None
    high: float | None
    text: str
    """Value, and in brackets its 95 % interval and sample size."""


def sections(runs: Sequence[RunData], curves: Collection[str]) -> list[dict[str, Any]]:
    """Return the groups of charts, given the names of all curves."""
    envs = [env for run in runs for key in ("train_envs", "eval_envs") for env in run.config.get(key, ())]
    env_ids = dict.fromkeys(env["env_id"] for env in envs)
    metrics = [(env_id, metric) for env_id in env_ids for metric in metrics_of_env(env_id)]
    metrics += [("", metric) for metric in METRICS.values()]
    engines = sorted(name for name in curves if re.match("inference/.*/tok_s$", name))
    metrics += [("", Metric(f"tokens a second, {name[10:-6]}", name, topic="speed")) for name in engines]
    policies, titled = dict.fromkeys(policy for run in runs for policy in run.policies), dict[str, list[Any]]()
    for policy in dict.fromkeys([*filter(None, policies), ""]):  # those of the run last
        of_one = [(env_id, metric.of(policy)) for env_id, metric in metrics]
        known = [(env_id, metric) for env_id, metric in of_one if metric.name in curves]
        has_envs = len({env_id for env_id, _ in known if env_id}) > 1
        charts: dict[str, list[dict[str, Any]]] = {topic: [] for topic in TOPICS}
        charts["play"] = [chart for chart in evaluation_charts(runs, policy) if chart["name"] in curves]
        for env_id, metric in known:
            title = metric.title or metric.label[:1].upper() + metric.label[1:]
            title += f", {env_id}" * bool(has_envs and env_id)
            charts[metric.topic].append({"name": metric.name, "title": named(policy, title), "explain": metric.meaning})
        of_run = {named(policy, TOPICS[topic]): of_topic for topic, of_topic in charts.items()}
        titled |= {title: shown for title, shown in of_run.items() if shown or "" in policies}
    titled[f"Every recorded curve ({len(curves)})"] = [{"name": name, "title": name} for name in sorted(curves)]
    return [{"title": title, "charts": shown} for title, shown in titled.items()]


def evaluation_charts(runs: Sequence[RunData], policy: str = "") -> list[dict[str, Any]]:
    """Return a chart for each env and opponent, in the order of the config, those of games while training last."""
    charts = []
    for of_runs in side_by_side([[row for row in run.rows if row.policy == policy] for run in runs]):
        known = [row for row in of_runs if row is not None]
        row, references = with_games(known), {row.reference for row in known}
        explain = "Games beside the training ones." if row.is_concurrent else "Games that are not trained on."
        chart: dict[str, Any] = {"name": _tag(row), "title": row.title, "explain": explain}
        if len(references) == 1:
            chart |= {"explain": f"{explain} Dashed: {row.reference_text}.", "reference": row.reference}
        charts.append(chart)
    return charts


def lines_by_name(groups: Sequence[Group]) -> dict[str, list[Line]]:
    """Return the lines of every metric that has values: of each run, and the mean of each group with several."""
    runs, lines = [run for group in groups for run in group.runs], defaultdict[str, list[Line]](list)
    for number, group in enumerate(groups):
        for run in group.runs:
            for name, points in _points_by_name([run]).items():
                lines[name].append({"label": run.label, "group": number, "run": runs.index(run), "points": points})
        for name, points in _points_by_name(group.runs).items() if len(group.runs) > 1 else ():
            lines[name].append({"label": group.label, "group": number, "points": points})
    return lines


def _points_by_name(runs: Sequence[RunData]) -> dict[str, list[Point]]:
    """Return the points of every metric with values, of one run or as means over several."""
    curves = {
        name: metric_points(runs[0], name) if len(runs) == 1 else _means(runs, name)
        for name in dict.fromkeys(name for run in runs for name in run.curves)
    }
    curves |= {_tag(row): evaluation_points(row, runs) for row in seeds_rows([run.rows for run in runs])}
    return {name: points for name, points in curves.items() if points}


def _tag(row: ResultRow) -> str:
    """Return the name of the metric that a result row shows."""
    group = evaluation_group(row.newest.label, row.env_id, row.opponent, row.policy)
    return f"{group} {'Points' if row.newest.is_share else 'Reward'}"


def _point(runs: Iterable[RunData], step: int, y: float, band: Band, shown: str, *details: str) -> Point:
    hours = [run.hours_at[step] for run in runs if step in run.hours_at]
    low, high = (None if band is None else float(f"{edge:.4g}") for edge in band or (0, 0))
    said = ", ".join(filter(None, details))
    text = f"{shown} ({said})" if said else shown
    return Point(step, fmean(hours) if hours else None, float(f"{y:.6g}"), low, high, text)


def evaluation_points(row: ResultRow, runs: Sequence[RunData]) -> list[Point]:
    """Return the points of one row of a run or of several seeds."""
    points = []
    for one in filter(lambda one: one.n, row.evaluations):
        band = one.interval if math.isfinite(one.interval[0]) else None
        seeds = f"{len(one.of_seeds)} seeds" if isinstance(one, SeedsEvaluation) else ""
        interval = "" if band is None else one.interval_text
        points.append(_point(runs, one.step, one.value, band, one.value_text, interval, f"n = {one.n:,}", seeds))
    return points


def _means(runs: Sequence[RunData], name: str) -> list[Point]:
    """Return the means over seeds, wherever at least two of them have a value."""
    by_step, points = defaultdict[int, list[float]](list), []
    for run in runs:
        for step, value in zip(run.steps, run.curves.get(name, ()), strict=False):
            if value is not None:
                by_step[step].append(value)
    for step, values in sorted(by_step.items()):
        if len(values) > 1:
            mean = fmean(values)
            is_flat = max(values) - min(values) <= 1e-9 * max(1, abs(mean))
            band = None if is_flat else seeds_interval(values, *([0.0, 1.0] if is_share(name) else []))
            points.append(_point(runs, step, mean, band, *_texts(name, mean, band), f"{len(values)} seeds"))
    return points


def metric_points(run: RunData, name: str) -> list[Point]:
    """Return a metric at each update that has it; a share of games or turns with its 95 % interval."""
    others = _count_of(name), re.sub("Points$", "Win Rate", name), f"{name} low", f"{name} high"
    columns = (run.curves.get(other, repeat(None)) for other in others)
    is_counted, points = is_share(name) and not IS_EDGE.search(name), []
    for step, y, n, won, low, high in zip(run.steps, run.curves.get(name, ()), *columns, strict=False):
        if y is None:
            continue
        band: Band = None
        if low is not None and high is not None:
            band = low, high
        elif n and is_counted:
            wins = round((y if won is None else won) * n)
            draws = round(2 * y * n) - 2 * wins
            band = points_interval(wins, draws, round(n) - wins - draws)
        points.append(_point([run], step, y, band, *_texts(name, y, band), f"n = {n:,.0f}" if n else ""))
    return points


def _count_of(name: str) -> str:
    """Return the metric that is the number of entries of a mean; "" if there is none."""
    group, _, metric = name.rpartition("/")
    if not re.match(r"(\w+/)?(collection|evaluation)-", group):
        return ""
    own, seat = re.match(r"(concurrent )?checkpoint ", metric), re.search(r"\(pid=\d+\)$", metric)
    if own:
        return f"{group}/{own[0]}n"
    if seat:
        return f"{group}/n {seat[0]}"
    of = " (turns)" if OF_TURNS.match(metric) else " (answered)" * metric.startswith("Time per Token")
    return f"{group}/n{of}"


def ladder_lines(run: RunData) -> Iterator[Line]:
    """Yield the ratings, μ ± 2σ, of each policy, the base and fixed opponents. They hold until they change.

    Each is drawn like a run of its own.
    """
    found = defaultdict[str, list[tuple[int, float, float]]](list)
    for policy in run.policies:
        names = (uid_of(policy, f"trueskill/current {name}") for name in ("mu", "sigma"))
        for step, mu, sigma in zip(run.steps, *(run.curves.get(name, ()) for name in names), strict=False):
            if mu is not None and sigma is not None:
                found[policy or "current policy"].append((step, mu, sigma))
    for line in run.lines("league"):
        for uid, (mu, sigma, games, *_) in line["models"].items():
            if games and (uid == BASE or uid.startswith(FIXED)):
                found[name_of(uid)].append((line["step"], mu, sigma))
    for place, (label, rows) in enumerate(found.items()):
        if run.steps and run.steps[-1] > rows[-1][0]:
            rows.append((run.steps[-1], *rows[-1][1:]))
        bands = [(step, mu, 2 * sigma) for step, mu, sigma in rows]
        points = [_point([run], at, mu, (mu - by, mu + by), f"{mu:.1f}", f"± {by:.1f}") for at, mu, by in bands]
        yield {"label": label, "group": place, "run": place, "points": points}


def meeting_lines(run: RunData) -> Iterator[Line]:
    """Yield the points of each policy against each other one, in the games of each part of the run.

    Of two policies it is the first by name.
    """
    size, before = math.ceil(run.num_updates / PARTS) or 1, dict[tuple[str, str], Result]()
    met = defaultdict[tuple[str, str], dict[int, Result]](dict)
    for line in run.lines("league"):
        part = min(size * math.ceil(line["step"] / size), run.num_updates)
        for one, other, *counts in line["matches"]:  # in the order of their uids, and so of their policies
            policies = policy_of(one), policy_of(other)
            if policies[0] != policies[1] and {*policies} <= {*run.policies}:
                now, then = Result(*counts), before.get((one, other), Result(0))
                known = met[policies].get(part, Result(0))
                met[policies][part] = Result(*(n + new - old for n, new, old in zip(known, now, then, strict=True)))
                before[one, other] = now
    for place, ((one, other), parts) in enumerate(met.items()):
        of_parts = ((part, of, of.interval) for part, of in parts.items() if of.n)
        points = [
            _point([run], part, of.points, band, *_texts("Points", of.points, band), f"n = {of.n:,}")
            for part, of, band in of_parts
        ]
        yield {"label": f"{one} against {other}", "group": place, "run": place, "points": points}


def _texts(name: str, value: float, band: Band) -> tuple[str, str]:
    """Return the text of the value and that of its interval."""
    if is_share(name):
        return percent(value), percent_range(*band) if band else ""
    return number(value), " to ".join(map(number, band or ()))


def number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"
