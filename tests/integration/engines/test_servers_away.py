"""A run on two vLLM servers of which one is away for a while: fake ones over real HTTP."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes import runs
from fakes.fake_vllm import serving
from fakes.http_servers import reserve_port

pytestmark = pytest.mark.nightly
CONFIG = """
model_name = "builtin:tiny"
learner = { batch_size = 12, canary_tolerance = 1e9 }  # the servers make their log-probabilities up
lora = { lora_rank = 8 }
alarms = { invalid_moves = { action = "off" } }
train_envs = [{ env_id = "Nim-v0-train", num_players = 2, num_actors = 2, prompt_template = "tiny" }]
[run]
learning_steps = 100000
num_collection_workers = 12
num_eval_workers = 0
eval_games = 0
max_restarts = 0
output_dir = "OUTPUT"
name = "away"
[engine]
kind = "vllm-server"
urls = ["FIRST", "SECOND"]
adapter_folder = "FOLDER"
max_generation_len = 16
max_model_len = 512
"""


class FakeServer:
    def __init__(self) -> None:
        self._port = reserve_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._up = contextlib.ExitStack()

    def start(self) -> None:
        self._up.enter_context(serving(self._port))

    def kill(self) -> None:
        self._up.close()


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    first, second = FakeServer(), FakeServer()
    yield first, second
    first.kill()
    second.kill()


def test_server_that_is_away_is_used_again_without_spending_restarts(
    servers: tuple[FakeServer, FakeServer], tmp_path: Path
) -> None:
    first, second = servers
    (tmp_path / "folder").mkdir()
    text = CONFIG.replace("OUTPUT", str(tmp_path / "outputs")).replace("FOLDER", str(tmp_path / "folder"))
    (config := tmp_path / "away.toml").write_text(text.replace("FIRST", first.url).replace("SECOND", second.url))
    first.start()
    process = runs.start_torchless("run", config, "algorithm=fakes.slow_learners:TakesAWhile")

    def until(condition: Callable[[], bool]) -> None:
        runs.wait_for(lambda: condition() or process.poll() is not None)
        assert process.poll() is None, process.communicate()

    def state(name: str) -> str:
        live = json.loads((runs.run_directory(tmp_path) / "live.json").read_text())
        return next(str(worker["state"]) for worker in live["workers"] if worker["name"] == name)

    def learns() -> None:
        before = runs.num_updates(tmp_path)
        until(lambda: runs.num_updates(tmp_path) >= before + 2)

    until(lambda: runs.num_updates(tmp_path) >= 1)
    assert (state("engine-0"), state("engine-1")) == ("ready", "starting")
    second.start()
    until(lambda: state("engine-1") == "ready")
    learns()
    second.kill()
    until(lambda: state("engine-1") != "ready")
    learns()
    second.start()
    until(lambda: state("engine-1") == "ready")
    learns()
    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process)
    assert code == 0, out + err
    assert "starting without engine-1" in out + err
    lines = (runs.run_directory(tmp_path) / "alarms.jsonl").read_text().splitlines()
    alarms = [json.loads(line)["text"] for line in lines]
    (away,) = [text for text in alarms if text.startswith("engine-1")]
    assert second.url in away and "waits for it" in away
