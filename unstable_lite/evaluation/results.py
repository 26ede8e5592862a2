"""Results of an evaluation: a line for each game in results.jsonl, and all tables made from those lines.

Counts are computed, never stored. So an interrupted evaluation continues, and one with more games or more models adds
to the same directory. A call returns the cells of its arguments; table.csv and table.md contain every cell with a line.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from unstable_lite.config.games import against
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.cells import Cell, CellKey, read_key, seat_of
from unstable_lite.evaluation.ladder import LadderEntry
from unstable_lite.files import RecordLog, read_records
from unstable_lite.tracking.evaluations import Evaluation, Tally, score
from unstable_lite.tracking.intervals import paired_difference
from unstable_lite.types import GameRecord

REFERENCE_COLUMNS = {
    "game_idx": "index",
    "env_id": "env_id",
    "eval_model_pid": "pid",
    "eval_model_reward": "reward",
    "avg_opponent_reward": "opponent_reward",
    "num_turns": "num_turns",
}
"""Columns of eval_results.csv, with the key of each in a line."""
PLAYED_HOW = {"players": "num_players", "template": "prompt_template"}
"""Columns of a terminal's table, shown if its rows differ in them."""
SAME_GAMES = ("opponent", "env_id", *PLAYED_HOW.values(), "other_settings")
"""Fields in which evaluations with the same seeds and seats agree."""
COUNTS = ("n", "wins", "draws", "losses")
LADDER_COLUMNS = ("rank", *(field.name for field in fields(LadderEntry)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEvaluation(Evaluation):
    """Evaluation with the settings of its env, because cells of the same models and env may differ in them."""

    num_players: int
    prompt_template: str
    other_settings: str


class Results:
    """Games in an output directory, by cell and number."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Open a new directory, or one that was made under the same settings. Raises ConfigError for any other."""
        self.directory = directory
        _claim(directory, settings)
        self._log = RecordLog(directory / "results.jsonl")
        self._rows: dict[str, dict[int, dict[str, Any]]] = {}
        for row in read_records(directory / "results.jsonl"):
            self._keep(row)

    def missing(self, cell: Cell, games: int) -> list[int]:
        """Return the numbers of the cell's first `games` games that are missing; void ones are played again."""
        rows = self._rows.get(cell.key, {})
        return [number for number in range(games) if number not in rows or rows[number]["end"] == "void"]

    def add(self, cell: Cell, record: GameRecord) -> None:
        """Add a game; it is on disk when this returns."""
        number = record.spec.game_idx
        pid, is_void = seat_of(cell, number), record.end == "void"
        rewards = {seat: record.reward_shown(seat) for seat in record.rewards}
        others = [reward for other, reward in rewards.items() if other != pid]
        row = {
            "cell": cell.key,
            "game": number,
            "model": cell.model.name,
            "opponent": cell.opponent.name,
            "env_id": cell.env.env_id,
            "seed": record.spec.seed,
            "pid": pid,
            "reward": None if is_void else rewards[pid],
            "opponent_reward": fmean(others) if others and not is_void else None,
            "rewards": rewards,
            "outcome": None if is_void else record.outcomes[pid],
            "own_invalid": pid in record.invalid_pids,
            "end": record.end,
            "num_turns": len(record.turns),
            "seconds": round(record.seconds, 4),
            "error": record.error,
        }
        self._log.write(row)
        self._keep(row)

    def rows(self, cell: Cell, games: int) -> list[dict[str, Any]]:
        """Return the lines of the cell's first `games` games, in the order of their numbers."""
        rows = self._rows.get(cell.key, {})
        return [rows[number] for number in sorted(rows) if number < games]

    def evaluation(self, cell: Cell, games: int) -> CellEvaluation:
        return _evaluation(read_key(cell.key), self.rows(cell, games), cell.model.name, cell.opponent.name)

    def all_evaluations(self, cells: Sequence[Cell]) -> list[CellEvaluation]:
        """Return the results of all games: of `cells` first, then of the others in the order of their lines."""
        names, evaluations = self._names(cells), []
        for key in dict.fromkeys([cell.key for cell in cells if cell.key in self._rows] + [*self._rows]):
            of = read_key(key)
            rows, model, opponent = [*self._rows[key].values()], names[of.model_key], names[of.opponent_key]
            evaluations.append(_evaluation(of, rows, model, opponent))
        return evaluations

    def close(self) -> None:
        self._log.close()

    def _keep(self, row: dict[str, Any]) -> None:
        self._rows.setdefault(row["cell"], {})[row["game"]] = row

    def _names(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Return the names of models by key, from `cells` or else from the lines; with the key if two have one name."""
        names: dict[str, str] = {}
        for key, rows in self._rows.items():
            of, newest = read_key(key), [*rows.values()][-1]
            names |= {of.model_key: newest["model"], of.opponent_key: newest["opponent"]}
        for cell in cells:
            names |= {model.key: model.name for model in cell.models}
        times = Counter(names.values())
        return {key: name if times[name] == 1 else f"{name} ({key})" for key, name in names.items()}


def _evaluation(of: CellKey, rows: Sequence[Mapping[str, Any]], model: str, opponent: str) -> CellEvaluation:
    tally, played = Tally(), dict[int, tuple[float, float]]()
    for row in rows:
        if row["end"] == "void":
            tally.void += 1
        else:
            tally.add(row["outcome"], row["reward"], row["own_invalid"])
            played[row["game"]] = score(row["outcome"], row["reward"]), row["reward"]
    firsts = range(0, max(played, default=-1) + 1, of.num_players)
    deals = [[played.get(first + seat, (None, None)) for seat in range(of.num_players)] for first in firsts]
    scores, rewards = (tuple(tuple(of_game[i] for of_game in of_deal) for of_deal in deals) for i in (0, 1))
    return CellEvaluation(
        **asdict(replace(tally.evaluation(model, model, 0, of.env_id, opponent), scores=scores, rewards=rewards)),
        num_players=of.num_players,
        prompt_template=of.prompt_template,
        other_settings=of.other_settings,
    )


def _claim(directory: Path, settings: Mapping[str, Any]) -> None:
    path = directory / "settings.json"
    if not path.exists():
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} is not empty and not an evaluation's; name another directory with --output")
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=2) + "\n")
        return
    try:
        before = json.loads(path.read_text())
        if not isinstance(before, dict):
            raise ValueError("no JSON table")
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}); name another directory with --output") from None
    changed = [
        f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted({*before, *settings})
        if before.get(name) != settings.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{directory} holds an evaluation with other settings, which cannot be mixed with this one: "
            f"{'; '.join(changed)}. Name another directory with --output"
        )


def write_tables(results: Results, cells: Sequence[Cell], games: int) -> list[CellEvaluation]:
    """Write all tables; return the results of the first `games` games of `cells`.

    table.csv and table.md contain all games; eval_results.csv, in the format of the reference's evaluator, which names
    no models, only those of `cells`.
    """
    evaluations = results.all_evaluations(cells)
    rows = [_row(evaluation, _first(evaluation, evaluations)) for evaluation in evaluations]
    _write_both(results.directory / "table", list(rows[0]), rows)
    played = [row for cell in cells for row in results.rows(cell, games) if row["end"] != "void"]
    reference = [
        {column: ({"index": index} | row)[key] for column, key in REFERENCE_COLUMNS.items()}
        for index, row in enumerate(played)
    ]
    write_csv(results.directory / "eval_results.csv", list(REFERENCE_COLUMNS), reference)
    return [results.evaluation(cell, games) for cell in cells]


def write_ladder(directory: Path, placed: Sequence[LadderEntry], evaluations: Sequence[Evaluation]) -> None:
    """Write ladder.csv, ladder.md, and matches.csv with the row model's share of points against the column's.

    A win is a point, a draw half of one. A cell is empty if the two did not meet.
    """
    rows = [{"rank": rank} | asdict(model) for rank, model in enumerate(placed, start=1)]
    _write_both(directory / "ladder", LADDER_COLUMNS, rows)
    points, games = _points(evaluations)
    names = [model.model for model in placed]
    matrix = [
        {"model": row}
        | {column: points[row, column] / games[row, column] for column in names if games.get((row, column))}
        for row in names
    ]
    write_csv(directory / "matches.csv", ("model", *names), matrix)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({column: _plain(value) for column, value in row.items()} for row in rows)


def _write_both(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `path` with the suffixes .csv and .md."""
    write_csv(path.with_suffix(".csv"), columns, rows)
    lines = [columns, ["---"] * len(columns), *([str(_plain(row[column])) for column in columns] for row in rows)]
    text = "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
    path.with_suffix(".md").write_text(text, encoding="utf-8")


def results_tables(evaluations: Sequence[CellEvaluation]) -> list[Table]:
    """Return tables for a terminal, one for each env, opponent and settings."""
    tables = []
    for env_id, opponent, settings in dict.fromkeys((e.env_id, e.opponent, e.other_settings) for e in evaluations):
        alike = [e for e in evaluations if (e.env_id, e.opponent) == (env_id, opponent)]
        shown = [e for e in alike if e.other_settings == settings]
        differing = {name: of for name, of in PLAYED_HOW.items() if len({getattr(e, of) for e in shown}) > 1}
        title = ", ".join([f"{env_id}{against(opponent)}", *_apart(settings, [e.other_settings for e in alike])])
        table = Table("model", *differing, title=title, title_justify="left", box=SIMPLE_HEAD)
        table.pad_edge, table.collapse_padding = False, True  # at most 80 columns
        has_deals = any(e.points_over_deals for e in shown)
        of_points = ("points", "95 %", *["95 % over\ndeals"] * has_deals)
        for name in ("games", *of_points, "won", "drawn", "reward", "own\ninvalid"):
            table.add_column(name, justify="right")
        for e in shown:
            low, high = e.points_interval
            deals = f"{100 * over.low:.1f}–{100 * over.high:.1f}" if (over := e.points_over_deals) else "–"
            interval = f"{100 * low:.1f}–{100 * high:.1f}"
            points = (f"{e.points:.1%}", interval, *[deals] * has_deals, str(e.wins), str(e.draws))
            table.add_row(
                e.model,
                *(str(getattr(e, of)) for of in differing.values()),
                f"{e.n}" + f" (+{e.void} void)" * bool(e.void),
                *(points if math.isfinite(e.points) else ["–"] * len(points)),
                f"{e.mean_reward:+.3f}" if e.n else "–",
                e.own_invalid,
            )
        compared = [(e, e.describe_change(_first(e, shown))) for e in shown if e is not _first(e, shown)]
        table.caption = "\n".join(f"{e.model}: {change}" for e, change in compared if change) or None
        table.caption_justify = "left"
        tables.append(table)
    return tables


def _apart(settings: str, alternatives: Sequence[str]) -> list[str]:
    """Return those of the settings that not all alternatives have."""
    own, *others = (re.split(r", (?=\w+=)", text) for text in (settings, *alternatives))
    return [setting for setting in own if setting and not all(setting in other for other in others)]


def ladder_table(placed: Sequence[LadderEntry]) -> Table:
    """Return the ladder as a table for a terminal."""
    table = Table("", "model", title="TrueSkill", title_justify="left")
    for name in ("μ", "σ", "games", "won", "drawn", "lost"):
        table.add_column(name, justify="right")
    for rank, p in enumerate(placed, start=1):
        counts = map(str, (p.games, p.wins, p.draws, p.losses))
        table.add_row(str(rank), p.model, f"{p.mu:.2f}", f"{p.sigma:.2f}", *counts)
    return table


def _first(e: CellEvaluation, evaluations: Sequence[CellEvaluation]) -> CellEvaluation:
    """Return the first evaluation of the same games as `e`, with which `e` is compared."""
    return next(other for other in evaluations if all(getattr(other, name) == getattr(e, name) for name in SAME_GAMES))


def _row(e: CellEvaluation, first: CellEvaluation) -> dict[str, Any]:
    gained = None if e is first else paired_difference(first.scores, e.scores)
    row = {name: getattr(e, name) for name in ("model", *SAME_GAMES, *COUNTS)}
    for name, prefix, (low, high) in (
        ("win_rate", "", e.interval),
        ("points", "points_", e.points_interval),
        ("mean_reward", "reward_", e.reward_interval),
    ):
        row |= {name: getattr(e, name), f"{prefix}low": low, f"{prefix}high": high}
    points, reward = e.points_over_deals, e.reward_over_deals
    return row | {
        "deals": points.seeds if points else None,
        "points_over_deals_low": points.low if points else None,
        "points_over_deals_high": points.high if points else None,
        "reward_over_deals_low": reward.low if reward else None,
        "reward_over_deals_high": reward.high if reward else None,
        "own_invalid": e.invalid,
        "own_invalid_rate": e.invalid / e.n if e.n else math.nan,
        "void": e.void,
        "compared_with": first.model if gained else None,
        "change": gained.mean if gained else None,
        "change_low": gained.low if gained else None,
        "change_high": gained.high if gained else None,
        "change_seeds": gained.seeds if gained else None,
    }


def _points(evaluations: Sequence[Evaluation]) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], int]]:
    """Return the model's points, and the number of games, by (model, other)."""
    points: dict[tuple[str, str], float] = {}
    games: dict[tuple[str, str], int] = {}
    for e in evaluations:
        for pair, won in (((e.model, e.opponent), e.wins), ((e.opponent, e.model), e.losses)):
            points[pair] = points.get(pair, 0.0) + won + e.draws / 2
            games[pair] = games.get(pair, 0) + e.n
    return points, games


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else ""
    return "" if value is None else value
