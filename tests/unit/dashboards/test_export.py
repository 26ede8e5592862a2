"""CSV export of games with foreign words, names and numbers. Whole runs: test_run.py."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.dashboards.export import export_csv
from unstable_lite.files import write_whole

FORMULAS = ("=cmd|' /C calc'!A0", "+1", "-1+2", "@SUM(1)", "\t=1", "\r=1", "\n=1")


def game(env_id: str = "E-v0", model: str = "ckpt-1", kind: str = "eval", **changes: Any) -> dict[str, Any]:
    agents = [
        {"pid": 0, "model": model, "collect_data": kind == "train"},
        {"pid": 1, "model": "fixed-x", "collect_data": False, "opponent": "x"},
    ]
    return {
        "end": "done",
        "kind": kind,
        "env_id": env_id,
        "game_idx": 0,
        "agents": agents,
        "turns": [[1, "the board", "all of it", "[0]", True]],
        "invalid_turns": [],
        "rewards": {"0": -1.0, "1": 1.0},
    } | changes


def write_run(directory: Path, *games: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "games.jsonl").write_text("".join(json.dumps(game) + "\n" for game in games))
    return directory


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "name", ["../../../outside/x", "/outside/x", "vendor/model", "a\0b", "x" * 500, "..", "\x1b[2J"]
)
def test_no_name_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    run = write_run(tmp_path / "run", game(env_id=name), game(game_idx=f"/{name}"), game(model=name, kind="train"))
    export_csv(run, tmp_path / "a" / "b" / "csv")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != run]
    assert sorted(path.parent.relative_to(tmp_path).as_posix() for path in written) == [
        "a/b/csv/collection",
        "a/b/csv/eval_data",
        "a/b/csv/eval_data",
    ]
    assert all(len(rows_of(path)) == 1 for path in written)


def test_usual_names_stay_unchanged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", game("mine:Nim-v0-train", game_idx=7), game(model="ckpt-1", kind="train"))
    export_csv(run, tmp_path / "csv")
    assert [path.name for path in (tmp_path / "csv" / "eval_data").iterdir()] == ["mine:Nim-v0-train-7.csv"]
    assert [path.name for path in (tmp_path / "csv" / "collection").iterdir()] == ["ckpt-1.csv"]


def test_opponent_formulas_become_text_on_request(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", *(game(turns=[[1, word, word, word, True]], game_idx=0) for word in FORMULAS))
    (run / "train_data").mkdir()
    step = {"pid": 0, "obs": "=1", "act": "@x", "reward": -1.0, "env_id": "E", "step_info": {}}
    write_whole(run / "train_data" / "step-000001.jsonl.gz", [step])
    for is_safe in (False, True):
        output = tmp_path / f"csv-{is_safe}"
        export_csv(run, output, is_safe_for_spreadsheets=is_safe)
        apostrophe = "'" * is_safe
        rows = rows_of(output / "eval_data" / "E-v0-0.csv")
        for column in ("obs", "full_action", "extracted_action"):
            assert [row[column] for row in rows] == [apostrophe + word for word in FORMULAS]
        (trained,) = rows_of(output / "training_data" / "train_data_step_0.csv")
        assert (trained["obs"], trained["act"], trained["reward"]) == (f"{apostrophe}=1", f"{apostrophe}@x", "-1.0")


def test_repeated_turns_of_a_branched_game_are_left_out(tmp_path: Path) -> None:
    turns = [[pid, f"board {number}", "text", "[0]", True] for number, pid in enumerate((0, 1, 0, 1))]
    run = write_run(tmp_path / "run", game(kind="train", turns=turns, branch_turn=2))
    export_csv(run, tmp_path / "csv")
    (file,) = (tmp_path / "csv" / "collection").iterdir()
    assert [row["obs"] for row in rows_of(file)] == ["board 2", "board 3"]
