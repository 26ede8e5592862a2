"""The side-car of a vLLM server that shares no folder with the run: takes adapters by HTTP, keeps them in a folder.

    ADAPTER_RECEIVER_API_KEY=… python -m unstable_lite.engines.adapter_receiver --folder /adapters --port 8001

Whoever knows the secret (`Authorization: Bearer …`) may:

    PUT /adapters/NAME/adapter_config.json, then
    PUT /adapters/NAME/adapter_model.safetensors    → {"path": "/adapters/NAME", "digest": "…"}, once both are a whole
                                                      LoRA adapter; the digest is that of what lies in the folder
    DELETE /adapters/NAME                           → {}, whether it was there or not
    GET /adapters                                   → {"adapters": ["NAME", …]}

Nothing else can be read or written: a name is letters, digits, `_`, `.` and `-`, a file is one of the two. Needs the
standard library only, and no model.
"""

from __future__ import annotations

import argparse
import hmac
import io
import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from unstable_lite.errors import AdapterError
from unstable_lite.games.api_keys import RECEIVER_KEY
from unstable_lite.outside_files import CONFIG, MAX_JSON_BYTES, WEIGHTS, adapter_digest
from unstable_lite.visible_text import VisibleFormatter

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
MAX_ADAPTERS = 64
MAX_TOTAL_BYTES = 64 << 30
MAX_CONNECTIONS = 32
"""At once, a thread each. Further ones are closed: without the secret nobody holds one for longer than PATIENCE_S."""
PATIENCE_S = 60.0
"""Seconds for a whole request without its body, and for the next bytes of a body."""
BODY_S = 1800.0
"""Seconds for a whole body."""
CHUNK_BYTES = 1 << 20
_FILE = "|".join(map(re.escape, (CONFIG, WEIGHTS)))
_PLACE = re.compile(rf"/adapters/(\w[\w.-]{{0,199}})(?:/({_FILE}))?", re.ASCII)


class AdapterReceiver(ThreadingHTTPServer):
    """Serves from one thread a connection; `serve_forever` and `shutdown` as in the standard library."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        folder: Path,
        secret: str,
        max_bytes: int = MAX_BYTES,
        max_adapters: int = MAX_ADAPTERS,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """`max_bytes`: of one file. Past `max_adapters` or `max_total_bytes` the oldest adapters go."""
        assert secret, "without a secret anybody could write"
        self.folder = folder.resolve()
        self.secret = secret
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        self.max_total_bytes = max_total_bytes
        self._connections = threading.BoundedSemaphore(max_connections)
        self.changing = threading.Lock()
        super().__init__(address, _Handler)

    def adapters(self) -> list[Path]:
        """The oldest first."""
        known = [
            path
            for path in self.folder.iterdir()
            if path.is_dir() and not path.is_symlink() and _PLACE.fullmatch(f"/adapters/{path.name}")
        ]
        return sorted(known, key=lambda path: path.stat().st_mtime_ns)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            log.warning("%s: closed, because there are too many connections", client_address[0])
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that went away in one line, anything else with its traceback."""
        if isinstance(error := sys.exception(), ConnectionError | TimeoutError):
            log.info("%s: %s", client_address[0], error)
        else:
            super().handle_error(request, client_address)


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason


