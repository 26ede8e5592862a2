"""The worker's side of the wire, and the frame around every worker's main function.

A worker is a fresh interpreter. Its first line on stdin says who it is; stdin then stays open for as long as the
orchestrator lives, so that end-of-file means "you are an orphan": the worker exits at once, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass

import zmq

from unstable_lite.config import Config
from unstable_lite.errors import MEMORY_ADVICE, UnstableError, is_out_of_memory
from unstable_lite.transport.messages import MAX_FRAME_BYTES, Crashed, Message, decode, encode

DUMP_STACKS = signal.SIGUSR1
"""Makes a worker write the stacks of its threads to its log, even in the middle of a computation."""
ORPHANED = 70
"""Exit code of a worker whose orchestrator is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker is told on its first line of stdin."""

    name: str
    """`engine-0`, `learner`: also the name of its log."""
    endpoint: str
    identity: str = ""
    """On the wire; default: the name."""
    device: str
    """`cpu`, or `cuda:0` within the worker's own CUDA_VISIBLE_DEVICES, or the URL of the server that it talks to."""
    threads: int
    config_json: str
    goes_on: bool = False
    """Whether it may not be the first of its name in its run: what that one drew from the run's seed, it is not to draw
    again."""
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""
    """A file that ranks of one machine meet through."""

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def config(self) -> Config:
        return Config.model_validate_json(self.config_json)


class WorkerSocket:
    """A DEALER that speaks messages instead of bytes."""

    def __init__(self, endpoint: str, identity: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._secure()
        self._socket.connect(endpoint)

    def _secure(self) -> None:
        """Before the socket is connected. Only its owner reaches an ipc endpoint in a private directory."""

    def receive(self, wait_s: float) -> list[Message]:
        """Everything that has arrived, after waiting up to `wait_s` for something to arrive."""
        return self._arrived() if self._socket.poll(int(wait_s * 1000)) else []

    def _arrived(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                messages += decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    def send(self, *messages: Message) -> None:
        """All of `messages` in one frame; does not block."""
        if messages:
            self._socket.send(encode(messages))

    def close(self) -> None:
        self._context.destroy(linger=1000)


def run_worker(module: str) -> None:
    """Read the spec, guard against being orphaned, run `main(spec, socket)` of `module`.

    In this order, because importing takes long. A failure is sent, logged, and exits with 1.
    """
    spec = WorkerSpec(**json.loads(sys.stdin.readline()))
    faulthandler.register(DUMP_STACKS, all_threads=True)
    threading.Thread(target=_exit_when_orphaned, daemon=True).start()
    socket = WorkerSocket(spec.endpoint, spec.identity or spec.name)
    try:
        importlib.import_module(module).main(spec, socket)
    except Exception as error:
        with contextlib.suppress(OSError):  # its log may be on a full disk
            traceback.print_exc()
        socket.send(last_words(error))
        socket.close()
        sys.exit(1)
    socket.close()


def last_words(error: Exception) -> Crashed:
    """Of a worker that ends with `error`."""
    reason = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        reason += f"\n(out of memory: {MEMORY_ADVICE})"
    return Crashed(error=reason, is_final=isinstance(error, UnstableError))


def _exit_when_orphaned() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED)
