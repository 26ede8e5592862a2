"""Side-car of a vLLM server that shares no folder with the run: receives adapters by HTTP, keeps them in a folder.

    ADAPTER_RECEIVER_API_KEY=… python -m unstable_lite.engines.vllm_server.sidecar --folder /adapters --port 8001

A client with the secret (`Authorization: Bearer …`) may send:

    PUT /adapters/NAME/adapter_config.json, then
    PUT /adapters/NAME/adapter_model.safetensors    → {"path": "/adapters/NAME", "digest": "…"}, once both are a whole
                                                      LoRA adapter; the digest is that of the files in the folder
    DELETE /adapters/NAME                           → {}, whether it was there or not
    GET /adapters                                   → {"adapters": ["NAME", …]}

Nothing else can be read or written: a name is letters, digits, `_`, `.` and `-`, a file is one of the two. Needs
aiohttp and safetensors, which vLLM needs too, and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from unstable_lite.adapters.peft_files import CONFIG, MAX_JSON_BYTES, WEIGHTS, adapter_digest
from unstable_lite.errors import AdapterError
from unstable_lite.games.api_keys import RECEIVER_KEY
from unstable_lite.printable import VisibleFormatter

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
MAX_ADAPTERS = 64
MAX_TOTAL_BYTES = 64 << 30
MAX_CONNECTIONS = 32
"""Limit on open connections; further ones are closed at once."""
PATIENCE_S = 60.0
"""Seconds for the first request of a connection with the secret, and for the next bytes of a body."""
BODY_S = 1800.0
"""Seconds for a whole body."""
CHUNK_BYTES = 1 << 20
_FILE = "|".join(map(re.escape, (CONFIG, WEIGHTS)))
_PLACE = re.compile(rf"/adapters/(\w[\w.-]{{0,199}})(?:/({_FILE}))?", re.ASCII)


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason


class _Closed(asyncio.Protocol):
    """Connection that is closed as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        log.warning("%s: closed, because there are too many connections", transport.get_extra_info("peername"))
        transport.close()


