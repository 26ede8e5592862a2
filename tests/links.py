"""Links between a run and its workers that do what they are told to.

`other_host`: a host of its own for a worker, a network namespace whose packets this process carries; it loses, delays
and slows them down, or is cut. Needs root, `ip` and /dev/net/tun. `tunnel`: a port that leads to a run, or to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import queue
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
HERE, THERE = "10.203.7.1", "10.203.7.2"
NAMESPACE, NEAR, FAR = "unstable-lite", "ul-near", "ul-far"


def why_not() -> str | None:
    """Why no namespace can be made here, if none can."""
    if os.geteuid() != 0:
        return "network namespaces are root's to make"
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: iproute2)"
    if not TUN.exists():
        return f"there is no {TUN}"
    made = subprocess.run(["ip", "netns", "add", f"{NAMESPACE}-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"{NAMESPACE}-try"], capture_output=True)
    return made.stderr.strip() or None


@dataclass
class Link:
    """Between this host (`HERE`) and the other (`THERE`)."""

    loss: float = 0.0
    """Share of the packets that are lost, each way."""
    delay_s: float = 0.0
    bytes_per_s: float = 1e9
    is_cut: bool = False
    lost: int = 0
    carried: int = 0
    on_host: list[str] = field(default_factory=lambda: ["ip", "netns", "exec", NAMESPACE])
    """Before a command that is to run on the other host."""


@contextlib.contextmanager
def other_host() -> Iterator[Link]:
    link = Link()
    with contextlib.ExitStack() as made:
        _ip("netns", "add", NAMESPACE)
        made.callback(_ip, "netns", "del", NAMESPACE)
        near, far = _tun(NEAR), _tun(FAR)
        _ip("link", "set", FAR, "netns", NAMESPACE)
        _ip("addr", "add", f"{HERE}/30", "dev", NEAR)
        _ip("link", "set", NEAR, "up")
        _ip("-n", NAMESPACE, "addr", "add", f"{THERE}/30", "dev", FAR)
        _ip("-n", NAMESPACE, "link", "set", FAR, "up")
        _ip("-n", NAMESPACE, "link", "set", "lo", "up")
        over = threading.Event()
        carriers = [
            *_carry(link, near, far, over, random.Random(1)),
            *_carry(link, far, near, over, random.Random(2)),
        ]
        try:
            yield link
        finally:
            over.set()
            for carrier in carriers:
                carrier.join()
            os.close(near)
            os.close(far)


@dataclass
class Tunnel:
    """As `ssh -L` makes one: it is there whether its run is up or not."""

    endpoint: str = ""
    leads_to: str | None = None
    """The run's endpoint. None: who comes is hung up on."""
    bytes_to_come: float = math.inf
    """So many pass from the run to the worker; then it stalls, in this direction alone."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        if self.leads_to is None:
            writer.close()
            return
        run_reader, run_writer = await asyncio.open_connection("127.0.0.1", int(self.leads_to.rpartition(":")[2]))
        ways = [
            asyncio.create_task(self._pass_on(reader, run_writer)),
            asyncio.create_task(self._pass_on(run_reader, writer, is_to_worker=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            run_writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_to_worker: bool = False
    ) -> None:
        while data := await reader.read(65536):
            while is_to_worker and self.bytes_to_come < len(data):
                await asyncio.sleep(0.01)
            self.bytes_to_come -= len(data) * is_to_worker
            writer.write(data)
            await writer.drain()


@contextlib.asynccontextmanager
async def tunnel(leads_to: str | None) -> AsyncIterator[Tunnel]:
    made, connections = Tunnel(leads_to=leads_to), set[asyncio.Task[None]]()
    server = await asyncio.start_server(
        lambda reader, writer: connections.add(asyncio.create_task(made.serve(reader, writer))), "127.0.0.1", 0
    )
    made.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def _carry(
    link: Link, source: int, target: int, over: threading.Event, chance: random.Random
) -> tuple[threading.Thread, threading.Thread]:
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def take() -> None:
        free_at = 0.0
        while not over.is_set():
            try:
                packet = os.read(source, 65536)
            except BlockingIOError:
                time.sleep(0.001)
                continue
            if link.is_cut or chance.random() < link.loss:
                link.lost += 1
                continue
            free_at = max(free_at, time.monotonic()) + len(packet) / link.bytes_per_s
            under_way.put((free_at + link.delay_s, packet))

    def give() -> None:
        while not over.is_set():
            try:
                due, packet = under_way.get(timeout=0.1)
            except queue.Empty:
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            if not link.is_cut:
                with contextlib.suppress(OSError):  # its buffer is full: a packet is lost, as on any link
                    os.write(target, packet)
                    link.carried += len(packet)

    threads = threading.Thread(target=take), threading.Thread(target=give)
    for thread in threads:
        thread.start()
    return threads


def _tun(name: str) -> int:
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
