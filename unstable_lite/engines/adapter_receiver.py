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
import json
import logging
import os
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from unstable_lite.errors import AdapterError
from unstable_lite.games.api_keys import RECEIVER_KEY
from unstable_lite.outside_files import CONFIG, MAX_JSON_BYTES, WEIGHTS, adapter_digest

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
MAX_ADAPTERS = 64
PATIENCE_S = 60.0
"""For the next bytes of a request."""
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
    ) -> None:
        """`max_bytes`: of one file. Past `max_adapters` the oldest one goes."""
        assert secret, "without a secret anybody could write"
        self.folder = folder.resolve()
        self.secret = secret
        self.max_bytes = max_bytes
        self.max_adapters = max_adapters
        self.changing = threading.Lock()
        super().__init__(address, _Handler)

    def adapters(self) -> list[Path]:
        """The oldest first."""
        known = [path for path in self.folder.iterdir() if path.is_dir() and _PLACE.fullmatch(f"/adapters/{path.name}")]
        return sorted(known, key=lambda path: path.stat().st_mtime_ns)


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AdapterReceiver
    timeout = PATIENCE_S

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
        return self.server.folder / match[1], match[2] or ""

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
                if file == CONFIG:
                    self._make_room(directory)
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
        with partial.open("xb") as target:
            while left:
                chunk = self.rfile.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise _Refusal(400, f"{left} bytes are missing")
                target.write(chunk)
                left -= len(chunk)

    def _make_room(self, directory: Path) -> None:
        known = [path for path in self.server.adapters() if path != directory]
        for oldest in known[: max(0, len(known) + 1 - self.server.max_adapters)]:
            log.warning("%s goes: --max-adapters is %d", oldest.name, self.server.max_adapters)
            shutil.rmtree(oldest)

    def _check(self, directory: Path) -> str:
        """Return the digest of the adapter in `directory`; remove the directory if it holds none."""
        try:
            return adapter_digest(directory)
        except AdapterError as error:
            shutil.rmtree(directory)
            raise _Refusal(422, str(error)) from error


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
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not (secret := os.environ.get(RECEIVER_KEY)):
        parser.error(f"set the environment variable {RECEIVER_KEY} to a secret that the run knows, too")
    if not given.folder.is_dir() or not os.access(given.folder, os.W_OK | os.X_OK):
        parser.error(f"--folder {given.folder} is not a directory that can be written to")
    if given.max_adapters < 1 or given.max_mb < 1:
        parser.error("--max-adapters and --max-mb are at least 1")
    address = (given.host, given.port)
    try:
        receiver = AdapterReceiver(address, given.folder, secret, given.max_mb << 20, given.max_adapters)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        parser.error(f"--host {given.host} --port {given.port} cannot be listened at: {reason}")
    with receiver:
        log.info("adapters for %s:%d go to %s", given.host, receiver.server_address[1], receiver.folder)
        receiver.serve_forever()


if __name__ == "__main__":
    main()
