"""The orchestrator's side of the connection: one ROUTER for all workers, and request/reply over it.

Owns sockets and deadlines; knows nothing of games, tokens or adapters. Messages to one worker from one turn of the
event loop share a frame; no message is delayed to fill a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import itertools
import logging
import os
import platform
import shutil
import socket
import stat
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from unstable_lite.errors import NoRoomError, ProtocolError, RequestError, WorkerDied
from unstable_lite.transport.codec import MAX_FRAME_BYTES, decode, encode
from unstable_lite.transport.messages import REPLIES, Cancel, Crashed, Failed, Message, Ready, Reply, Request

log = logging.getLogger(__name__)

BUS = "bus"
SWEEP_EVERY_S = 0.1
"""Interval in seconds between two looks for overdue requests."""
WAITING_FRAMES = 1000
"""Limit of frames queued between the network and the event loop per connection; then the sender blocks."""
FRAMES_AT_ONCE = 1000
"""Frames read before the event loop continues, so that a flood of messages does not block other tasks."""
SOCKETS = f"ul-{zlib.crc32(platform.node().encode()):08x}-"
"""Prefix of the socket directories of this machine: others may share its directory for temporary files."""


def make_socket_directory() -> Path:
    """Create a private directory in the system's directory for temporary files.

    Its path is short, because an ipc path has at most 107 bytes. Its prefix differs from an arena's, because another
    run may remove it as a dead run's arena if temporary files are in shared memory.
    """
    directory = Path(tempfile.mkdtemp(prefix=SOCKETS))
    if len(os.fsencode(directory / BUS)) > zmq.IPC_PATH_MAX_LEN:  # TMPDIR of a batch system
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=SOCKETS, dir="/tmp"))
    return directory


def reap_stale_sockets() -> list[Path]:
    """Remove this user's socket directories on whose socket no process of this machine listens; return them."""
    reaped = []
    for directory in {*Path(tempfile.gettempdir()).glob(f"{SOCKETS}*"), *Path("/tmp").glob(f"{SOCKETS}*")}:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:  # another process removes it, too
            peer.setblocking(False)
            status, bus = directory.lstat(), directory / BUS
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and bus.is_socket()
            if is_own and peer.connect_ex(os.fspath(bus)) == errno.ECONNREFUSED:
                shutil.rmtree(directory)
                reaped.append(directory)
    return reaped


