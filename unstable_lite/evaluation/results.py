"""Results of an evaluation: a line for each game in results.jsonl, and all tables made from those lines.

Counts are computed, never stored. So an interrupted evaluation continues, and one with more games or more models adds
to the same directory. A call returns the cells of its arguments; table.csv and table.md contain every cell with a line.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from unstable_lite.config.games import against
from unstable_lite.dashboards.terminal import plain_table
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.plan import Cell, CellKey, read_key, seat_of
from unstable_lite.files import RecordLog, open_to_write, read_records, replaced
from unstable_lite.printable import markdown_table
from unstable_lite.tracking.evaluations import Evaluation, Tally, by_deal, score
from unstable_lite.tracking.result_rows import result_rows
from unstable_lite.types import GameRecord

PLAYED_HOW = {"players": "num_players", "template": "prompt_template"}
"""Columns of a terminal's table, shown if its rows differ in them."""
SAME_GAMES = ("opponent", "env_id", *PLAYED_HOW.values(), "other_settings")
"""Fields in which evaluations with the same seeds and seats agree."""
COUNTS = ("n", "wins", "draws", "losses")
READ = (
    *("model", "opponent", "env_id", "num_players", "prompt_template", "other_settings", *COUNTS),
    *("points", "mean_reward", "interval_low", "interval_high", "own_invalid_rate", "void"),
    *("remarks", "compared_with", "change", "change_low", "change_high"),
)
"""Columns that a person reads: the games, the result with one interval, its faults, and the change."""


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
            "reason": record.reason,
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
        for key in dict.fromkeys([*(cell.key for cell in cells if cell.key in self._rows), *self._rows]):
            of, rows = read_key(key), [*self._rows[key].values()]
            evaluations.append(_evaluation(of, rows, names[of.model_key], names[of.opponent_key]))
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
            tally.void[row.get("reason", "")] += 1
        else:
            ended = {"end": row["end"], "reason": row.get("reason", "")}
            tally.add(row["outcome"], row["reward"], row["own_invalid"], **ended)
            played[row["game"]] = score(row["outcome"], row["reward"]), row["reward"]
    scores, rewards = by_deal(played, max(played, default=-1) + 1, of.num_players)
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
        with replaced(path) as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n")
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

    table.csv and table.md contain all games; table.md has only the columns that a person reads and any row has.
    """
    rows = table_rows(results.all_evaluations(cells))
    write_csv(results.directory / "table.csv", list(rows[0]), rows)
    columns = [column for column in READ if any(_plain(row[column]) != "" for row in rows)]
    lines = [columns, *([str(_plain(row[column], 3)) for column in columns] for row in rows)]
    with replaced(results.directory / "table.md") as partial:
        partial.write_text(markdown_table(lines), encoding="utf-8")
    return [results.evaluation(cell, games) for cell in cells]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with os.fdopen(open_to_write(path, os.O_TRUNC), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({column: _plain(value) for column, value in row.items()} for row in rows)


def results_tables(evaluations: Sequence[CellEvaluation]) -> list[Table]:
    """Return tables for a terminal, one for each env, opponent and settings."""
    tables = []
    for env_id, opponent, settings in dict.fromkeys((e.env_id, e.opponent, e.other_settings) for e in evaluations):
        alike = [e for e in evaluations if (e.env_id, e.opponent) == (env_id, opponent)]
        shown = [e for e in alike if e.other_settings == settings]
        differing = {name: of for name, of in PLAYED_HOW.items() if len({getattr(e, of) for e in shown}) > 1}
        own, *others = (re.split(r", (?=\w+=)", text) for text in (settings, *(e.other_settings for e in alike)))
        apart = [setting for setting in own if setting and not all(setting in other for other in others)]
        title = ", ".join([f"{env_id}{against(opponent)}", *apart])
        value = next((e.value_name for e in shown if e.n), "points")
        outcomes = ("won", "drawn", "reward") if value == "points" else ()
        columns = ("games", value, "95 %", *outcomes, "own\ninvalid")
        table = plain_table(title, ("model", *differing), columns)
        for e in shown:
            table.add_row(
                e.model,
                *(str(getattr(e, of)) for of in differing.values()),
                f"{e.n}" + f" (+{e.void} void)" * bool(e.void),
                *(e.value_text, e.interval_text),
                *[f"{e.wins}", f"{e.draws}", f"{e.mean_reward:+.3f}" if e.n else "–"] * bool(outcomes),
                e.own_invalid,
            )
        table.caption = "\n".join(filter(None, (_change(_first(e, shown), e) for e in shown))) or None
        tables.append(table)
    return tables


def _change(first: CellEvaluation, later: CellEvaluation) -> str:
    if later is first or not (first.n and later.n):
        return ""
    row = result_rows([replace(first, model=""), replace(later, model="")])[-1]  # their `/` does not name a policy
    return f"{later.model}: {row.change_text} compared with {first.model} (95 %: {row.change_interval_text})"


def table_rows(evaluations: Sequence[CellEvaluation]) -> list[dict[str, Any]]:
    """Return the rows of table.csv."""
    rows = []
    for e in evaluations:
        first = _first(e, evaluations)
        gained = None if e is first else e.change_since(first)
        row = {name: getattr(e, name) for name in ("model", *SAME_GAMES, *COUNTS)}
        row |= {name: getattr(e, name) for name in ("win_rate", "points", "mean_reward")}
        row |= dict(zip(("interval_low", "interval_high"), e.interval, strict=True))
        row |= {
            "own_invalid": e.invalid,
            "own_invalid_rate": e.invalid / e.n if e.n else math.nan,
            "void": e.void,
            "remarks": "; ".join(e.remarks),
            "compared_with": first.model if gained else None,
        }
        change = (gained.mean, gained.low, gained.high, gained.seeds) if gained else (None,) * 4
        row |= dict(zip(("change", "change_low", "change_high", "change_seeds"), change, strict=True))
        rows.append(row)
    return rows


def _first(e: CellEvaluation, evaluations: Sequence[CellEvaluation]) -> CellEvaluation:
    """Return the first evaluation of the same games as `e`, with which `e` is compared."""
    return next(other for other in evaluations if all(getattr(other, name) == getattr(e, name) for name in SAME_GAMES))


def _plain(value: Any, digits: int = 6) -> Any:
    if isinstance(value, float):
        return round(value, digits) if math.isfinite(value) else ""
    return "" if value is None else value
