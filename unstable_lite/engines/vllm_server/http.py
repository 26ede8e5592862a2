"""HTTP with a vLLM server or its side-car: retries, limits, and errors that name the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import reprlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from unstable_lite.errors import RequestError

T = TypeVar("T")

RETRY_AFTER_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses after a transient failure; after the last attempt the server counts as gone."""
BUSY = frozenset({429, 502, 503, 504})
KEEP_ALIVE_S = 4.0
"""Time for which an idle connection is kept; less than a server's, so that none closes while a request is sent."""
MAX_ANSWER_BYTES = 1 << 26


class Refused(RequestError):
    """A server's answer with the status of an error."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"{url} answers {status}: {reason}")


class Server:
    """HTTP client of one server. Every error names the URL; none contains the key."""

    def __init__(self, url: str, key_variable: str) -> None:
        self.url = url
        self.heard_at = time.monotonic()
        self._key_variable = key_variable
        self._key = os.environ.get(key_variable, "")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, kind: type[T], method: str, path: str, body: Any = None, **how: Any) -> T:
        """Return the JSON of the answer as `kind`; see `send`. Raises RequestError if it is not of that type."""
        content = await self.send(method, path, body, **how)
        try:
            return msgspec.convert(json.loads(content), kind)
        except (ValueError, RecursionError) as error:
            unexpected = f"answered with something that is not the JSON expected ({str(error)[:300]})"
            raise RequestError(
                f"{self.url}{path} {self.without_key(f'{unexpected}: {reprlib.repr(content)}')}"
            ) from None

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        file: Path | None = None,
        may_pass: frozenset[int] = BUSY,
        retry_after_s: Sequence[float] | None = None,
    ) -> bytes:
        """Return the content of the answer.

        Retries connection errors and the statuses `may_pass`. Raises Refused for the status of an error,
        ConnectionError without an answer.
        """
        for wait_s in (*(RETRY_AFTER_S if retry_after_s is None else retry_after_s), None):
            try:
                async with self._sent(method, path, body, file) as response:
                    status, content = response.status, await self._read(response)
            except aiohttp.ClientConnectorError as error:
                raise ConnectionError(f"{self.url} cannot be reached: {error}") from None
            except (aiohttp.ClientError, ConnectionError) as error:
                status, reason = 0, f"{type(error).__name__}: {error}"
            else:
                self.heard_at = time.monotonic()
                if status in (200, 201):
                    return content
                reason = self.without_key(_message(content))
                if status in (401, 403):
                    reason += f" (its key is taken from the environment variable {self._key_variable})"
                if status not in may_pass:
                    raise Refused(self.url, status, reason)
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        if status and status not in BUSY:
            raise Refused(self.url, status, reason)
        raise ConnectionError(f"{self.url} does not answer: {f'{status} ' * bool(status)}{reason}")

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Any, file: Path | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        with contextlib.ExitStack() as files:
            content: dict[str, Any] = {"json": body} if file is None else {"data": files.enter_context(file.open("rb"))}
            if self._session is None:
                self._session = self._open()
            # A redirection would send the key to its target.
            async with self._session.request(method, self.url + path, allow_redirects=False, **content) as response:
                yield response

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,
        )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise RequestError(f"{self.url} answered more than {MAX_ANSWER_BYTES} bytes")
        return bytes(content)

    def without_key(self, text: str) -> str:
        return text.replace(self._key, "<key>") if len(self._key) > 4 else text


def _message(content: bytes) -> str:
    """Return the text of an error, in vLLM's format or in any other."""
    try:
        answer = json.loads(content)
        error = answer.get("error", answer)
        text = error.get("message") if isinstance(error, dict) else error
        return str(text or answer)[:1000]
    except (ValueError, AttributeError, RecursionError):
        return repr(content[:200])
