"""An HTTP server on loopback, in a thread of this process, and ports for servers that start later."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def reserve_port() -> int:
    """Return a port that the system gives to no other process until this one ends.

    A server that sets SO_REUSEADDR can listen on it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port: int = holder.getsockname()[1]
    holder.detach()
    return port


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections alive and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent apart

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    """Ends its connections when it is closed, because their threads would keep answering."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._connections: list[Any] = []
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client has hung up, or this is the end
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


@contextlib.contextmanager
def http_server(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Serve on this port, or on a free one for 0; yield the address, without a path."""
    http = _Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
