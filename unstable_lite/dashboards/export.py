"""Export a run's JSON Lines as the reference's CSV files.

`training_data/train_data_step_{k}.csv` counts k from 0, as the reference does; a run's updates count from 1.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unstable_lite.config.env_ids import slug
from unstable_lite.dashboards.report.games import policy_seats
from unstable_lite.errors import UnstableError
from unstable_lite.files import read_part, read_records
from unstable_lite.tracking.train_data import train_files

TRAIN_COLUMNS = ("pid", "obs", "act", "reward", "env_id", "step_info")
TURN_COLUMNS = (
    "game_idx",
    "turn_idx",
    "pid",
    "name",
    "obs",
    "full_action",
    "extracted_action",
    "step_info",
    "final_reward",
)
EVAL_COLUMNS = (*TURN_COLUMNS, "eval_model_pid", "eval_opponent_name")
COLLECTION_COLUMNS = (*TURN_COLUMNS, "env_id")
Table = tuple[str, str, Sequence[str], Iterable[Mapping[str, Any]]]
"""Kind, file name, columns, and rows to append."""
FORMULA_STARTS = tuple("=+-@\t\r\n")


def export_csv(run: Path, output: Path, is_safe_for_spreadsheets: bool = False) -> dict[str, int]:
    """Write every file of the reference for which `run` has data; return the number of each kind.

    Void games have no rewards and are left out. `is_safe_for_spreadsheets`: begin text that a spreadsheet would take
    for a formula with an apostrophe; else cells are as the models wrote them, as in the reference.

    Raises UnstableError if `run` is not a run directory, if `output` has files in it, or if a line of the run's files
    cannot be read.
    """
    if not (run / "games.jsonl").exists():
        raise UnstableError(f"{run} is not a run directory: it has no games.jsonl")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UnstableError(f"{output} exists and is not empty; name another directory with --output, or remove it")
    counts = {"training_data": 0, "eval_data": 0, "collection": 0}
    for kind in counts:
        (output / kind).mkdir(parents=True)
    for kind, name, columns, rows in itertools.chain(_trained(run), _played(run)):
        counts[kind] += _append(output / kind / name, columns, rows, is_safe_for_spreadsheets)
    return counts


def _trained(run: Path) -> Iterator[Table]:
    for update, file in train_files(run).items():
        rows = ({**row, "step_info": repr(row["step_info"])} for row in read_part(file))
        yield "training_data", f"train_data_step_{update - 1}.csv", TRAIN_COLUMNS, rows


def _played(run: Path) -> Iterator[Table]:
    for game in read_records(run / "games.jsonl"):
        if game["end"] == "void":
            continue
        if game["kind"] == "eval":
            yield "eval_data", _file_name(f"{slug(game['env_id'])}-{game['game_idx']}"), EVAL_COLUMNS, _eval_rows(game)
        else:
            model = next(str(agent["model"]) for agent in game["agents"] if agent["collect_data"])
            yield "collection", _file_name(model), COLLECTION_COLUMNS, _turn_rows(game, env_id=game["env_id"])


def _eval_rows(game: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    evaluated = policy_seats(game)
    others = [agent["model"].removeprefix("fixed-") for agent in game["agents"] if agent["pid"] not in evaluated]
    return _turn_rows(game, eval_model_pid=evaluated[0], eval_opponent_name=others[0] if others else "")


def _turn_rows(game: Mapping[str, Any], **same_for_all: Any) -> Iterator[dict[str, Any]]:
    names = {agent["pid"]: agent["model"] for agent in game["agents"]}
    for index, (pid, observation, text, action, format_ok, *_) in enumerate(game["turns"]):
        if index < game.get("branch_turn", 0):
            continue  # a turn of an earlier game, repeated
        step_info = {"correct_answer_format": format_ok, "invalid_move": index in game["invalid_turns"]}
        yield {
            "game_idx": game["game_idx"],
            "turn_idx": index,
            "pid": pid,
            "name": names[pid],
            "obs": observation,
            "full_action": text,
            "extracted_action": action,
            "step_info": json.dumps(step_info),
            "final_reward": game["rewards"][str(pid)],
            **same_for_all,
        }


def _file_name(name: str) -> str:
    """Return a file name without path separators, for any name of an env or a model."""
    return f"{re.sub(r'[^A-Za-z0-9_.:+-]+', '-', name)[-200:]}.csv"


def _append(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], is_safe_for_spreadsheets: bool
) -> int:
    """Append rows; return 1 if this created the file, else 0."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        writer.writerows(map(_without_formulas, rows) if is_safe_for_spreadsheets else rows)
    return int(is_new)


def _without_formulas(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell
        for name, cell in row.items()
    }
