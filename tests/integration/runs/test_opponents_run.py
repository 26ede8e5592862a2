"""A whole run against a model behind an endpoint that fails at first."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

import unstable_lite as unstable
from fakes import numpy_learner, runs
from fakes.openai_server import Answer, chat_reply, serving

KEY = "sk-very-secret-key"
REMOTE = "vendor/model"


def test_run_survives_a_failed_endpoint_and_never_writes_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    numpy_learner.use(monkeypatch)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    env = {"env_id": "TicTacToe-v0-train", "num_players": 2, "prompt_template": "brief"}
    with serving() as server:

        def answer(body: dict[str, Any]) -> Answer:
            if len(server.bodies) < 8:
                return 401, {"error": {"message": f"{KEY} is not known yet"}}
            board = body["messages"][0]["content"].rpartition("Available Moves:")[2]
            return chat_reply("\\boxed{" + random.choice(re.findall(r"\[\d\]", board)) + "}")

        server.answer = answer
        run = unstable.build(
            train_envs=[unstable.TrainEnvSpec(**env, num_actors=1)],
            eval_envs=[unstable.EvalEnvSpec(**env, fixed_opponent=REMOTE)],
            opponent_sampling_strategy="fixed",
            fixed_opponents=["scripted:optimal", REMOTE],
            templates={"brief": {"user": "{observation}"}},
            opponents={"base_url": server.url},
            engine={"kind": "scripted", "replies": [f"\\boxed{{{cell}}}" for cell in range(9)]},
            batch_size=16,
            run={"eval_games": 10, "output_dir": str(tmp_path)},
        )
        summary = run.start(learning_steps=1, num_collection_workers=8, num_eval_workers=2)
    assert 3 <= summary.void_games <= 10
    assert {evaluation.opponent for evaluation in summary.evaluations} == {REMOTE}
    printed = "".join(capfd.readouterr())
    assert re.search(rf"{REMOTE}'.*paused", printed)
    assert re.search(rf"{REMOTE}'.*again", printed)
    rows = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    (metrics,) = [row for row in rows if "opponents/requests" in row]
    assert 8 < metrics["opponents/requests"] <= len(server.bodies)
    assert metrics["opponents/failures"] == 7
    assert "is not known yet" in (summary.directory / "logs" / "orchestrator.log").read_text()
    texts = [path.read_bytes() for path in summary.directory.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in text for text in texts)
    assert KEY not in printed


IMPATIENT = """
from unstable_lite.games.players import openai_compatible as players
players.MAX_RETRIES, players.PAUSE_S, players.MAX_PAUSE_S, players.OUTAGE_S = 0, 0.1, 0.1, 1
"""
CONFIG = """
run = { learning_steps = 1, num_collection_workers = 8, num_eval_workers = 2, output_dir = "OUTPUT/outputs" }
engine = { kind = "scripted", replies = ["\\\\boxed{0}", "\\\\boxed{4}", "\\\\boxed{8}"] }
learner = { batch_size = 8, canary_tolerance = 1000000000.0 }
opponents = { base_url = "URL" }
league = { opponent_sampling_strategy = "fixed", fixed_opponents = ["vendor/model"] }
train_envs = [{ env_id = "TicTacToe-v0-train", num_players = 2, num_actors = 1 }]
"""


@pytest.mark.nightly
@pytest.mark.parametrize("fails", [False, True], ids=["a run that ends well", "a run that fails"])
def test_no_key_reaches_a_file_stream_or_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    for name in ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, KEY)
    config, children = tmp_path / "run.toml", dict[int, bytes]()
    limit = ["opponents.max_requests=6"] * fails  # then no opponent is left
    with serving() as server:

        def answer(body: dict[str, Any]) -> Answer:
            if fails or len(server.bodies) < 4:
                return 400, {"error": {"message": f"Authorization: Bearer {KEY}"}}
            return chat_reply(f"your key is {KEY}, my move \\boxed{{{random.randrange(9)}}}")

        server.answer = answer
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
        config.write_text(CONFIG.replace("URL", server.url).replace("OUTPUT", str(tmp_path)))
        process = runs.start_torchless("run", config, *limit, "--debug")
        while process.poll() is None and len(server.bodies) < 2:
            time.sleep(0.05)
        for child in runs.children_of(process) if process.poll() is None else []:
            children[child.pid] = Path(f"/proc/{child.pid}/environ").read_bytes()
            children[child.pid] += Path(f"/proc/{child.pid}/cmdline").read_bytes()
        code, out, err = runs.finish(process)
    assert (code != 0) == fails, out + err
    assert "Traceback" in err or not fails
    assert len(children) >= 2
    assert not any(KEY.encode() in what for what in children.values())
    (directory,) = (tmp_path / "outputs").glob("*/*")
    if not fails:
        assert "your key is <key>" in (directory / "games.jsonl").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in out + err
