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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import jinja2

from unstable_lite.config.games import against
from unstable_lite.dashboards.report.games import RunGames, policy_seats
from unstable_lite.dashboards.report.runs import RunData, groups_of
from unstable_lite.dashboards.standings import Result, Results, Standing, age, choose, find_strongest, name_of
from unstable_lite.tracking.intervals import mean_interval, paired_difference, points_interval, t_95

HERE = Path(__file__).parent
PAGE_CHARS = 400_000
"""Size of the games' JSON that is unpacked at once when one of them is opened."""
MAX_IN_MATRIX = 16
MAX_PRINTED = 24
"""Most models in a printed ladder."""
STEPS = re.compile(r"collection-(.+)/Steps (Played|Trained|Dropped)(?: \((.+) turns\))?")
"""Metrics of the fate of collected steps: env, fate, and class of game length."""


def render(runs: Sequence[RunData], games: Sequence[RunGames], plotly_js: str) -> bytes:
    script, style = (HERE / "page.js").read_text("utf-8"), (HERE / "page.css").read_text("utf-8")
    index, pages = _games_data(games)
    data = {
        "groups": [group.label for group in groups_of(runs)],
        "runs": [_run_data(run) for run in runs],
        "games": index,
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "percent": _percent,
        "number": _number,
        "count": "{:,}".format,
        "duration": _duration,
        "against": against,
        "name": name_of,
    }
    page = environment.get_template("page.html.jinja").render(
        runs=runs,
        games=list(zip(runs, games, strict=True)),
        groups=groups_of(runs),
        title=_title(runs),
        changes=list(_changes(runs)),
        steps=[(run, row) for run in runs for row in _steps(run)],
        evaluations=list(_evaluation_tables(runs)),
        ladders=[(run, _ladder(run, of_run)) for run, of_run in zip(runs, games, strict=True)],
        matrices=[(run, _matrix(run, of_run)) for run, of_run in zip(runs, games, strict=True)],
        max_in_matrix=MAX_IN_MATRIX,
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        script=script,
        style=style,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {_hash(script)} "
        f"{_hash(plotly_js)}",
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
        "evaluations": [{name: value for name, value in row.items() if name != "scores"} for row in run.lines("eval")],
        "ladder": {uid: rows for uid, rows in run.ladder_rows.items() if uid == "base" or uid.startswith("fixed-")},
        "cap": run.config.get("learner", {}).get("importance_weight_cap"),
    }


