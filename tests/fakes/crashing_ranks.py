"""Ranks that end by themselves: the second fails and reports it, the first loses its peer and ends sooner."""

import atexit
import os
import time
from pathlib import Path

from unstable_lite.errors import UnstableError
from unstable_lite.transport.worker_main import WorkerSocket, WorkerSpec


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    if spec.rank == 0:
        while not Path(spec.rendezvous).exists():
            time.sleep(0.01)
        time.sleep(0.5)
        raise ConnectionError("[/gloo/pair.cc:553] Connection closed by peer")
    atexit.register(time.sleep, 60)
    Path(spec.rendezvous).touch()
    if "OWN_CODE" in os.environ:
        raise KeyError("name")
    raise UnstableError("lower this or that")
