"""The worker's side of the connection, and the code around every worker's `main`.

A worker is a fresh interpreter. The first line of its stdin is its spec. Stdin then stays open while the orchestrator
lives, so end-of-file means that the worker is orphaned, and it exits at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
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
from unstable_lite.errors import MEMORY_ADVICE, MISTAKES, UnstableError, described, is_out_of_memory, users_frame
from unstable_lite.transport.codec import MAX_FRAME_BYTES, decode, encode
from unstable_lite.transport.messages import Crashed, Message

DUMP_STACKS = signal.SIGQUIT
"""Signal that makes a worker write its threads' stacks to its log, even in the middle of a computation."""
ORPHANED = 70
"""Exit code of a worker whose orchestrator is gone."""
_BETWEEN_RANKS = ("/torch/distributed/", "/unstable_lite/learner/distributed.py")
"""Files in which a learner's rank fails because another one has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Spec of a worker, sent as the first line of its stdin."""

    name: str
    """Name such as `engine-0` or `learner`, also used for the log."""
    endpoint: str
    identity: str = ""
    """ZeroMQ identity; default: the name."""
    device: str
    """`cpu`, or `cuda:0` within the worker's CUDA_VISIBLE_DEVICES, or the URL of the server that it uses."""
    threads: int
    config_json: str
    is_restart: bool = False
    """Whether an earlier worker of the run may have had this name; its random draws must not be repeated."""
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""
    """Rendezvous file of the ranks on one machine."""

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def config(self) -> Config:
        return Config.model_validate_json(self.config_json)


class WorkerSocket:
    """DEALER socket that sends and receives messages instead of bytes."""

    def __init__(self, endpoint: str, identity: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.connect(endpoint)

    def receive(self, wait_s: float) -> list[Message]:
        """Return all messages that have arrived, after waiting up to `wait_s` for the first one."""
        messages: list[Message] = []
        if self._socket.poll(int(wait_s * 1000)):
            with contextlib.suppress(zmq.Again):
                while True:
                    messages += decode(self._socket.recv(zmq.NOBLOCK))
        return messages

    def send(self, *messages: Message) -> None:
        """Send `messages` in one frame, without blocking."""
        if messages:
            self.send_frame(encode(messages))

    def send_frame(self, frame: bytes) -> None:
        """Send messages that are already encoded, without blocking."""
        self._socket.send(frame)

    def close(self) -> None:
        self._context.destroy(linger=1000)


def run_worker(module: str) -> None:
    """Read the spec, start the orphan guard, run `main(spec, socket)` of `module`.

    The guard comes before the import, because importing takes long. An exception is sent and logged; the exit code is
    then 1.
    """
    spec = WorkerSpec(**json.loads(sys.stdin.readline()))
    faulthandler.register(DUMP_STACKS, all_threads=True)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # a batch system sends them to all processes of a job
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_exit_when_orphaned, daemon=True).start()
    socket = WorkerSocket(spec.endpoint, spec.identity or spec.name)
    try:
        gc.disable()  # imports stay; searching them for garbage was a third of a learner's imports
        main = importlib.import_module(module).main
        gc.enable()
        main(spec, socket)
    except Exception as error:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
        socket.send(last_words(error))
        socket.close()
        sys.exit(1)
    socket.close()


def last_words(error: Exception) -> Crashed:
    """Return the last message of a worker that ends with `error`."""
    is_ours = isinstance(error, UnstableError)
    reason = f"{type(error).__name__}: {error}" if is_ours else described(error, is_ours_shown=True)
    if is_out_of_memory(error):
        reason += f"\n(out of memory: {MEMORY_ADVICE})"
    return Crashed(error=reason, is_final=is_ours, is_away=isinstance(error, ConnectionError), place=_place(error))


def _place(error: Exception) -> str:
    """Return `Crashed.place`. Empty if the reason may be a disk, a network, memory, or another rank that died."""
    frames, frame = traceback.extract_tb(error.__traceback__), users_frame(error)
    is_outside = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    is_of_ranks = any(part in frame.filename for frame in frames for part in _BETWEEN_RANKS)
    if frame is None and isinstance(error, MISTAKES) and "/unstable_lite/" in frames[-1].filename:
        frame = frames[-1]
    may_pass = is_outside or is_of_ranks or is_out_of_memory(error)
    return f"{type(error).__qualname__} {frame.filename}:{frame.lineno}" if frame and not may_pass else ""


def _exit_when_orphaned() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED)
