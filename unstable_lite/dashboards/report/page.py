"""Report of runs as one HTML file: texts and tables by the template, large data compressed.

The template's Content-Security-Policy lets only the page's two scripts run, and nothing is loaded.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from unstable_lite.config.games import against
from unstable_lite.dashboards.league import League, Result, about, age, choose, find_strongest, name_of
from unstable_lite.dashboards.report.curves import ladder_lines, lines_by_name, meeting_lines, sections
from unstable_lite.dashboards.report.games import RunGames, policy_seats, read_games
from unstable_lite.dashboards.run_directory import Group, RunData, read_groups
from unstable_lite.dashboards.terminal import next_commands, upcoming
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced, understood
from unstable_lite.models.local_tokenizer import find_tokenizer
from unstable_lite.tracking.displayed_metrics import duration, is_share, spike_texts
from unstable_lite.tracking.intervals import percent
from unstable_lite.tracking.result_rows import ResultRow, seeds_rows, side_by_side, to_markdown, with_games

HERE = Path(__file__).parent
PAGE_CHARS = 400_000
"""Size of the games' JSON that is unpacked at once when one of them is opened."""
INDEXED = ("game_idx", "kind", "env_id", "end", "reason", "invalid_pids", "eval_label")
"""Fields of a game by which the list shows and filters games."""
MAX_IN_MATRIX = 16


class Written(NamedTuple):
    path: Path
    size_bytes: int
    games: int
    """Number of games of which the page has every turn."""
    games_read: int


