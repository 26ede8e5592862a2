"""Write a run's games and batches as the CSV files of UnstableBaselines: `python examples/export_csv.py RUN FOLDER`.

Cells have the text that models and opponents wrote; a spreadsheet may run one that begins with = + - @ as a formula.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

from unstable_lite.files import read_part, read_records
from unstable_lite.tracking.records import train_files


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def rows_of(game: dict[str, Any]) -> list[dict[str, Any]]:
    names, rows = {agent["pid"]: agent["model"] for agent in game["agents"]}, []
    for index, (pid, obs, text, action, format_ok, *_) in enumerate(game["turns"]):
        if index >= game.get("branch_turn", 0):  # earlier turns are those of another game
            info = {"correct_answer_format": format_ok, "invalid_move": index in game["invalid_turns"]}
            row = {"game_idx": game["game_idx"], "turn_idx": index, "pid": pid, "name": names[pid], "obs": obs}
            row |= {"full_action": text, "extracted_action": action, "step_info": json.dumps(info)}
            rows.append(row | {"final_reward": game["rewards"][str(pid)]})
    return rows


def export(run: Path, folder: Path) -> None:
    for update, file in train_files(run).items():  # theirs are counted from 0
        columns = ("pid", "obs", "act", "reward", "env_id", "step_info")
        rows = [{name: row[name] for name in columns} for row in read_part(file)]
        append(folder / "training_data" / f"train_data_step_{update - 1}.csv", rows)
    for game in read_records(run / "games.jsonl"):
        if game["end"] != "void" and (rows := rows_of(game)):
            is_training = game["kind"] == "train"
            own = next(one for one in game["agents"] if (one["collect_data"] if is_training else "opponent" not in one))
            others = [one["model"].removeprefix("fixed-") for one in game["agents"] if "opponent" in one]
            name = own["model"] if is_training else f"{game['env_id']}-{game['game_idx']}"
            of_eval = {"eval_model_pid": own["pid"], "eval_opponent_name": others[0] if others else ""}
            rows = [row | ({"env_id": game["env_id"]} if is_training else of_eval) for row in rows]
            file_name = re.sub(r"[^A-Za-z0-9_.:+-]+", "-", name)[-200:]
            append(folder / ("collection" if is_training else "eval_data") / f"{file_name}.csv", rows)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
