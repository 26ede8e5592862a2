"""Where workers on other machines come in: one tcp port with CURVE on it, and a place for each that may work.

Without a key that the run admits nothing is answered. A worker that comes says `Hello`, waits for a free place, and is
then a `Peer` like those that the run started itself; when its link is cut it is dead for the run, and comes again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, ProtocolError, WorkerDied
from unstable_lite.transport.keys import RunKeys
from unstable_lite.transport.messages import Alive, Hello, Rejoin, Stop, Welcome, decode
from unstable_lite.transport.sockets import Peer, Router

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 1.0
"""Or more often: a worker that has a place is to tell a quiet run from a silent link, by remote.silence_s."""
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HUNG_UP = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""The other end broke off before any key was judged: it does so to one that it cannot read, too."""


class Door(Router):
    """A ROUTER on tcp."""

    def __init__(self, endpoint: str, keys: RunKeys, silence_s: float) -> None:
        """Raises ConfigError where `endpoint` cannot be bound."""
        self.refused = 0
        """Connections without a key that is admitted."""
        self.run_token = secrets.token_hex(16)
        self.alive_every_s = min(ALIVE_EVERY_S, silence_s / 5)
        self._keys = keys
        self._silence_ms = round(1000 * silence_s)
        self._waiting: deque[tuple[bytes, Hello]] = deque()
        self._not_understood: set[bytes] = set()
        """Who was told."""
        self._came = asyncio.Event()
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._open(endpoint)
        except zmq.ZMQError as error:
            self._end_guard()
            raise ConfigError(f"remote.bind = {endpoint!r}: {error.strerror}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._monitor = self._socket.get_monitor_socket(REFUSALS | HUNG_UP)
        self._loop.add_reader(self._monitor.FD, self._count_refused)
        self._count_refused()  # the descriptor says nothing before its socket has been looked at

    async def next_worker(self) -> tuple[bytes, Hello]:
        """Who has waited longest."""
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        return self._waiting.popleft()

    def close(self) -> None:
        for identity, _ in self._waiting:
            self.send(identity, Stop())
        self._flush()
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._end_guard()
        super().close()

    def _secure(self) -> None:
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(location=str(self._keys.admitted))
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self._keys.public, self._keys.secret
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # ZeroMQ's own heartbeat, from its own thread, however busy either side is. TTL asks the same of a worker, as
        # long as pings are all that comes to it: one that waits for a place.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, self._silence_ms // 5)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._silence_ms)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, self._silence_ms)

    def _end_guard(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def _put(self, identity: bytes, frame: bytes) -> None:
        try:
            super()._put(identity, frame)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            if (peer := self._peers.get(identity)) is not None:
                peer.unreachable.set()

    def _take_from_stranger(self, identity: bytes, frame: bytes) -> None:
        try:
            messages = decode(frame)
        except ProtocolError:
            # Whatever the answer, a worker of another version reads no more in it than that, and ends. One will do.
            if identity not in self._not_understood:
                self._not_understood.add(identity)
                self.send(identity, Rejoin())
            raise
        match messages:
            case [Hello() as hello]:
                self._waiting.append((identity, hello))
            case _:
                raise ProtocolError(f"a frame of {len(frame)} bytes from {identity[:40]!r}, who has not said hello")
        self._came.set()

    def _count_refused(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            self.refused += 1
            if self.refused.bit_count() == 1:
                log.warning(
                    "refused a connection to %s, the %d. of this run: %s",
                    self.endpoint,
                    self.refused,
                    zmq.Event(event["event"]).name,
                )


class RemoteWorker:
    """A place for a worker on another machine, empty or taken: what a `WorkerProcess` is to one of this machine."""

    def __init__(self, door: Door, peer: Peer, config: Config, holds: Callable[[Iterable[int]], None]) -> None:
        """`holds`: is told which adapter versions a worker that comes has loaded, from before its link was cut."""
        self.peer = peer
        self.where = "nowhere"
        """Host and device of who is there, or was last."""
        self._door = door
        self._config_json = config.model_dump_json()
        self._start_timeout_s = config.engine.start_timeout_s
        self._stall_timeout_s = config.engine.stall_timeout_s
        self._holds = holds
        peer.give_up = self.give_up
        peer.fail_all(WorkerDied(f"{peer.name}: no worker has come yet"))

    async def take_one(self, say: Callable[[str], None]) -> dict[str, Any]:
        """The facts of a worker that has come and made its engine. It is not `up` before it holds what it should."""
        while True:
            try:
                facts = await self._take_next()
            except (WorkerDied, ProtocolError) as error:
                say(f"{error}; its place is free")
            else:
                self._holds(facts["adapters"])
                return facts

    async def _take_next(self) -> dict[str, Any]:
        """Raises WorkerDied where it leaves before its engine is made, or takes too long to make it."""
        identity, hello = await self._door.next_worker()
        self.where = f"{hello.host}, {hello.device}"
        self.peer.revive(identity)
        self.peer.tell(Welcome(name=self.peer.name, run_token=self._door.run_token, config_json=self._config_json))
        leaving = asyncio.create_task(self.watch())
        either: set[asyncio.Future[Any]] = {leaving, self.peer.ready}
        try:
            await asyncio.wait(either, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                leaving.result()
            if not self.peer.ready.done():
                self.give_up(f"was not up after start_timeout_s = {self._start_timeout_s:g}")
            return self.peer.ready.result()
        finally:
            leaving.cancel()

    async def watch(self) -> NoReturn:
        """Raise WorkerDied when the worker is gone, or is waited for and silent for too long."""
        silence = asyncio.ensure_future(
            self.peer.fall_silent(self._stall_timeout_s, look_every_s=self._stall_timeout_s / 10)
        )
        try:
            while True:
                if self.peer.death is not None:  # whoever asked it gave it up
                    raise self.peer.death
                if self.peer.crash is not None:
                    self.give_up(self.peer.crash.error)
                if silence.done():
                    self.give_up(f"is waited for and has said nothing for {silence.result():.0f} s")
                if self.peer.unreachable.is_set():
                    self.give_up("cannot be reached any more")
                self.peer.tell(Alive())
                await asyncio.wait({silence}, timeout=self._door.alive_every_s)
        finally:
            silence.cancel()

    def give_up(self, reason: str) -> NoReturn:
        """What is asked of it fails, and whoever is there may come again. Raises WorkerDied."""
        self.peer.tell(Rejoin())
        death = WorkerDied(f"{self.peer.name} ({self.where}) {reason}")
        self.peer.fail_all(death)
        raise death

    def stop(self) -> None:
        """Whoever is there is to go, and not to come again."""
        if not self.peer.is_dead:
            self.peer.tell(Stop())
            self.peer.fail_all(WorkerDied(f"{self.peer.name} ({self.where}) was sent away"))
