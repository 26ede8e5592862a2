"""An OpenAI-compatible server on loopback with an answer set by the test."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from fakes.http_servers import QuietHandler, http_server

Answer = tuple[int, Any]
"""Status and body: bytes are sent unchanged, anything else as JSON."""


def chat_reply(text: Any, finish_reason: str = "stop", **more: Any) -> Answer:
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    return 200, {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": usage,
    } | more


class Server:
    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda _body: chat_reply("\\boxed{4}")
        self.content_type = "application/json"
        self.content_encoding = "identity"
        self.location = ""
        """Location of a redirect."""
        self.has_length = True
        """Whether an answer states its length; otherwise it ends with its connection."""
        self.accepted: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = 0
        self.url = ""
        self.drip_s: float | None = None
        """Seconds from one byte of an endless answer to the next; None sends answers whole."""
        self._at_once = 0
        self._lock = threading.Lock()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            self.bodies.append(body)
            self.keys.append(handler.headers["authorization"])
            self.accepted.append(handler.headers["accept-encoding"])
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        status, answer = self.answer(body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with self._lock:
            self._at_once -= 1
        handler.send_response(status)
        handler.send_header("content-type", self.content_type)
        handler.send_header("content-encoding", self.content_encoding)
        if self.location:
            handler.send_header("location", self.location)
        if self.has_length:
            handler.send_header("content-length", str(10**6 if self.drip_s is not None else len(content)))
        else:
            handler.send_header("connection", "close")
        handler.send_header("retry-after-ms", "1")
        handler.end_headers()
        while self.drip_s is not None:
            handler.wfile.write(b" ")
            time.sleep(self.drip_s)
        handler.wfile.write(content)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            server.handle(self)

    with http_server(Handler) as url:
        server.url = f"{url}/v1"
        yield server
