"""A whole run against a model behind an endpoint that fails at first."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import unstable_lite as unstable
from openai_server import Answer, said, serving

KEY = "sk-very-secret-key"
REMOTE = "vendor/model"


def test_a_run_outlives_an_endpoint_that_is_down_and_writes_its_key_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    env = {"env_id": "TicTacToe-v0-train", "num_players": 2, "prompt_template": "brief"}
    with serving() as server:

        def answer(body: dict[str, Any]) -> Answer:
            if len(server.bodies) < 8:
                return 401, {"error": {"message": f"{KEY} is not known yet"}}
            board = body["messages"][0]["content"].rpartition("Available Moves:")[2]
            return said("\\boxed{" + random.choice(re.findall(r"\[\d\]", board)) + "}")

        server.answer = answer
        run = unstable.build(
            train_envs=[unstable.TrainEnvSpec(**env, num_actors=1)],
            eval_envs=[unstable.EvalEnvSpec(**env, fixed_opponent=REMOTE)],
            opponent_sampling_strategy="fixed",
            fixed_opponents=["scripted:optimal", REMOTE],
            templates={"brief": {"user": "{observation}"}},
            opponents={"base_url": server.url, "pause_s": 0.1, "max_pause_s": 0.1},
            engine={"kind": "scripted", "replies": [f"\\boxed{{{cell}}}" for cell in range(9)]},
            learner={"canary_tolerance": 1e9},
            alarms={"mismatch": {"action": "off"}},
            batch_size=16,
            run={"eval_games": 10, "max_void_games": 2, "output_dir": str(tmp_path)},
        )
        summary = run.start(learning_steps=1, num_collection_workers=8, num_eval_workers=2)
    assert summary is not None
    assert 3 <= summary.void_games <= 10
    assert {evaluation.opponent for evaluation in summary.evaluations} == {REMOTE}
    said_aloud = "".join(capfd.readouterr())
    assert f"opponent '{REMOTE}' is paused" in said_aloud
    assert f"opponent '{REMOTE}' answers again" in said_aloud
    rows = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    (figures,) = [row for row in rows if "opponents/requests" in row]
    assert 8 < figures["opponents/requests"] <= len(server.bodies)
    assert figures["opponents/failures"] == 7
    assert "is not known yet" in (summary.directory / "logs" / "orchestrator.log").read_text()
    texts = [path.read_bytes() for path in summary.directory.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in text for text in texts)
    assert KEY not in said_aloud
