"""Whole runs against a model behind an endpoint that fails."""

import itertools
import os
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from fakes import run_files, runs
from fakes.openai_server import Answer, chat_reply, serving

KEY = "sk-very-secret-key"
REMOTE = "vendor/model"
IMPATIENT = """
from unstable_lite.games.players import openai_compatible as players
players.MAX_RETRIES, players.PAUSE_S, players.MAX_PAUSE_S, players.OUTAGE_S = 0, 0.1, 0.1, 1
"""
CONFIG = """
run = { learning_steps = 1, num_collection_workers = 8, num_eval_workers = 2, eval_games = 10, output_dir = "OUTPUT" }
engine = { kind = "scripted", replies = ["\\\\boxed{0}", "\\\\boxed{4}", "\\\\boxed{8}"] }
learner = { batch_size = 8, canary_tolerance = 1000000000.0 }
opponents = { base_url = "URL" }
league = { opponent_sampling_strategy = "fixed", fixed_opponents = ["scripted:optimal", "vendor/model"] }
train_envs = [{ env_id = "TicTacToe-v0-train", num_players = 2, num_actors = 1 }]
eval_envs = [{ env_id = "TicTacToe-v0-train", num_players = 2, fixed_opponent = "vendor/model" }]
"""
FAILS = ("run.eval_games=0", f"league.fixed_opponents=['{REMOTE}']", "opponents.max_requests=6")
"""Overrides for a run that soon has no opponent left."""


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["run ends", "run fails"])
def test_run_survives_a_failed_endpoint_and_no_file_stream_or_child_has_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    for name in ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, KEY)
    config, children = tmp_path / "run.toml", dict[int, bytes]()
    numbers, are_seen = itertools.count(1), threading.Event()
    with serving() as server:

        def answer(body: dict[str, Any]) -> Answer:
            are_seen.wait(60)
            if next(numbers) < 8 or fails:
                return 401, {"error": {"message": f"Authorization: Bearer {KEY} is not known yet"}}
            return chat_reply(f"your key is {KEY}, my move \\boxed{{{random.randrange(9)}}}")

        server.answer = answer
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
        config.write_text(CONFIG.replace("URL", server.url).replace("OUTPUT", str(tmp_path / "outputs")))
        process = runs.start_torchless("run", config, *(FAILS if fails else ()), "--debug")
        runs.wait_for(lambda: len(server.bodies) >= 2 or process.poll() is not None)
        for child in runs.children_of(process) if process.poll() is None else []:
            children[child.pid] = Path(f"/proc/{child.pid}/environ").read_bytes()
            children[child.pid] += Path(f"/proc/{child.pid}/cmdline").read_bytes()
        are_seen.set()
        code, out, err = runs.finish(process)
    assert (code != 0) == fails, out + err
    assert "Traceback" in err or not fails
    assert len(children) >= 2
    assert not any(KEY.encode() in what for what in children.values())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in out + err
    directory = runs.run_directory(tmp_path)
    assert "is not known yet" in (directory / "logs" / "orchestrator.log").read_text()
    assert re.search(rf"{REMOTE}'.*paused", out)
    if fails:
        return
    assert re.search(rf"{REMOTE}'.*again", out)
    assert "your key is <key>" in (directory / "games.jsonl").read_text()
    assert {evaluation["opponent"] for evaluation in run_files.evaluations(directory)} == {REMOTE}
    assert [line["step"] for line in run_files.updates(directory)] == [1]
    assert 3 <= sum(game["end"] == "void" for game in run_files.games(directory)) <= 10
    (metrics,) = [row for row in run_files.metrics(directory) if "opponents/requests" in row]
    assert 8 < metrics["opponents/requests"] <= len(server.bodies)
    assert metrics["opponents/failures"] == 7
