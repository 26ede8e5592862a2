"""The worker on another machine: `unstable-lite worker`. It comes to a run, serves as an engine, and comes again.

Owns the link and the adapters that were fetched over it. The engine is that of any worker; it is made when the run has
said what for, and kept over a link that is cut, without the requests that came over it. A run that is another one, or
was started again, finds a fresh process.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket as hosts
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import zmq
from zmq.utils.monitor import parse_monitor_message

from unstable_lite.config import Config
from unstable_lite.engines.engine import Engine, ReturningEngine, load_engine
from unstable_lite.engines.worker import serve
from unstable_lite.errors import ProtocolError, UnstableError
from unstable_lite.transport.adapters import NO_ROOM, PART_BYTES, AdapterArena, reap_stale_arenas
from unstable_lite.transport.child import WorkerSocket, WorkerSpec, last_words
from unstable_lite.transport.door import HUNG_UP, REFUSALS
from unstable_lite.transport.keys import WorkerKeys
from unstable_lite.transport.messages import (
    AdapterDigest,
    AdapterPart,
    Alive,
    Done,
    Failed,
    FetchAdapter,
    Hello,
    LoadAdapter,
    Message,
    Ready,
    Rejoin,
    Stop,
    UnloadAdapter,
    Welcome,
)

LOOK_EVERY_S = 1.0
CONNECT_EVERY_S = 5.0
"""No sooner: the run may give this worker up for something that does not change, such as a full disk."""
PARTS_AHEAD = 8
"""Asked for before they are needed: a worker that is busy looks at what has arrived once a step."""


class LinkLost(Exception):
    """Nothing more comes or goes over this connection; why is in the message."""


class Link(WorkerSocket):
    """One connection to the run, from its making to the moment when it is lost."""

    def __init__(self, endpoint: str, keys: WorkerKeys) -> None:
        self.endpoint = endpoint
        self.is_connected = False
        self.was_hung_up_on = False
        """Somebody is there, and broke off before any key was judged."""
        self.silence_s = math.inf
        """So long without a frame, and the link is lost. To a worker that waits for a place the run sends nothing but
        pings: until then ZeroMQ goes by what they say, their TTL."""
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self._is_cut = False
        self._keys = keys
        super().__init__(endpoint, identity=uuid.uuid4().hex)

    def _secure(self) -> None:
        keys = self._keys
        self._socket.curve_serverkey = keys.run_public
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSALS | HUNG_UP
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[Message]:
        """Everything that has arrived, after waiting up to `wait_s` for something to arrive.

        Raises LinkLost once there is nothing more; UnstableError where the run does not admit this worker.
        """
        if not self._is_cut:
            self._poller.poll(int(wait_s * 1000))
        try:
            messages = self._arrived()
        except ProtocolError as error:
            raise UnstableError(f"{self.endpoint}: {error}; worker and run must be of one unstable_lite") from error
        self._look_at_events()
        self._count_silence(bool(messages))
        if self._is_cut and not messages:
            raise LinkLost("the link is cut")
        if any(isinstance(message, Rejoin) for message in messages):
            raise LinkLost("the run had given this worker up")
        if self._silent_s > self.silence_s:
            raise LinkLost(f"nothing has come for {self._silent_s:.0f} s (remote.silence_s = {self.silence_s:g})")
        return [message for message in messages if not isinstance(message, Alive)]

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=1000 if self.is_connected else 0)

    def _count_silence(self, has_come: bool) -> None:
        """A longer pause between two looks is this process's own: it may have stood still, and the network with it."""
        now = time.monotonic()
        self._silent_s = 0.0 if has_come else self._silent_s + min(now - self._looked_at, 2 * LOOK_EVERY_S)
        self._looked_at = now

    def _look_at_events(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
            elif event & REFUSALS:
                raise UnstableError(
                    f"{self.endpoint} refuses this worker's key: `run.key` must be that of the run, and this worker's "
                    "public key must be among the run's admitted ones when it starts"
                )
            elif event == HUNG_UP:
                self.was_hung_up_on = True
            elif self.is_connected:
                self.is_connected, self._is_cut = False, True


@dataclass(slots=True)
class _Fetch:
    """An adapter that is on its way."""

    load: LoadAdapter
    file: int = 0
    written: int = 0
    """Bytes of this file."""
    asked: int = 0
    """Where the next part begins that was not asked for; how long the file is nobody has said yet."""


class FetchingSocket:
    """The link as the engine's loop sees it: when an adapter is to be loaded, it is here already."""

    def __init__(self, link: Link, arena: AdapterArena, loaded: set[int], say: Callable[[str], None]) -> None:
        """`loaded`: the versions that the engine holds, kept up to date."""
        self._link = link
        self._arena = arena
        self._loaded = loaded
        self._say = say
        self._fetching: dict[int, _Fetch] = {}
        self._handed_on: dict[int, LoadAdapter | UnloadAdapter] = {}
        """By request, until the engine's reply."""

    def receive(self, wait_s: float) -> list[Message]:
        messages: list[Message] = []
        try:
            arrived = self._link.receive(wait_s)
        except LinkLost:
            for version in self._fetching:  # the run may have it no more when the link is back
                self._arena.unlink(version)
            raise
        for message in arrived:
            if isinstance(message, LoadAdapter):
                self._begin(message)
            elif isinstance(message, AdapterPart):
                messages += self._take(message)
            else:
                messages.append(message)
        handed_on = (message for message in messages if isinstance(message, (LoadAdapter, UnloadAdapter)))
        self._handed_on |= {message.request_id: message for message in handed_on}
        return messages

    def send(self, *messages: Message) -> None:
        for message in messages:
            asked = None
            if isinstance(message, (AdapterDigest, Done, Failed)):
                asked = self._handed_on.pop(message.request_id, None)
            if isinstance(message, AdapterDigest) and isinstance(asked, LoadAdapter):
                self._loaded.add(asked.version)
            elif isinstance(message, Done) and isinstance(asked, UnloadAdapter):
                self._loaded.discard(asked.version)
                self._arena.unlink(asked.version)
            elif isinstance(message, Failed) and isinstance(asked, LoadAdapter) and asked.version not in self._loaded:
                self._arena.unlink(asked.version)
        self._link.send(*messages)

    def _begin(self, load: LoadAdapter) -> None:
        self._arena.unlink(load.version)  # what came of it over a link that was cut
        self._fetching[load.version] = fetch = _Fetch(load)
        try:
            self._arena.path(load.version).mkdir()
        except OSError as error:
            self._cannot_write(load, error)
        else:
            self._ask_ahead(fetch)

    def _ask_ahead(self, fetch: _Fetch) -> None:
        offsets = range(fetch.asked, fetch.written + PARTS_AHEAD * PART_BYTES, PART_BYTES)
        self._link.send(*(FetchAdapter(version=fetch.load.version, file=fetch.file, offset=at) for at in offsets))
        fetch.asked += len(offsets) * PART_BYTES

    def _cannot_write(self, load: LoadAdapter, error: OSError) -> None:
        """Begin again in the fallback where shared memory is full; else the load has failed."""
        del self._fetching[load.version]
        self._arena.unlink(load.version)
        if error.errno in NO_ROOM and self._arena.fall_back():
            self._say(f"{error}. From now on adapters go through {self._arena.directory}")
            self._begin(load)
        else:
            self._link.send(Failed(request_id=load.request_id, error=f"adapter version {load.version}: {error}"))

    def _take(self, part: AdapterPart) -> list[Message]:
        """Write it and ask for more; with the last one, the request to load it from here."""
        fetch = self._fetching.get(part.version)
        if fetch is None or (part.file, part.offset) != (fetch.file, fetch.written):
            return []  # past the end of a file, or asked for before it was begun again
        load = fetch.load
        directory = self._arena.path(part.version)
        try:
            if not part.name or Path(part.name).name != part.name:
                raise FileNotFoundError(f"{self._link.endpoint} has it no more")
            with (directory / part.name).open("ab") as file:
                file.write(part.data)
        except OSError as error:
            self._cannot_write(load, error)
            return []
        if part.is_end:
            del self._fetching[part.version]
            return [replace(load, path=str(directory))]
        if part.is_end_of_file:
            fetch.file, fetch.written, fetch.asked = fetch.file + 1, 0, 0
        else:
            fetch.written += len(part.data)
        self._ask_ahead(fetch)
        return []


def work(
    endpoint: str, keys: WorkerKeys, device: str, threads: int, patience_s: float, say: Callable[[str], None]
) -> None:
    """Serve the run at `endpoint` until it is over.

    Raises UnstableError where it is not admitted, cannot reach the run for `patience_s`, or cannot serve.
    """
    for path in reap_stale_arenas():
        say(f"removed {path}, left behind by a process that was killed")
    with contextlib.ExitStack() as kept:
        fallback = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="ul-worker-")))
        arena = AdapterArena(f"worker-{uuid.uuid4().hex[:12]}", fallback, bytes_needed=0)
        kept.callback(arena.close)
        if arena.remark is not None:
            say(arena.remark)
        hello = Hello(host=hosts.gethostname(), device=device, run_token="")
        engine: Engine | None = None
        loaded: set[int] = set()
        while True:
            link, connected_at = Link(endpoint, keys), time.monotonic()
            try:
                welcome = _wait_for_place(link, hello, patience_s, say)
                if welcome is None:
                    return
                config = _config(link, welcome)
                link.silence_s = config.remote.silence_s
                if engine is None:
                    say(f"making the engine: {config.engine.kind}, {config.model_name}")
                    engine = _make_engine(link, welcome, device, config.engine.threads or threads)
                    hello = replace(hello, run_token=welcome.run_token)
                elif welcome.run_token != hello.run_token:
                    say("this is another run, or the same one started again: starting afresh")
                    link.close()
                    _start_afresh(kept)
                link.send(Ready(facts={**engine.facts, "adapters": sorted(loaded)}))
                say(f"serving as {welcome.name}")
                serve(engine, FetchingSocket(link, arena, loaded, say))
                return
            except LinkLost as lost:
                say(f"{lost}; connecting again")
                # What came over it is asked of others meanwhile, and another place's requests have the same ids.
                if isinstance(engine, ReturningEngine):
                    engine.forget_requests()
                if engine is not None and engine.has_unfinished():
                    say(f"{type(engine).__name__} keeps its requests, see engines/engine.py: starting afresh")
                    link.close()
                    _start_afresh(kept)
            except Exception as error:
                if link.is_connected:  # to a run that refuses it nothing can be sent, and trying would block
                    link.send(last_words(error))
                raise
            finally:
                link.close()
            time.sleep(max(0.0, connected_at + CONNECT_EVERY_S - time.monotonic()))