class Router:
    """ROUTER on an ipc endpoint in a private directory; passes each worker's messages to its `WorkerChannel`."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory / BUS}"
        self.dropped_frames = 0
        """Number of frames from unknown peers, malformed, or of another protocol version.

        Does not count a frame over MAX_FRAME_BYTES, because ZeroMQ closes the connection.
        """
        self._peers: dict[bytes, WorkerChannel | None] = {}
        """Channel by identity; None for a dead worker."""
        self._outgoing: dict[bytes, list[Message]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, WAITING_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.bind(self.endpoint)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self.receive_waiting)

    def expect(self, identity: bytes, channel: WorkerChannel | None) -> None:
        """Pass messages from this identity to `channel`; None ignores those that still arrive from a dead worker."""
        self._peers[identity] = channel

    def send(self, identity: bytes, message: Message) -> None:
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
            self._send_frame(identity, messages)
        # ZeroMQ's descriptor is edge-triggered: a send may have consumed the edge of a message that arrived.
        self.receive_waiting()

    def _send_frame(self, identity: bytes, messages: list[Message]) -> None:
        try:
            self._socket.send_multipart([identity, encode(messages)])
        except ProtocolError as error:
            if len(messages) > 1:  # only the messages that cannot be sent must fail
                for message in messages:
                    self._send_frame(identity, [message])
                return
            log.warning("%s to %r %s", type(messages[0]).__name__, identity, error)
            if (channel := self._peers.get(identity)) is not None:
                channel.fail(messages[0], error)

    def receive_waiting(self) -> None:
        """Pass the frames that have arrived to their channels."""
        if self._socket.closed:
            return
        for _ in range(FRAMES_AT_ONCE):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            channel = self._peers.get(identity)
            if channel is None and identity in self._peers:
                continue
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames from {identity[:40]!r} instead of one")
                if channel is None:
                    raise ProtocolError(f"a frame of {len(frames[0])} bytes from {identity[:40]!r}, an unknown worker")
                messages = decode(frames[0])
            except ProtocolError as error:
                self._drop(channel, error)
                continue
            for message in messages:
                try:
                    channel.receive(message)
                except ProtocolError as error:
                    self._drop(channel, error)
        self._loop.call_soon(self.receive_waiting)

    def _drop(self, channel: WorkerChannel | None, error: ProtocolError) -> None:
        self.dropped_frames += 1
        if self.dropped_frames.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …, so that a flood does not fill the log
            log.warning("dropped frame %d of this run: %s", self.dropped_frames, error)
        if channel is not None:  # the peer is of another version, or not a worker
            advice = "worker and orchestrator must run the same version of unstable_lite"
            _fail(channel.ready, ProtocolError(f"{channel.name}: {error}; {advice}"))


class WorkerState(enum.Enum):
    """State of a worker; its `WorkerChannel` owns it.

    STARTING → READY if the run begins with it, else RESTORING → READY ⇄ ASLEEP → RESTORING …; DEAD from any, then
    STARTING again.
    """

    STARTING = "starting"
    """The process starts and has not said that it is up."""
    RESTORING = "restoring"
    """The worker is up, late or after a death or a sleep, and gets its adapters or its state."""
    READY = "ready"
    """The worker is complete and accepts requests."""
    ASLEEP = "asleep"
    """The worker has released its device; requests wait until it wakes up."""
    DEAD = "dead"


class WorkerChannel:
    """Requests to one worker. Each gets exactly one reply, or an error at its deadline or at the worker's death."""

    def __init__(self, router: Router, name: str, on_message: Callable[[Message], None] | None = None) -> None:
        self.name = name
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.crash: Crashed | None = None
        self.identity = f"{name}.0".encode()
        """Identity of this worker process. A restart changes it, so messages never reach the wrong process."""
        self.state = WorkerState.STARTING
        self.life = 0
        """Number of workers of this name that died before the present one."""
        self._router = router
        self._on_message = on_message
        self._pending: dict[int, tuple[asyncio.Future[Any], float, type[Any]]] = {}
        """Future, deadline and expected type of each reply, by request id."""
        self._sweep: asyncio.TimerHandle | None = None
        self._ids = itertools.count(1)
        self._begins_with_run = True
        self._death: WorkerDied | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._busy_since = self._loop.time()
        router.expect(self.identity, self)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def is_dead(self) -> bool:
        return self.state is WorkerState.DEAD

    @property
    def is_up(self) -> bool:
        """Whether the worker may be asked."""
        return self.state is WorkerState.READY

    def mark_late(self) -> None:
        """Record that the run begins without this worker: once it is up, it must be restored before it is ready."""
        self._begins_with_run = False
        if self.is_up:
            self._enter(WorkerState.RESTORING)

    def mark_ready(self) -> None:
        """Record that the worker has its adapters or its state."""
        self._enter(WorkerState.READY)

    def mark_asleep(self) -> None:
        """Record that the worker is about to release its device."""
        if not self.is_dead:
            self._enter(WorkerState.ASLEEP)

    def mark_awake(self) -> None:
        """Record that the worker has its device again; it must be restored before it is ready."""
        if self.state is WorkerState.ASLEEP:
            self._enter(WorkerState.RESTORING)

    async def until_awake(self) -> None:
        """Wait while the worker is asleep; return as well if it dies."""
        while self.state is WorkerState.ASLEEP:
            await self._changed.wait()

    async def until_ready(self) -> None:
        """Wait until the worker may be asked."""
        while self.state is not WorkerState.READY:
            await self._changed.wait()

    async def wait_for_stall(self, limit_s: float, look_every_s: float) -> float:
        """Wait until a request is pending and the worker has been silent for `limit_s`. Return the silent seconds.

        A longer pause between two looks is this process's own, and the worker's messages may still be unread, so it
        counts for at most twice `look_every_s`.
        """
        silent_s = 0.0
        while silent_s <= limit_s:
            await asyncio.sleep(look_every_s)
            since_heard_s = self._loop.time() - max(self._heard_at, self._busy_since) if self._pending else 0.0
            silent_s = min(since_heard_s, silent_s + 2 * look_every_s)
        return silent_s

    def reset(self) -> None:
        """Prepare for a new worker under the name of a dead one; `ready` is pending again."""
        self.ready = self._loop.create_future()
        self.crash = None
        self._router.expect(self.identity, None)
        self.life += 1
        self._begins_with_run = False
        self.identity = f"{self.name}.{self.life}".encode()
        self._router.expect(self.identity, self)
        self._death = None
        self._enter(WorkerState.STARTING)

    def tell(self, message: Message) -> None:
        """Send a message that has no reply."""
        self._router.send(self.identity, message)

    def ask(self, message_type: Callable[..., Message], timeout_s: float, **fields: Any) -> asyncio.Future[Any]:
        """Send a request and return a future of its reply.

        The future raises RequestError if the worker replies `Failed` or not within `timeout_s`, and WorkerDied if the
        worker dies. Raises WorkerDied at once if the worker is already dead.
        """
        if self._death is not None:
            raise self._death
        request_id, now = next(self._ids), self._loop.time()
        reply: asyncio.Future[Any] = self._loop.create_future()
        if not self._pending:
            self._busy_since = now
        self._pending[request_id] = reply, now + timeout_s, REPLIES[message_type]
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_EVERY_S, self._fail_overdue)
        self._router.send(self.identity, message_type(request_id=request_id, **fields))
        return reply

    def cancel(self, reply: asyncio.Future[Any]) -> None:
        """Forget a request, given the future that `ask` returned, and ask the worker to drop it."""
        for request_id, (pending, *_) in self._pending.items():
            if pending is reply:
                del self._pending[request_id]
                self.tell(Cancel(request_id=request_id))
                return

    def receive(self, message: Message) -> None:
        """Handle a message. Raises ProtocolError if a reply is of the wrong type; its request stays pending."""
        self._heard_at = self._loop.time()
        if isinstance(message, Reply):
            if (waiting := self._pending.get(message.request_id)) is None:
                return  # the reply came after its deadline
            reply, _, expected = waiting
            if type(message) not in (expected, Failed):
                raise ProtocolError(f"the reply is {type(message).__name__}; expected {expected.__name__}")
            del self._pending[message.request_id]
            if reply.done():
                return  # the request's game was cancelled
            if isinstance(message, Failed):
                kind = NoRoomError if message.is_no_room else RequestError
                reply.set_exception(kind(f"{self.name}: {message.error}", reason=message.reason))
            else:
                reply.set_result(message)
        elif isinstance(message, Ready):
            if not self.ready.done():
                self.ready.set_result(message.info)
                self._enter(WorkerState.READY if self._begins_with_run else WorkerState.RESTORING)
        elif isinstance(message, Crashed):
            self.crash = message
        elif self._on_message is not None:
            self._on_message(message)

    def fail(self, message: Message, error: ProtocolError) -> None:
        """Fail the request of a message that could not be sent."""
        if isinstance(message, Request) and (waiting := self._pending.pop(message.request_id, None)) is not None:
            _fail(waiting[0], RequestError(f"{self.name}: {type(message).__name__} {error}"))

    def fail_all(self, error: WorkerDied) -> None:
        """Fail every pending and every later request with `error`, because the worker is dead."""
        self._death = error
        self._enter(WorkerState.DEAD)
        waiting, self._pending = self._pending, {}
        for reply in (self.ready, *(reply for reply, *_ in waiting.values())):
            _fail(reply, error)

    def _enter(self, state: WorkerState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail_overdue(self) -> None:
        """Fail overdue requests. They share one timer, because a timer each would cost more than the request."""
        self._router.receive_waiting()  # this process may have been blocked while replies waited in the socket
        now = self._loop.time()
        over = [(id_, reply) for id_, (reply, deadline, *_) in self._pending.items() if deadline <= now or reply.done()]
        for request_id, reply in over:
            del self._pending[request_id]
            _fail(reply, RequestError(f"{self.name}: no reply before its deadline"))
        self._sweep = self._loop.call_later(SWEEP_EVERY_S, self._fail_overdue) if self._pending else None


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    """Set an error, unless the future is done because its request's game was cancelled."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark as retrieved, because no task may be waiting
