"""Write the page: texts and tables by the template, large data compressed.

Owns the page's Content-Security-Policy: only the page's two scripts run, and nothing is loaded. Knows no files of a
run.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import jinja2

from unstable_lite.config.games import against
from unstable_lite.dashboards.league import Result, Results, Standing, age, choose, find_strongest, name_of
from unstable_lite.dashboards.report.games import RunGames, policy_seats
from unstable_lite.dashboards.run_directory import RunData, groups_of
from unstable_lite.tracking.displayed_metrics import METRICS, duration
from unstable_lite.tracking.intervals import mean_interval, paired_difference, points_interval, student

HERE = Path(__file__).parent
PAGE_CHARS = 400_000
"""Size of the games' JSON that is unpacked at once when one of them is opened."""
OF_TURNS = re.compile(r"Format Success|Respone? Length|Response Length|Observation Length|Time per Turn")
SHARE = re.compile(
    r"(Points|Win Rate|Loss Rate|Draw Rate|Format Success Rate.*|Invalid Rate|share|clipped)( \(.*\))?$"
    r"|^(Draw|Ended by|Truncated|Pct\.)"
)
"""Metrics that are shares of games or turns; not the edges of their intervals."""
MAX_IN_MATRIX = 16
MAX_PRINTED = 24
"""Most models in a printed ladder."""
STEPS = re.compile(r"collection-(.+)/Steps (Played|Trained|Dropped)(?: \((.+) turns\))?")
"""Metrics of the fate of collected steps: env, fate, and class of game length."""


