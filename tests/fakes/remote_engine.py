"""A real engine worker, with a minimal orchestrator side in plain ZeroMQ."""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from unstable_lite.config import Config
from unstable_lite.engines.base import Engine
from unstable_lite.transport.codec import decode, encode
from unstable_lite.transport.messages import Generate, Generated, LoadAdapter, Message, Stop, UnloadAdapter
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation

START_TIMEOUT_S = 240.0
REPLY_TIMEOUT_S = 120.0


def engine_spec(
    endpoint: str = "", device: str = "cpu", model: str = "", schedule: str = "async", **engine: Any
) -> WorkerSpec:
    config = Config.model_validate(
        {
            "model_name": model or "builtin:tiny",
            "engine": engine,
            "run": {"schedule": schedule},
            "lora": {"lora_rank": 16},
            "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )
    return WorkerSpec(
        name="engine-0", endpoint=endpoint, device=device, threads=1, config_json=config.model_dump_json()
    )


def generate(engine: Engine, *versions: int) -> list[Generation]:
    """Drive an engine within this process with one request for each version."""
    for number, version in enumerate(versions):
        engine.add_request(request(number, version))
    return finish(engine)


def request(number: int, version: int = 0, **changes: Any) -> Generate:
    """Return a request for a few tokens whose seed is its number; `changes` replaces fields."""
    fields = {
        "prompt": f"Player {number}, your move:",
        "max_tokens": 6,
        "temperature": 0.8,
        "top_p": 1.0,
        "stop": (),
        "seed": number,
    }
    return Generate(request_id=number, adapter_version=version, **{**fields, **changes})


def finish(engine: Engine) -> list[Generation]:
    """Step the engine until it is idle and return its generations in the order of their requests."""
    finished = {}
    while engine.has_unfinished():
        finished.update({done.request_id: done.generation for done in engine.step()})
    return [generation for _, generation in sorted(finished.items())]


class RemoteEngine:
    """The engine process and the orchestrator's end of its wire."""

    def __init__(self, device: str = "cpu", **engine: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ul-"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        endpoint = f"ipc://{self.directory}/bus"
        self._socket.bind(endpoint)
        self.log = self.directory / "log"
        visible = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unstable_lite.transport", "unstable_lite.engines.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(sys.path)}
                | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
                | visible,
            )
        self.process.stdin.write(engine_spec(endpoint, device, **engine).to_line().encode())
        self.process.stdin.flush()
        self._ids = itertools.count(1)
        self._versions = itertools.count(1)
        self.identity = b"engine-0"
        self.inbox: list[Message] = []

    def send(self, *messages: Message) -> None:
        self._socket.send_multipart([self.identity, encode(messages)])

    def wait_for(self, matches: Callable[[Message], bool], timeout_s: float = REPLY_TIMEOUT_S) -> Message:
        """Return the first message for which `matches` is true; others stay in the inbox."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, message in enumerate(self.inbox):
                if matches(message):
                    return self.inbox.pop(index)
            if not self._socket.poll(100):
                is_over = time.monotonic() > deadline or self.process.poll() is not None
                if is_over and not self._socket.poll(500):
                    raise AssertionError(f"no answer; the worker's log:\n{self.log.read_text()[-4000:]}")
                continue
            self.identity, frame = self._socket.recv_multipart()
            self.inbox += decode(frame)

    def wait_for_type(self, kind: type[Any], timeout_s: float = REPLY_TIMEOUT_S) -> Any:
        return self.wait_for(lambda message: isinstance(message, kind), timeout_s)

    def ask(self, *requests: Any) -> list[Any]:
        """Send requests in one frame and return the replies in the order of the requests."""
        self.send(*requests)
        ids = [request.request_id for request in requests]
        return [self.wait_for(lambda message, i=i: getattr(message, "request_id", None) == i) for i in ids]  # type: ignore[misc]

    def request(self, prompt: str, version: int = 0, **fields: Any) -> Generate:
        defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "stop": (), "seed": None}
        return Generate(request_id=next(self._ids), prompt=prompt, adapter_version=version, **(defaults | fields))

    def generate(self, *requests: Generate) -> list[Generation]:
        replies = self.ask(*requests)
        assert all(isinstance(reply, Generated) for reply in replies), replies
        return [reply.generation for reply in replies]

    def next_version(self) -> int:
        return next(self._versions)

    def load(self, version: int, path: Path) -> Any:
        return self.ask(LoadAdapter(request_id=next(self._ids), version=version, path=str(path)))[0]

    def unloading(self, version: int) -> UnloadAdapter:
        return UnloadAdapter(request_id=next(self._ids), version=version)

    def unload(self, version: int) -> Any:
        return self.ask(self.unloading(version))[0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(Stop())
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory)