def write_report(directories: Sequence[Path], output: Path, max_games: int = 2000) -> Written:
    """Write the page of one run, or of several side by side.

    max_games: most transcripts per run of training games, of evaluation games and of void games, evenly spread over
    the run. Raises UnstableError if a directory is not a run's or cannot be read, or if the extra `report` is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UnstableError("a report needs plotly: pip install 'unstable-lite[report]'") from None
    groups, games = read_groups(directories), []
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        with understood(run.directory):
            tokenizer = find_tokenizer(str(run.config["model_name"]))
            games.append(read_games(run.directory, tokenizer, max_games, run.config))
    directories_read = ", ".join(str(run.directory) for run in runs)
    try:
        with understood(directories_read):
            page = render(groups, games, get_plotlyjs())
    except jinja2.UndefinedError as error:  # a config without a key that every run writes
        raise UnstableError(f"{directories_read}: its files are not as a run writes them ({error})") from error
    with replaced(output) as partial:
        partial.write_bytes(page)
    num_kept, num_read = sum(len(of_run.kept) for of_run in games), sum(of_run.num_read for of_run in games)
    return Written(path=output, size_bytes=len(page), games=num_kept, games_read=num_read)


def render(groups: Sequence[Group], games: Sequence[RunGames], plotly_js: str) -> bytes:
    script, style = (HERE / "page.js").read_text("utf-8"), (HERE / "page.css").read_text("utf-8")
    index, pages = _games_data(games)
    runs = [run for group in groups for run in group.runs]
    rows = [seeds_rows([run.rows for run in group.runs]) for group in groups]
    envs = dict.fromkeys(env["env_id"] for run in runs for env in run.config["train_envs"])
    models = dict.fromkeys(str(run.config["model_name"]) for run in runs)
    page = _template().render(
        runs=runs,
        games=list(zip(runs, games, strict=True)),
        groups=groups,
        title=f"{', '.join(models)} on {', '.join(envs) or 'no env'}",
        tab=_tab(runs, rows),
        results=side_by_side(rows),
        markdown=to_markdown({group.label: row for group, row in zip(groups, rows, strict=True)}),
        upcoming="; ".join(upcoming(run) for run in runs if len(runs) == 1 and run.is_up),
        steps=next_commands(runs[0].directory, runs[0].rows, runs[0].num_updates >= runs[0].learning_steps),
        evaluations=side_by_side([run.rows for run in runs]),
        max_in_matrix=MAX_IN_MATRIX,
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        script=script,
        style=style,
        hashes=f"{_hash(script)} {_hash(plotly_js)}",
        blobs={"plotly": _blob(plotly_js), "data": _blob(json.dumps(_data(groups, index)))}
        | {f"games-{number}": _blob(json.dumps(page)) for number, page in enumerate(pages)},
    )
    # Names of files and models may contain characters without UTF-8.
    return page.encode("utf-8", "replace")


def _data(groups: Sequence[Group], index: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of the page's script. index: of the games."""
    runs, curves = [run for group in groups for run in group.runs], lines_by_name(groups)
    ratings = {f"Ratings over time, {run.label}": [*ladder_lines(run)] for run in runs}
    meetings = {f"Which policy beats which, {run.label}": [*meeting_lines(run)] for run in runs}
    titles = dict.fromkeys(ratings, "μ ± 2σ.") | dict.fromkeys(meetings, "Points in all games between them.")
    ladders = {title: lines for title, lines in {**ratings, **meetings}.items() if lines}
    return {
        "groups": [group.label for group in groups],
        "runs": [
            {"label": run.label, "cap": run.config.get("learner", {}).get("importance_weight_cap")} for run in runs
        ],
        "sections": sections(runs, curves),
        "ladders": [{"name": title, "title": title, "explain": titles[title], "wide": True} for title in ladders],
        "curves": curves | ladders,
        "metrics": {name: is_share(name) for name in curves} | dict.fromkeys(meetings, True),
        "games": index,
    }


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    functions = name_of, percent, about, find_strongest, duration, spike_texts, with_games, state_of, matrix_of
    environment.filters |= {function.__name__: function for function in functions}
    environment.filters |= {"count": "{:,}".format, "sentence": lambda text: text and f"{text[0].upper()}{text[1:]}."}
    return environment.get_template("page.html.jinja")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _blob(text: str) -> str:
    """Compress for DecompressionStream, in an alphabet without characters that HTML interprets."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


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
        entry = {name: game.get(name) for name in INDEXED}
        entry |= {"players": players, "policy": policy_seats(game), "turns": len(game["turns"])}
        index.append(entry | {"run": run, "part": len(pages) - 1, "place": len(pages[-1])})
        whole = {name: game.get(name) for name in ("seed", "turns", "error", "seconds", "branch_turn")}
        pages[-1].append(whole)
        chars += len(json.dumps(whole))
    return index, pages


def _tab(runs: Sequence[RunData], rows: Sequence[Sequence[ResultRow]]) -> str:
    """Return the title of the browser's tab: run, state, headline."""
    results = [f"{row.newest.value_text}{against(row.opponent)}" for of_group in rows for row in of_group[:1]]
    name = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    return ", ".join([f"{name}: {' and '.join(dict.fromkeys(run.state for run in runs))}", *results[: len(runs) == 1]])


def state_of(run: RunData) -> str:
    """Return the state, the update, and when the run wrote last."""
    text = f"{run.state}{',' if run.is_up else ' at'} update {run.num_updates} of {run.learning_steps}"
    if (written := run.live.get("time")) is None:
        return text
    when, now = (datetime.datetime.fromtimestamp(at).astimezone() for at in (written, time.time()))
    return f"{text}, written {when:{'%H:%M' if when.date() == now.date() else '%Y-%m-%d %H:%M'}}"


def matrix_of(league: League) -> tuple[list[str], list[tuple[str, list[Result | None]]]]:
    """Return the names of the columns, and rows with the results of the row's model against the columns'.

    There are at most `MAX_IN_MATRIX` models, those that matter by age. Columns are the models that met several others,
    so that a league of many checkpoints and one opponent is one column.
    """
    met = sorted((standing for standing in league.ladder if league.games[standing.uid]), key=lambda row: age(row.uid))
    names = [standing.uid for standing in choose(met, league.games, MAX_IN_MATRIX)]
    cells = {name: {other: league.of(name, other) for other in names if other != name} for name in names}
    columns = [name for name in names if sum(cell is not None for cell in cells[name].values()) > 1] or names
    rows = [(name, [cells[name].get(column) for column in columns]) for name in names]
    return columns, [(name, row) for name, row in rows if any(cell is not None for cell in row)]