def _games_data(games: Sequence[RunGames]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Return an index with one short entry per game, and the games in parts."""
    index: list[dict[str, Any]] = []
    pages: list[list[Any]] = [[]]
    chars = 0
    for run, of_run in enumerate(games):
        for game in of_run.kept:
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
                    "players": players,
                    "policy": policy_seats(game),
                    "invalid": game["invalid_pids"],
                    "turns": len(game["turns"]),
                    "label": game["eval_label"] or "",
                    "page": len(pages) - 1,
                    "place": len(pages[-1]),
                }
            )
            whole = {name: game[name] for name in ("seed", "turns", "error", "seconds")}
            pages[-1].append(whole)
            chars += len(json.dumps(whole))
    return index, pages


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
    first: float
    first_interval: tuple[float, float]
    last: float
    last_interval: tuple[float, float]
    difference: tuple[float, float, float]
    """Difference with its 95 % interval: for one run from pairs of games with the same env seed; for several runs over
    the seeds."""
    games: tuple[int, int]
    """Number of games of the first and of the last evaluations."""
    updates: tuple[int, int]
    """Updates after which these were."""
    seeds: int
    spread: tuple[float, float] | None
    """Standard deviation over the seeds of the first and of the last values."""

    @property
    def verdict(self) -> str:
        _, low, high = self.difference
        return "better" if low > 0 else "worse" if high < 0 else "undecided"


def _changes(runs: Sequence[RunData]) -> Iterator[Change]:
    found: dict[tuple[int, str, str], list[dict[int, dict[str, Any]]]] = {}
    for run in runs:
        of_run: dict[tuple[int, str, str], dict[int, dict[str, Any]]] = {}
        for row in run.lines("eval"):
            if row["label"] != "concurrent" and row["n"]:
                of_run.setdefault((run.group, row["env_id"], row["opponent"]), {})[row["step"]] = row
        for key, by_update in of_run.items():
            if len(by_update) > 1:
                found.setdefault(key, []).append(by_update)
    for group, env_id, opponent in sorted(found):
        series = found[group, env_id, opponent]
        shared = set(series[0]).intersection(*series)
        if len(shared) < 2:
            continue
        updates = min(shared), max(shared)
        firsts, lasts = ([rows[update] for rows in series] for update in updates)
        is_points = firsts[0]["points"] is not None
        ends = [(_pooled_points if is_points else _pooled_reward)(rows) for rows in (firsts, lasts)]
        (first, low_1, high_1), (last, low_2, high_2) = ends
        name = "points" if is_points else "mean_reward"
        between = _t_half([after[name] - before[name] for before, after in zip(firsts, lasts, strict=True)])
        # Newcombe's (1998) hybrid of the two intervals, or the difference between seeds if that is larger.
        below = max(between, math.hypot(last - low_2, high_1 - first))
        above = max(between, math.hypot(high_2 - last, first - low_1))
        difference = (last - first, last - first - below, last - first + above)
        pairs = paired_difference(firsts[0].get("scores", ()), lasts[0].get("scores", ())) if len(series) == 1 else None
        if pairs is not None:
            difference = (pairs.mean, pairs.low, pairs.high)
        spread = tuple(stdev(row[name] for row in rows) for rows in (firsts, lasts)) if len(series) > 1 else None
        yield Change(
            group=group,
            env_id=env_id,
            opponent=opponent,
            is_points=is_points,
            first=first,
            first_interval=(low_1, high_1),
            last=last,
            last_interval=(low_2, high_2),
            difference=difference,
            games=(sum(row["n"] for row in firsts), sum(row["n"] for row in lasts)),
            updates=updates,
            seeds=len(series),
            spread=None if spread is None else (spread[0], spread[1]),
        )


def _t_half(differences: Sequence[float]) -> float:
    """Return half the 95 % t-interval of the mean gain over the seeds; 0 for one seed, which shows no variation."""
    k = len(differences)
    return t_95(k - 1) * stdev(differences) / math.sqrt(k) if k > 1 else 0.0


def _pooled_points(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    wins, draws, losses = (sum(row[name] for row in rows) for name in ("wins", "draws", "losses"))
    return (wins + draws / 2) / (wins + draws + losses), *points_interval(wins, draws, losses)


def _pooled_reward(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the mean of the runs, which count alike, and its interval; none with a run of a single game."""
    means = [row["mean_reward"] for row in rows]
    intervals = [
        (-math.inf, math.inf) if row["reward_std"] is None else mean_interval(mean, row["reward_std"], row["n"])
        for mean, row in zip(means, rows, strict=True)
    ]
    below, above = (
        math.hypot(*(edge - mean for edge, mean in zip(edges, means, strict=True))) / len(rows)
        for edges in zip(*intervals, strict=True)
    )
    return fmean(means), fmean(means) - below, fmean(means) + above


def _evaluation_tables(runs: Sequence[RunData]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield (env, opponent, rows), with a row for each evaluated checkpoint of each run."""
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for row in sorted(run.lines("eval"), key=lambda row: int(row["step"])):
            tables.setdefault((row["env_id"], row["opponent"]), []).append(row | {"run": run.label})
    for (env_id, opponent), rows in sorted(tables.items()):
        yield env_id, opponent, rows


def _ladder(run: RunData, games: RunGames) -> list[dict[str, Any]]:
    """Return the newest rating of each model that met another, best first, with its bar as shares of the widest.

    Outcomes of games against other models are counted in the games that were read. `matters`: whether a printed page
    shows the model.
    """
    ladder, against_others = run.league().ladder, run.league().results.games
    rated = {uid: rows[-1] for uid, rows in run.ladder_rows.items() if against_others[uid]}
    low = min((mu - 2 * sigma for _, mu, sigma, _ in rated.values()), default=0.0)
    high = max((mu + 2 * sigma for _, mu, sigma, _ in rated.values()), default=1.0)
    current = {standing.uid for standing in ladder if standing.is_current}
    strongest = find_strongest(ladder, against_others)
    matters = {standing.uid for standing in choose(ladder, against_others, MAX_PRINTED)}
    return [
        {
            "uid": uid,
            "role": ", ".join(["current"] * (uid in current) + ["strongest"] * (uid == strongest)),
            "matters": uid in matters,
            "mu": mu,
            "sigma": sigma,
            "games": num_games,
            "results": games.outcomes.get(uid, Counter[str]()),
            "from": (mu - 2 * sigma - low) / (high - low),
            "to": (mu + 2 * sigma - low) / (high - low),
        }
        for uid, (_, mu, sigma, num_games) in sorted(rated.items(), key=lambda item: -item[1][1])
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


def _title(runs: Sequence[RunData]) -> str:
    envs = dict.fromkeys(env["env_id"] for run in runs for env in run.config["train_envs"])
    models = dict.fromkeys(str(run.config["model_name"]) for run in runs)
    return f"{', '.join(models)} on {', '.join(envs) or 'no env'}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float) -> str:
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