def _start_afresh(kept: contextlib.ExitStack) -> NoReturn:
    kept.close()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _wait_for_place(link: Link, hello: Hello, patience_s: float, say: Callable[[str], None]) -> Welcome | None:
    """None: the run is over, and there will be none."""
    say(f"connecting to {link.endpoint}")
    link.send(hello)
    deadline, was_connected = time.monotonic() + patience_s, False
    while link.is_connected or time.monotonic() < deadline:
        for message in link.receive(LOOK_EVERY_S):
            if isinstance(message, Welcome):
                return message
            if isinstance(message, Stop):
                return None
        if link.is_connected and not was_connected:
            was_connected = True
            say("connected; waiting for a place")
    reason = "is the run there, is the port open?"
    if link.was_hung_up_on:
        reason = (
            "who is there breaks off at once. Either the run is not up behind it (a tunnel, a load balancer), or this "
            "worker's `run.key` is not that of the run"
        )
    raise UnstableError(f"{link.endpoint} could not be reached for {patience_s:g} s: {reason}")


def _config(link: Link, welcome: Welcome) -> Config:
    try:
        return Config.model_validate_json(welcome.config_json)
    except ValueError as error:
        raise UnstableError(f"{link.endpoint}: its config is not one of this unstable_lite: {error}") from error


def _make_engine(link: Link, welcome: Welcome, device: str, threads: int) -> Engine:
    return load_engine(
        WorkerSpec(
            name=welcome.name,
            endpoint=link.endpoint,
            device="cpu" if device == "cpu" else "cuda:0",
            threads=threads,
            config_json=welcome.config_json,
            goes_on=True,
        )
    )