class _RequestReader(io.RawIOBase):
    """Reads from a socket until a deadline, however the bytes are spread over the time."""

    def __init__(self, connection: socket.socket) -> None:
        self.deadline = 0.0
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raise TimeoutError at the deadline, or if nothing comes for `PATIENCE_S`."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was not there in time")
        self._connection.settimeout(min(left, PATIENCE_S))
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(PATIENCE_S)  # of the answer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AdapterReceiver

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = _RequestReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.deadline = time.monotonic() + PATIENCE_S
        super().handle_one_request()

    def do_GET(self) -> None:
        self._answer(self._list)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: Any) -> None:
        log.info("%s %s", self.address_string(), format % args)

    def _answer(self, act: Any) -> None:
        try:
            self._check_secret()
            status, answer = 200, act()
        except _Refusal as refusal:
            status, answer = refusal.status, {"error": refusal.reason}
        except OSError as error:  # a full disk, or a client that went away
            status, answer = 507, {"error": f"{self.server.folder}: {error.strerror or error}"}
        if status != 200:
            log.warning("%s %s: %s %s", self.command, self.path[:200], status, answer["error"])
            self.close_connection = True  # its body may not have been read
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _check_secret(self) -> None:
        given = self.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.secret}".encode()):
            raise _Refusal(401, f"the secret of {RECEIVER_KEY} is asked for")

    def _place(self, wants_file: bool) -> tuple[Path, str]:
        match = _PLACE.fullmatch(self.path)
        if match is None or bool(match[2]) != wants_file:
            raise _Refusal(404, f"no such place; /adapters/NAME/{CONFIG} and /adapters/NAME/{WEIGHTS} are there")
        directory = self.server.folder / match[1]
        if directory.is_symlink():
            raise _Refusal(409, f"{match[1]} is a link, which somebody else made in the folder")
        return directory, match[2] or ""

    def _list(self) -> dict[str, Any]:
        if self.path != "/adapters":
            raise _Refusal(404, "no such place; GET /adapters lists what is here")
        return {"adapters": [path.name for path in self.server.adapters()]}

    def _delete(self) -> dict[str, Any]:
        directory, _ = self._place(wants_file=False)
        with self.server.changing:
            if directory.is_dir():
                shutil.rmtree(directory)
        return {}

    def _put(self) -> dict[str, Any]:
        directory, file = self._place(wants_file=True)
        partial = self.server.folder / f".{directory.name}.{threading.get_ident()}"
        try:
            self._receive(partial, MAX_JSON_BYTES if file == CONFIG else self.server.max_bytes)
            with self.server.changing:
                self._make_room(directory, partial.stat().st_size)
                if file == CONFIG:
                    directory.mkdir(exist_ok=True)
                elif not directory.is_dir():
                    raise _Refusal(409, f"{CONFIG} comes first")
                partial.replace(directory / file)
                digest = {"digest": self._check(directory)} if file == WEIGHTS else {}
        finally:
            partial.unlink(missing_ok=True)
        return {"path": str(directory)} | digest

    def _receive(self, partial: Path, max_bytes: int) -> None:
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 15:
            raise _Refusal(411, "content-length is asked for")
        left = int(length)
        if left > max_bytes:
            raise _Refusal(413, f"{left} bytes; the limit is {max_bytes}")
        self._reader.deadline = time.monotonic() + BODY_S
        with partial.open("xb") as target:
            while left:
                chunk = self.rfile.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise _Refusal(400, f"{left} bytes are missing")
                target.write(chunk)
                left -= len(chunk)

    def _make_room(self, directory: Path, num_bytes: int) -> None:
        """Remove the oldest adapters until `num_bytes` more in `directory` are within the limits."""
        server = self.server
        total = num_bytes + sum(map(_size_bytes, server.adapters()))
        known = [path for path in server.adapters() if path != directory]
        while known and (len(known) >= server.max_adapters or total > server.max_total_bytes):
            oldest = known.pop(0)
            total -= _size_bytes(oldest)
            limits = f"--max-adapters is {server.max_adapters}, --max-total-mb {server.max_total_bytes >> 20}"
            log.warning("%s goes: %s", oldest.name, limits)
            shutil.rmtree(oldest)
        if total > server.max_total_bytes:
            raise _Refusal(413, f"{total} bytes in all; the limit is {server.max_total_bytes}")

    def _check(self, directory: Path) -> str:
        """Return the digest of the adapter in `directory`; remove the directory if it holds none."""
        try:
            return adapter_digest(directory)
        except AdapterError as error:
            shutil.rmtree(directory)
            raise _Refusal(422, str(error)) from error


def _size_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m unstable_lite.engines.adapter_receiver",
        description=f"Takes LoRA adapters by HTTP for the vLLM server beside it. The secret: {RECEIVER_KEY}.",
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the server reads them; both as one path")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8001, help="default: %(default)s")
    parser.add_argument("--max-mb", type=int, default=MAX_BYTES >> 20, help="of one file (default: %(default)s)")
    parser.add_argument("--max-adapters", type=int, default=MAX_ADAPTERS, help="the oldest goes (default: %(default)s)")
    parser.add_argument(
        "--max-total-mb", type=int, default=MAX_TOTAL_BYTES >> 20, help="of all; the oldest go (default: %(default)s)"
    )
    given = parser.parse_args()
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if not (secret := os.environ.get(RECEIVER_KEY)):
        parser.error(f"set the environment variable {RECEIVER_KEY} to a secret that the run knows, too")
    if not given.folder.is_dir() or not os.access(given.folder, os.W_OK | os.X_OK):
        parser.error(f"--folder {given.folder} is not a directory that can be written to")
    if given.max_adapters < 1 or given.max_mb < 1 or given.max_total_mb < 1:
        parser.error("--max-adapters, --max-mb and --max-total-mb are at least 1")
    address = (given.host, given.port)
    try:
        max_bytes, max_total_bytes = given.max_mb << 20, given.max_total_mb << 20
        receiver = AdapterReceiver(address, given.folder, secret, max_bytes, given.max_adapters, max_total_bytes)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        parser.error(f"--host {given.host} --port {given.port} cannot be listened at: {reason}")
    with receiver:
        log.info("adapters for %s:%d go to %s", given.host, receiver.server_address[1], receiver.folder)
        receiver.serve_forever()


if __name__ == "__main__":
    main()
