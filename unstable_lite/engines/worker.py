"""Engine process: `python -m unstable_lite.transport unstable_lite.engines.worker`.

Owns the loop: receive messages, step the engine, send replies. Knows no library; only the engine's own module, loaded
here by its kind, does.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import cast

from unstable_lite.engines.base import Engine, SleepingEngine, load_engine
from unstable_lite.errors import MEMORY_ADVICE, AdapterError, ModelError, RequestError, is_out_of_memory
from unstable_lite.transport import messages
from unstable_lite.transport.messages import Message
from unstable_lite.transport.worker_main import WorkerSocket, WorkerSpec

log = logging.getLogger(__name__)

STATS_EVERY_S = 1.0
SLOW_STEP_S = 5.0
"""Time above which a step is reported in the worker's log (reference: `actor.py`)."""


def main(spec: WorkerSpec, socket: WorkerSocket) -> None:
    engine = load_engine(spec)
    if spec.config.engine.when_shared == "sleep" and not isinstance(engine, SleepingEngine):
        raise ModelError(
            f"engine.when_shared = 'sleep': {type(engine).__name__} has no sleep() and wake_up(); see engines/base.py"
        )
    try:
        socket.send(messages.Ready(info=engine.info))
        serve(engine, socket)
    finally:
        # Only engines with resources outside of their process have it.
        getattr(engine, "close", lambda: None)()


def serve(engine: Engine, socket: WorkerSocket) -> None:
    """Serve until `Stop`."""
    stats_due = time.monotonic() + STATS_EVERY_S

    def step() -> list[Message]:
        """Step the engine; return its replies, and statistics once a second: a silent worker counts as hung."""
        nonlocal stats_due
        started = time.monotonic()
        replies: list[Message] = [*engine.step()]
        if (took_s := time.monotonic() - started) > SLOW_STEP_S:
            log.warning("a step took %.1f s", took_s)
        if time.monotonic() >= stats_due:
            replies.append(engine.stats())
            stats_due = time.monotonic() + STATS_EVERY_S
        return replies

    while True:
        replies: list[Message] = []
        has_loaded = False
        for message in socket.receive(wait_s=0 if engine.has_unfinished() else STATS_EVERY_S):
            if isinstance(message, messages.Stop):
                return
            if isinstance(message, messages.Cancel):
                # An engine without it finishes the request, and the reply is dropped.
                getattr(engine, "cancel", lambda _request_id: None)(message.request_id)
                continue
            if isinstance(message, messages.LoadAdapter):
                if has_loaded and engine.has_unfinished():  # no request waits for more than one load and a step
                    replies += step()
                has_loaded = True
            if isinstance(message, messages.Sleep):
                while engine.has_unfinished():
                    socket.send(*replies, *step())
                    replies = []
            replies += _take(engine, message)
        if engine.has_unfinished():
            replies += step()
        socket.send(*replies)


def _take(engine: Engine, message: Message) -> list[Message]:
    """Pass one request to the engine; return the replies that exist already."""
    assert isinstance(message, messages.Request), message
    request_id, start = message.request_id, time.monotonic()
    try:
        match message:
            case messages.Generate():
                engine.add_request(message)
                return []
            case messages.LoadAdapter() | messages.ConfirmAdapter():
                if isinstance(message, messages.LoadAdapter):
                    digest = engine.load_adapter(message.version, Path(message.path))
                else:
                    digest = engine.confirm_adapter(message.version)
                seconds = time.monotonic() - start
                return [messages.AdapterDigest(request_id=request_id, seconds=seconds, digest=_checked(engine, digest))]
            case messages.UnloadAdapter():
                engine.unload_adapter(message.version)
            case messages.Sleep():
                cast(SleepingEngine, engine).sleep()
            case messages.WakeUp():
                cast(SleepingEngine, engine).wake_up()
            case _:
                raise AssertionError(message)
    except (RequestError, AdapterError) as error:
        return [messages.Failed(request_id=request_id, error=str(error), reason=error.reason)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return [messages.Failed(request_id=request_id, error=f"out of memory: {MEMORY_ADVICE} ({error})")]
    return [messages.Done(request_id=request_id)]


def _checked(engine: Engine, digest: object) -> str:
    if not isinstance(digest, str):
        raise RequestError(
            f"{type(engine).__name__} returned {digest!r:.99} where the digest of an adapter is expected; see "
            "load_adapter and confirm_adapter in engines/base.py"
        )
    return digest