def render(runs: Sequence[RunData], games: Sequence[RunGames], plotly_js: str) -> bytes:
    script, style = (HERE / "page.js").read_text("utf-8"), (HERE / "page.css").read_text("utf-8")
    index, pages = _games_data(games)
    groups, read = groups_of(runs), list(zip(runs, games, strict=True))
    envs = dict.fromkeys(env["env_id"] for run in runs for env in run.config["train_envs"])
    models = dict.fromkeys(str(run.config["model_name"]) for run in runs)
    data = {
        "groups": [group.label for group in groups],
        "runs": [_run_data(run) for run in runs],
        "games": index,
        "metrics": [metric._asdict() for metric in METRICS.values()],
        "student": [None, None, *map(student, range(1, len(runs)))],
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": "{:.3g}".format, "count": "{:,}".format, "against": against, "name": name_of}
    environment.filters |= {"percent": lambda share: f"{100 * share:.1f} %", "duration": duration}
    sources = f"style-src 'unsafe-inline'; img-src data:; script-src {_hash(script)} {_hash(plotly_js)}"
    page = environment.get_template("page.html.jinja").render(
        runs=runs,
        games=read,
        groups=groups,
        title=f"{', '.join(models)} on {', '.join(envs) or 'no env'}",
        changes=list(_changes(runs)),
        steps=[(run, row) for run in runs for row in _steps(run)],
        evaluations=_evaluation_tables(runs),
        ladders=[(run, _ladder(run, of_run)) for run, of_run in read],
        matrices=[(run, _matrix(run, of_run)) for run, of_run in read],
        max_in_matrix=MAX_IN_MATRIX,
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        script=script,
        style=style,
        policy=f"default-src 'none'; {sources}",
        blobs={"plotly": _blob(plotly_js), "data": _blob(json.dumps(data))}
        | {f"games-{number}": _blob(json.dumps(page)) for number, page in enumerate(pages)},
    )
    # Names of files and models may contain characters without UTF-8.
    return page.encode("utf-8", "replace")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _blob(text: str) -> str:
    """Compress for DecompressionStream, in an alphabet without characters that HTML interprets."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _run_data(run: RunData) -> dict[str, Any]:
    return {
        "label": run.label,
        "group": run.group,
        "steps": run.steps,
        "hours": run.hours,
        "series": run.curves,
        "countOf": {name: _count_of(name) for name in run.curves},
        "bands": dict(_bands(run)),
        "evaluations": [
            {name: value for name, value in row.items() if name not in ("scores", "rewards")}
            for row in run.lines("eval")
        ],
        "ladder": {uid: rows for uid, rows in run.ladder_rows.items() if uid == "base" or uid.startswith("fixed-")},
        "cap": run.config.get("learner", {}).get("importance_weight_cap"),
    }


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


def _bands(run: RunData) -> Iterator[tuple[str, list[tuple[float, float] | None]]]:
    """Yield each metric that is a share of games or turns, with its 95 % interval at each update."""
    for name, values in run.curves.items():
        counts = run.curves.get(_count_of(name) or "")
        if counts is None or not SHARE.search(name.rpartition("/")[2]):
            continue
        won = run.curves.get(re.sub("Points$", "Win Rate", name), values)
        unknown = [None] * len(values)
        lows, highs = run.curves.get(f"{name} low", unknown), run.curves.get(f"{name} high", unknown)
        bands: list[tuple[float, float] | None] = []
        for share, n, win, low, high in zip(values, counts, won, lows, highs, strict=True):
            if low is not None and high is not None:
                bands.append((low, high))
            elif share is None or not n or win is None:
                bands.append(None)
            else:
                wins, draws = round(win * n), round(2 * (share - win) * n)
                bands.append(points_interval(wins, draws, round(n) - wins - draws))
        yield name, bands


def _games_data(games: Sequence[RunGames]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Return an index with one short entry per game, and the games in parts."""
    index: list[dict[str, Any]] = []
    pages: list[list[Any]] = [[]]
    chars = 0
    for run, game in ((run, game) for run, of_run in enumerate(games) for game in of_run.kept):
        if chars > PAGE_CHARS:
            pages.append([])
            chars = 0
        players = [
            {"pid": agent["pid"], "model": agent["model"]}
            | {name: game[f"{name}s"].get(str(agent["pid"])) for name in ("reward", "outcome")}
            for agent in game["agents"]
        ]
        index.append(
            {
                "run": run,
                "number": game["game_idx"],
                "kind": game["kind"],
                "env": game["env_id"],
                "end": game["end"],
                "reason": game.get("reason", ""),
                "players": players,
                "policy": policy_seats(game),
                "invalid": game["invalid_pids"],
                "turns": len(game["turns"]),
                "label": game["eval_label"] or "",
                "part": len(pages) - 1,
                "place": len(pages[-1]),
            }
        )
        whole = {name: game[name] for name in ("seed", "turns", "error", "seconds")}
        whole["branch_turn"] = game.get("branch_turn", 0)
        pages[-1].append(whole)
        chars += len(json.dumps(whole))
    return index, pages


class Pooled(NamedTuple):
    """Points, or mean reward, of one group's runs at one update, with a 95 % interval."""

    value: float
    low: float
    high: float
    games: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of one group in one env against one opponent.

    It is measured between the first and the last update at which all of its seeds were evaluated.
    """

    group: int
    env_id: str
    opponent: str
    is_points: bool
    """Whether the values are points; else they are mean rewards, in single-player envs."""
    updates: tuple[int, int]
    first: Pooled
    last: Pooled
    difference: tuple[float, float, float]
    """Difference with its 95 % interval: for one run from pairs of games with the same env seed; for several runs over
    the seeds."""
    seeds: int

    @property
    def verdict(self) -> str:
        _, low, high = self.difference
        return "better" if low > 0 else "worse" if high < 0 else "undecided"


def _changes(runs: Sequence[RunData]) -> Iterator[Change]:
    """Yield a change for each group, env and opponent with evaluations at two updates that all of its seeds share."""
    found: dict[tuple[int, str, str], list[dict[int, dict[str, Any]]]] = defaultdict(list)
    for run in runs:
        of_run: dict[tuple[int, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
        for row in run.evaluations():
            if row["n"]:
                of_run[run.group, row["env_id"], row["opponent"]][row["step"]] = row
        for key, by_update in of_run.items():
            if len(by_update) > 1:
                found[key].append(by_update)
    for (group, env_id, opponent), seeds in sorted(found.items(), key=lambda item: item[0]):
        shared = set(seeds[0]).intersection(*seeds)
        if len(shared) > 1:
            updates = min(shared), max(shared)
            firsts, lasts = ([rows[update] for rows in seeds] for update in updates)
            yield Change(
                group=group,
                env_id=env_id,
                opponent=opponent,
                is_points=firsts[0]["points"] is not None,
                updates=updates,
                first=_pooled(firsts),
                last=_pooled(lasts),
                difference=_difference(firsts, lasts),
                seeds=len(seeds),
            )


def _pooled(rows: Sequence[dict[str, Any]]) -> Pooled:
    """Pool one evaluation of each run, whose results count alike; the interval of several runs is over their means."""
    name, games = _value_name(rows), sum(row["n"] for row in rows)
    means = [row[name] for row in rows]
    if len(rows) > 1:
        low, high = mean_interval(fmean(means), stdev(means), len(means))
        if name == "points":
            low, high = max(low, 0.0), min(high, 1.0)
    else:  # a single game has no interval
        low, high = (-math.inf, math.inf) if None in rows[0]["interval"] else rows[0]["interval"]
    return Pooled(fmean(means), low, high, games)


def _value_name(rows: Sequence[dict[str, Any]]) -> str:
    return "mean_reward" if rows[0]["points"] is None else "points"


def _difference(firsts: Sequence[dict[str, Any]], lasts: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the difference with its interval.

    Of one run that is the interval of the pairs of games with the same env seed, or without pairs Newcombe's (1998)
    hybrid of the two intervals. Of several runs it is over the seeds' gains.
    """
    first, last, name = _pooled(firsts), _pooled(lasts), _value_name(firsts)
    gain, most = last.value - first.value, 1.0 if name == "points" else math.inf
    if len(firsts) > 1:
        gains = [after[name] - before[name] for before, after in zip(firsts, lasts, strict=True)]
        low, high = mean_interval(gain, stdev(gains), len(gains))
    elif pairs := paired_difference(firsts[0].get("scores", ()), lasts[0].get("scores", ())):
        gain, low, high = pairs.mean, pairs.low, pairs.high
    else:
        low = gain - math.hypot(last.value - last.low, first.high - first.value)
        high = gain + math.hypot(last.high - last.value, first.value - first.low)
    return gain, max(low, -most), min(high, most)


def _evaluation_tables(runs: Sequence[RunData]) -> list[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """Return, for each env and opponent, a row for each evaluated checkpoint of each run."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        for row in sorted(run.lines("eval"), key=lambda row: int(row["step"])):
            tables[row["env_id"], row["opponent"]].append(row | {"run": run.label})
    return sorted(tables.items(), key=lambda item: item[0])


def _ladder(run: RunData, games: RunGames) -> list[dict[str, Any]]:
    """Return the newest rating of each model that met another, best first, with its bar as shares of the widest.

    Outcomes of games against other models are counted in the games that were read. `matters`: whether a printed page
    shows the model.
    """
    ladder, met = run.league().ladder, run.league().results.games
    rated = [standing for standing in ladder if met[standing.uid]]
    low = min((one.mu - 2 * one.sigma for one in rated), default=0.0)
    high = max((one.mu + 2 * one.sigma for one in rated), default=1.0)
    strongest, matters = find_strongest(rated, met), choose(ladder, met, MAX_PRINTED)
    return [
        one._asdict()
        | {
            "role": ", ".join(["current"] * one.is_current + ["strongest"] * (one.uid == strongest)),
            "matters": one in matters,
            "results": games.outcomes.get(one.uid, Counter[str]()),
            "from": (one.mu - 2 * one.sigma - low) / (high - low),
            "to": (one.mu + 2 * one.sigma - low) / (high - low),
        }
        for one in rated
    ]


def _matrix(run: RunData, games: RunGames) -> tuple[list[str], list[tuple[str, list[Result | None]]]]:
    """Return the names of the columns, and rows with the results of the row's model against the columns'.

    There are at most `MAX_IN_MATRIX` models, those that matter by age. Columns are the models that met several others,
    so that a league of many checkpoints and one opponent is one column. Without games the run's league log is taken.
    """
    results = Results()
    for (one, other), counts in games.results.items():
        results.set(one, other, Result(counts.total(), counts["win"], counts["draw"], counts["loss"]))
    if not games.results:
        results = run.league().results
    known = {standing.uid: standing for standing in run.league().ladder}
    met = [known.get(uid, Standing(uid, 0.0, 0.0, 0)) for uid in sorted(results.games, key=age)]
    names = [standing.uid for standing in choose(met, results.games, MAX_IN_MATRIX)]
    cells = {name: {other: results.of(name, other) for other in names if other != name} for name in names}
    columns = [name for name in names if sum(cell is not None for cell in cells[name].values()) > 1] or names
    rows = [(name, [cells[name].get(column) for column in columns]) for name in names]
    return columns, [(name, row) for name, row in rows if any(cell is not None for cell in row)]


def _steps(run: RunData) -> list[tuple[str, str, dict[str, int]]]:
    """Return (env, class of game length, number of steps by fate); an env's sum comes first."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for name, value in run.newest.items():
        if match := STEPS.fullmatch(name):
            rows.setdefault((match[1], match[3] or "any"), {})[match[2]] = int(value)
    by_length = sorted(rows, key=lambda row: (row[0], int("0" + re.split(r"\D", row[1])[0])))
    return [(*row, rows[row]) for row in by_length]
