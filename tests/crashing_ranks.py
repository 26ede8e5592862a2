"""Ranks that end by themselves: the second one cannot go on and says so, the first one loses it and is gone sooner."""

from __future__ import annotations

import atexit
import time

from unstable_lite.errors import UnstableError
from unstable_lite.transport.child import WorkerSocket, WorkerSpec


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    if spec.rank == 0:
        time.sleep(0.5)
        raise RuntimeError("[/gloo/pair.cc:553] Connection closed by peer")
    atexit.register(time.sleep, 60)
    raise UnstableError("lower this or that")
