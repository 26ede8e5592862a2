"""The engine process: `python -m unstable_lite.engines.worker`.

One thread: drain the socket, submit, step, send what finished. Knows nothing of games or learners.
"""

from __future__ import annotations

import time
from pathlib import Path

from unstable_lite.engines.engine import Engine, load_engine
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.transport.child import WorkerSocket, WorkerSpec, run_worker
from unstable_lite.transport.messages import Done, Failed, Generate, LoadAdapter, Message, Ready, Stop, UnloadAdapter

STATS_EVERY_S = 1.0
IDLE_WAIT_S = 1.0


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    engine = load_engine(spec)
    socket.send(Ready(facts=engine.facts))
    next_stats = time.monotonic() + STATS_EVERY_S
    while True:
        messages = socket.receive(wait_s=0.0 if engine.has_unfinished() else IDLE_WAIT_S)
        if any(isinstance(message, Stop) for message in messages):
            return
        replies = [reply for message in messages if (reply := _handle(engine, message)) is not None]
        replies += engine.step()
        if time.monotonic() >= next_stats and engine.has_unfinished():
            replies.append(engine.stats())
            next_stats = time.monotonic() + STATS_EVERY_S
        socket.send(*replies)


def _handle(engine: Engine, message: Message) -> Message | None:
    """Take in one message; its reply, if it has one now."""
    assert isinstance(message, Generate | LoadAdapter | UnloadAdapter), message
    started = time.perf_counter()
    try:
        if isinstance(message, Generate):
            engine.add_request(message)
            return None
        if isinstance(message, LoadAdapter):
            engine.load_adapter(message.version, Path(message.path))
        else:
            engine.unload_adapter(message.version)
    except (RequestError, AdapterError) as error:
        return Failed(request_id=message.request_id, error=str(error))
    return Done(request_id=message.request_id, seconds=time.perf_counter() - started)


if __name__ == "__main__":
    run_worker(main)
