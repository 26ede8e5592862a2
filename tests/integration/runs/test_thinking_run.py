"""A budget for thinking in real runs: engine, games and learner agree on the ids that end the thinking."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import runs
from fakes.sync_runs import ANSWER, BUDGET, write_thinking
from unstable_lite.dashboards.report.games import read_games
from unstable_lite.files import read_part, read_records
from unstable_lite.games.answers import END_OF_THINKING
from unstable_lite.models import resolve_model
from unstable_lite.models.local_tokenizer import find_tokenizer
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.tracking.records import train_files

pytestmark = pytest.mark.nightly


def answers(directory: Path, kind: str) -> dict[tuple[int, int, int], tuple[str, dict[str, Any]]]:
    """Return text and tokens of each answer of a policy in training or evaluation, by game, player and turn."""
    return {
        (game["game_idx"], turn[0], index): (turn[2], turn[6])
        for game in read_records(directory / "games.jsonl")
        if game["kind"] == kind
        for index, turn in enumerate(game["turns"])
        if turn[6] is not None and (kind == "eval" or game["agents"][turn[0]]["collect_data"])
    }


def test_cut_turns_hold_the_end_of_thinking_and_only_sampled_ids(sync_run: Path) -> None:
    tokenizer = Tokenizer(resolve_model("builtin:tiny"))
    end_ids = tokenizer.prompts([])["end_of_thinking"]
    for kind in ("train", "eval"):
        cut = [(text, tokens) for text, tokens in answers(sync_run, kind).values() if "forced" in tokens]
        assert cut, kind
        for text, tokens in cut:
            ids, at = tokens["completion_ids"], tokens["forced"]["at"]
            assert (at, tokens["forced"]["ids"]) == (BUDGET, end_ids)
            assert text == tokenizer.text(ids[:at]) + END_OF_THINKING + tokenizer.text(ids[at:])
            assert len(ids) == len(tokens["logprobs"]) <= ANSWER
        assert any(len(tokens["completion_ids"]) > BUDGET + 1 for _, tokens in cut)


def test_learner_reads_what_the_engine_read_and_each_turn_is_one_step(sync_run: Path) -> None:
    sampled = answers(sync_run, "train")
    num_cut = 0
    for update, path in train_files(sync_run).items():
        rows = list(read_part(path))
        turns = [(row["step_info"]["game_idx"], row["pid"], row["step_info"]["turn"]) for row in rows]
        assert len(set(turns)) == len(rows) == 24
        for row, turn in zip(rows, turns, strict=True):
            text, tokens = sampled[turn]
            assert row["act"] == text
            assert row.get("forced_tokens", 0) == len(tokens.get("forced", {}).get("ids", []))
            if row["staleness"] == 0 and "forced" in tokens:
                num_cut += 1
                np.testing.assert_allclose(row["learner_logprobs"], tokens["logprobs"], atol=2e-3, err_msg=str(update))
    assert num_cut > 20


def test_report_shows_the_sampled_tokens_of_cut_turns(sync_run: Path) -> None:
    tokenizer = find_tokenizer("builtin:tiny")
    games = read_games(sync_run, tokenizer, max_games=1000).kept
    shown = [turn["tokens"] for game in games for turn in game["turns"] if "forced" in (turn.get("tokens") or {})]
    assert shown
    for tokens in shown:
        assert sum(count for _, count in tokens["pieces"]) == len(tokens["completion_ids"])


def test_share_of_cut_thinking_is_logged_with_its_count(sync_run: Path) -> None:
    lines = map(json.loads, (sync_run / "metrics.jsonl").read_text().splitlines())
    name, count = "collection-Nim-v0-train/Thinking Cut Rate", "collection-Nim-v0-train/n (turns)"
    *_, (share, num_turns) = ((line[name], line[count]) for line in lines if name in line)
    cut = ["forced" in tokens for _, tokens in answers(sync_run, "train").values()]
    assert num_turns == len(cut)
    assert share > 0 and share == pytest.approx(sum(cut) / len(cut))


def test_engine_that_does_not_complete_given_ids_ends_the_run(tmp_path: Path) -> None:
    kind = "fakes.lying_engines:CompletesThePromptAgain"
    changes = (f"engine.kind={kind}", "engine.thinking_tokens=3", "run.eval_games=0")
    code, _, err = runs.run_torchless("run", write_thinking(tmp_path), *changes)
    assert code == 1
    assert f"engine.kind = '{kind}' does not complete the ids" in err
