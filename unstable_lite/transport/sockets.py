"""The orchestrator's side of the wire: one ROUTER for all workers, and request/reply over it.

Owns sockets and deadlines; knows nothing of games, tokens or adapters. Messages to one worker that queue up within
one turn of the event loop travel in one frame; nothing waits for company.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import zmq

from unstable_lite.errors import NoRoomError, ProtocolError, RequestError, WorkerDied
from unstable_lite.transport.messages import MAX_FRAME_BYTES, REPLIES, Crashed, Failed, Message, Ready, decode, encode

log = logging.getLogger(__name__)

BUS = "bus"
SWEEP_EVERY_S = 0.1
"""How late a request may be failed."""
WAITING_FRAMES = 1000
"""Of one connection at most, between the network and the event loop; then who sends has to wait."""
FRAMES_AT_ONCE = 1000
"""Then the event loop goes round: somebody who sends without end keeps nobody else from their turn."""


def make_socket_directory() -> Path:
    """A private one, in the system's place for what is temporary.

    Short, for an ipc path ends at 107 bytes; and not called like an arena, which another run may take for a dead run's
    where that place is shared memory.
    """
    directory = Path(tempfile.mkdtemp(prefix="ul-"))
    if len(os.fsencode(directory / BUS)) > zmq.IPC_PATH_MAX_LEN:  # a batch system's TMPDIR
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="ul-", dir="/tmp"))
    return directory


class Router:
    """Binds an ipc endpoint inside a private directory and hands each worker's messages to its `Peer`."""

    def __init__(self, directory: Path) -> None:
        self._open(f"ipc://{directory / BUS}")

    def _open(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.dropped_frames = 0
        """Frames from peers nobody expects, malformed, or of another protocol version.

        Of a frame over MAX_FRAME_BYTES nothing is taken: ZeroMQ breaks off the connection.
        """
        self._peers: dict[bytes, Peer | None] = {}
        """None: of workers that are dead."""
        self._outgoing: dict[bytes, list[Message]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, WAITING_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._secure()
        self._socket.bind(self.endpoint)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self.receive_waiting)

    def _secure(self) -> None:
        """Before the socket is bound. Only its owner reaches an ipc endpoint in a private directory."""

    def expect(self, identity: bytes, peer: Peer) -> None:
        """Messages of a worker with this identity are the peer's."""
        self._peers[identity] = peer

    def forget(self, identity: bytes) -> None:
        """Messages of this dead worker may still arrive; they concern nobody."""
        self._peers[identity] = None

    def send(self, identity: bytes, message: Message, is_large: bool = False) -> None:
        """What is large goes in a frame of its own: of one that is under way nothing is heard before its end."""
        if is_large:
            self._put(identity, encode([message]))
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.setdefault(identity, []).append(message)

    def close(self) -> None:
        self._flush()
        self._loop.remove_reader(self._socket.FD)
        self._context.destroy(linger=1000)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for identity, messages in outgoing.items():
            try:
                self._put(identity, encode(messages))
            except ProtocolError:
                self._send_singly(identity, messages)
        # ZeroMQ's descriptor is edge-triggered: a send may have swallowed the edge of something that arrived.
        self.receive_waiting()

    def _put(self, identity: bytes, frame: bytes) -> None:
        self._socket.send_multipart([identity, frame])

    def _send_singly(self, identity: bytes, messages: list[Message]) -> None:
        """What no frame can hold fails alone."""
        for message in messages:
            try:
                self._put(identity, encode([message]))
            except ProtocolError as error:
                log.warning("%s to %r %s", type(message).__name__, identity, error)
                if (peer := self._peers.get(identity)) is not None:
                    peer.fail(message, error)

    def receive_waiting(self) -> None:
        """Hand on what has arrived."""
        if self._socket.closed:
            return
        for _ in range(FRAMES_AT_ONCE):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            peer = self._peers.get(identity)
            if peer is None and identity in self._peers:
                continue
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames from {identity[:40]!r}, where one is a message")
                if peer is None:
                    self._take_from_stranger(identity, frames[0])
                    continue
                messages = decode(frames[0])
            except ProtocolError as error:
                self._drop(peer, error)
                continue
            for message in messages:
                try:
                    peer.receive(message)
                except ProtocolError as error:
                    self._drop(peer, error)
        self._loop.call_soon(self.receive_waiting)

    def _take_from_stranger(self, identity: bytes, frame: bytes) -> None:
        raise ProtocolError(f"a frame of {len(frame)} bytes from {identity[:40]!r}, whom nobody expects")

    def _drop(self, peer: Peer | None, error: ProtocolError) -> None:
        self.dropped_frames += 1
        if self.dropped_frames.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: whoever floods does not fill the log
            log.warning("dropped a frame, the %d. of this run: %s", self.dropped_frames, error)
        if peer is not None:
            peer.not_understood(error)


class Peer:
    """Requests to one worker: each gets exactly one reply, or an error at its deadline or at the worker's death."""

    def __init__(self, router: Router, name: str, on_message: Callable[[Message], None] | None = None) -> None:
        self.name = name
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.crash: Crashed | None = None
        self.identity = f"{name}.0".encode()
        """A worker's own: what one that died has sent or been sent is never another's."""
        self.unreachable = asyncio.Event()
        """What is sent to it no longer arrives; only a worker on another machine comes to that alive."""
        self.give_up: Callable[[str], NoReturn] | None = None
        """Part with it for this reason, by raising WorkerDied: what can be done with a worker on another machine."""
        self._restored_life = 0
        """The last life in which it was given what it should hold."""
        self.life = 0
        """How many workers of this name died before the present one."""
        self._router = router
        self._on_message = on_message
        self._pending: dict[int, tuple[asyncio.Future[Any], float, type[Any]]] = {}
        """By request id: who waits, until when, and for what."""
        self._sweep: asyncio.TimerHandle | None = None
        self._ids = itertools.count(1)
        self._dead: WorkerDied | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._busy_since = self._loop.time()
        router.expect(self.identity, self)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    @property
    def death(self) -> WorkerDied | None:
        """What it died of."""
        return self._dead

    @property
    def is_up(self) -> bool:
        """Whether it lives and holds what it should; from `revive` to `take_back` it lives, and does not yet."""
        return self._dead is None and self._restored_life == self.life

    def take_back(self) -> None:
        """It was given what the one that died had held."""
        self._restored_life = self.life

    def silent_for(self) -> float:
        """Seconds since the worker last said anything while it is waited for; 0 while it is not."""
        return self._loop.time() - max(self._heard_at, self._busy_since) if self._pending else 0.0

    async def fall_silent(self, limit_s: float, look_every_s: float) -> float:
        """Wait until the worker owes an answer and has said nothing for `limit_s`; returns for how long it has not.

        A longer pause between two looks is this process's own: what the worker said meanwhile is still to be read.
        """
        silent_s = 0.0
        while silent_s <= limit_s:
            await asyncio.sleep(look_every_s)
            silent_s = min(self.silent_for(), silent_s + 2 * look_every_s)
        return silent_s

    def revive(self, identity: bytes | None = None) -> None:
        """A new worker is about to start under the name of one that died; it will be `ready` in its turn.

        One from another machine comes with an `identity`.
        """
        self.ready = self._loop.create_future()
        self.crash = None
        self._router.forget(self.identity)
        self.life += 1
        self.identity = identity or f"{self.name}.{self.life}".encode()
        self.unreachable.clear()
        self._router.expect(self.identity, self)
        self._dead = None

    def tell(self, message: Message, is_large: bool = False) -> None:
        """Send something that has no reply."""
        self._router.send(self.identity, message, is_large)

    def ask(self, message_type: Callable[..., Message], timeout_s: float, **fields: Any) -> asyncio.Future[Any]:
        """Send a request; what is returned becomes its reply.

        RequestError if the worker answers `Failed` or does not answer within `timeout_s`; WorkerDied if it dies, and at
        once if it is gone.
        """
        if self._dead is not None:
            raise self._dead
        request_id, now = next(self._ids), self._loop.time()
        reply: asyncio.Future[Any] = self._loop.create_future()
        if not self._pending:
            self._busy_since = now
        self._pending[request_id] = reply, now + timeout_s, REPLIES[message_type]
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_EVERY_S, self._fail_overdue)
        self._router.send(self.identity, message_type(request_id=request_id, **fields))
        return reply

    def receive(self, message: Message) -> None:
        """Raises ProtocolError for a reply that does not answer what was asked; its request goes on waiting."""
        self._heard_at = self._loop.time()
        request_id: int | None = getattr(message, "request_id", None)
        if request_id is not None:
            if (waiting := self._pending.get(request_id)) is None:
                return  # it came after its deadline
            reply, _, expected = waiting
            if type(message) not in (expected, Failed):
                raise ProtocolError(f"{type(message).__name__} as a reply where {expected.__name__} is expected")
            del self._pending[request_id]
            if reply.done():
                return  # its game was cancelled
            if isinstance(message, Failed):
                kind = NoRoomError if message.is_no_room else RequestError
                reply.set_exception(kind(f"{self.name}: {message.error}"))
            else:
                reply.set_result(message)
        elif isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(message.facts)
        elif isinstance(message, Crashed):
            self.crash = message
        elif self._on_message is not None:
            self._on_message(message)

    def not_understood(self, error: ProtocolError) -> None:
        """It is of another version, or no worker at all: it will not be `ready`."""
        if not self.ready.done():
            advice = "worker and orchestrator must be of one and the same unstable_lite"
            self.ready.set_exception(ProtocolError(f"{self.name}: {error}; {advice}"))
            self.ready.exception()  # mark as retrieved: nobody may be waiting for it

    def fail(self, message: Message, error: ProtocolError) -> None:
        """What was asked could not be sent."""
        reply, *_ = self._pending.pop(getattr(message, "request_id", 0), (None,))
        if reply is not None and not reply.done():
            reply.set_exception(RequestError(f"{self.name}: {type(message).__name__} {error}"))

    def fail_all(self, error: WorkerDied) -> None:
        """The worker is gone: every waiting request ends with `error`, and so does every later one."""
        self._dead = error
        waiting, self._pending = self._pending, {}
        for reply in (self.ready, *(reply for reply, *_ in waiting.values())):
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # mark as retrieved: nobody may be waiting for `ready` any more

    def _fail_overdue(self) -> None:
        """One timer for all requests: a timer for each would cost more than the requests themselves."""
        self._router.receive_waiting()  # this process may have stood still, and replies wait in the socket
        now = self._loop.time()
        over = [(id_, reply) for id_, (reply, deadline, _) in self._pending.items() if deadline <= now or reply.done()]
        for request_id, reply in over:
            del self._pending[request_id]
            if not reply.done():  # else its game was cancelled
                reply.set_exception(RequestError(f"{self.name}: no reply before its deadline"))
        self._sweep = self._loop.call_later(SWEEP_EVERY_S, self._fail_overdue) if self._pending else None