@dataclass
class AdapterReceiver:
    """HTTP server that keeps adapters in a folder."""

    folder: Path
    secret: str = field(repr=False)
    max_bytes: int = MAX_BYTES
    """Limit of a file."""
    max_adapters: int = MAX_ADAPTERS
    max_total_bytes: int = MAX_TOTAL_BYTES
    """Limit of all files. Beyond it, or `max_adapters`, the oldest adapters are removed."""
    max_connections: int = MAX_CONNECTIONS

    def __post_init__(self) -> None:
        assert self.secret, "without a secret every client could write"
        self.folder = self.folder.resolve()
        self._changing = asyncio.Lock()
        self._partials = itertools.count()
        self._known: set[Any] = set()
        """Connections younger than PATIENCE_S that have sent the secret."""

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Start to serve. Raises OSError, OverflowError or UnicodeError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        self._http = web.Server(self._answer, access_log=None, auto_decompress=False, keepalive_timeout=PATIENCE_S)
        return await loop.create_server(self._connect, host, port)

    async def close_connections(self) -> None:
        await self._http.shutdown()

    def adapters(self) -> list[Path]:
        """Return the directories of all adapters, the oldest first."""
        known = [
            path
            for path in self.folder.iterdir()
            if path.is_dir() and not path.is_symlink() and _PLACE.fullmatch(f"/adapters/{path.name}")
        ]
        return sorted(known, key=lambda path: path.stat().st_mtime_ns)

    def _connect(self) -> asyncio.Protocol:
        if len(self._http.connections) >= self.max_connections:
            return _Closed()
        connection = self._http()
        asyncio.get_running_loop().call_later(PATIENCE_S, self._close_unless_known, connection)
        return connection

    def _close_unless_known(self, connection: Any) -> None:
        if connection not in self._known:
            connection.force_close()
        self._known.discard(connection)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        methods = {"GET": self._list, "PUT": self._put, "DELETE": self._delete}
        try:
            self._check_secret(request)
            if (act := methods.get(request.method)) is None:
                raise _Refusal(405, f"{', '.join(methods)} are answered")
            status, answer = 200, await act(request)
        except _Refusal as refusal:
            status, answer = refusal.status, {"error": refusal.reason}
        except TimeoutError:
            status, answer = 408, {"error": "the body did not arrive in time"}
        except OSError as error:  # a full disk, or a client that disconnected
            status, answer = 507, {"error": f"{self.folder}: {error.strerror or error}"}
        log.info("%s %s %s: %s %s", request.remote, request.method, request.raw_path[:200], status, answer)
        response = web.json_response(answer, status=status)
        if status != 200:
            response.force_close()  # its body may not have been read
        return response

    def _check_secret(self, request: web.BaseRequest) -> None:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self.secret}".encode()):
            raise _Refusal(401, f"the secret of {RECEIVER_KEY} is required")
        self._known.add(request.protocol)

    def _place(self, request: web.BaseRequest, wants_file: bool) -> tuple[Path, str]:
        match = _PLACE.fullmatch(request.raw_path)
        if match is None or bool(match[2]) != wants_file:
            raise _Refusal(404, f"unknown path; known are /adapters/NAME/{CONFIG} and /adapters/NAME/{WEIGHTS}")
        directory = self.folder / match[1]
        if directory.is_symlink():
            raise _Refusal(409, f"{match[1]} is a link, which this server did not make")
        return directory, match[2] or ""

    async def _list(self, request: web.BaseRequest) -> dict[str, Any]:
        if request.raw_path != "/adapters":
            raise _Refusal(404, "unknown path; GET /adapters lists the adapters")
        return {"adapters": [path.name for path in self.adapters()]}

    async def _delete(self, request: web.BaseRequest) -> dict[str, Any]:
        directory, _ = self._place(request, wants_file=False)
        async with self._changing:
            if directory.is_dir():
                shutil.rmtree(directory)
        return {}

    async def _put(self, request: web.BaseRequest) -> dict[str, Any]:
        directory, file = self._place(request, wants_file=True)
        partial = self.folder / f".{directory.name}.{next(self._partials)}"
        try:
            async with asyncio.timeout(BODY_S):
                await self._receive(request, partial, MAX_JSON_BYTES if file == CONFIG else self.max_bytes)
            async with self._changing:
                self._evict_until_it_fits(directory, partial.stat().st_size)
                if file == CONFIG:
                    directory.mkdir(exist_ok=True)
                elif not directory.is_dir():
                    raise _Refusal(409, f"{CONFIG} comes first")
                partial.replace(directory / file)
                digest = {"digest": await self._check(directory)} if file == WEIGHTS else {}
        finally:
            partial.unlink(missing_ok=True)
        return {"path": str(directory)} | digest

    async def _receive(self, request: web.BaseRequest, partial: Path, max_bytes: int) -> None:
        length = request.content_length
        if length is None:
            raise _Refusal(411, "content-length is required")
        if length > max_bytes:
            raise _Refusal(413, f"{length} bytes; the limit is {max_bytes}")
        with partial.open("xb") as target:
            while True:
                async with asyncio.timeout(PATIENCE_S):
                    chunk = await request.content.read(CHUNK_BYTES)
                if not chunk:
                    return
                target.write(chunk)

    def _evict_until_it_fits(self, directory: Path, num_bytes: int) -> None:
        """Remove the oldest adapters until `num_bytes` more in `directory` are within the limits."""
        total = num_bytes + sum(map(_size_bytes, self.adapters()))
        known = [path for path in self.adapters() if path != directory]
        while known and (len(known) >= self.max_adapters or total > self.max_total_bytes):
            oldest = known.pop(0)
            total -= _size_bytes(oldest)
            limits = f"--max-adapters is {self.max_adapters}, --max-total-mb {self.max_total_bytes >> 20}"
            log.warning("%s is removed: %s", oldest.name, limits)
            shutil.rmtree(oldest)
        if total > self.max_total_bytes:
            raise _Refusal(413, f"{total} bytes in all; the limit is {self.max_total_bytes}")

    async def _check(self, directory: Path) -> str:
        """Return the digest of the adapter in `directory`; remove a directory without one."""
        try:
            return await asyncio.to_thread(adapter_digest, directory)
        except AdapterError as error:
            shutil.rmtree(directory)
            raise _Refusal(422, str(error)) from error


def _size_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m unstable_lite.engines.vllm_server.sidecar",
        description=f"Receives LoRA adapters by HTTP for the vLLM server beside it. The secret: {RECEIVER_KEY}.",
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the server reads them; both as one path")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8001, help="default: %(default)s")
    limits = {
        "--max-mb": (MAX_BYTES >> 20, "of one file"),
        "--max-adapters": (MAX_ADAPTERS, "the oldest goes"),
        "--max-total-mb": (MAX_TOTAL_BYTES >> 20, "limit of all adapters; the oldest are removed"),
    }
    for name, (default, meaning) in limits.items():
        parser.add_argument(name, type=int, default=default, help=f"{meaning} (default: %(default)s)")
    given = parser.parse_args()
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if not (secret := os.environ.get(RECEIVER_KEY)):
        parser.error(f"set the environment variable {RECEIVER_KEY} to a secret that the run also has")
    if not given.folder.is_dir() or not os.access(given.folder, os.W_OK | os.X_OK):
        parser.error(f"--folder {given.folder} is not a writable directory")
    if given.max_adapters < 1 or given.max_mb < 1 or given.max_total_mb < 1:
        parser.error("--max-adapters, --max-mb and --max-total-mb are at least 1")
    max_bytes, max_total_bytes = given.max_mb << 20, given.max_total_mb << 20
    receiver = AdapterReceiver(given.folder, secret, max_bytes, given.max_adapters, max_total_bytes)

    async def serve() -> None:
        try:
            server = await receiver.listen(given.host, given.port)
        except (OSError, OverflowError, UnicodeError) as error:
            parser.error(f"--host {given.host} --port {given.port} cannot be used: {error}")
        port = server.sockets[0].getsockname()[1]
        log.info("adapters for %s:%d go to %s", given.host, port, receiver.folder)
        await server.serve_forever()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
