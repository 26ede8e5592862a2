"""HTTP server with OpenAI's API for the models of a run.

Owns the socket, the routes, the key and the streams. It listens while the engines start, and answers 503 until they are
up. A client that disconnects cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.orchestrator.event_loop import first_reason, handled_signals, unless_set
from unstable_lite.sharing.openai_format import (
    ChatRequest,
    CompletionRequest,
    Refusal,
    SamplingRequest,
    Shape,
    parse,
)
from unstable_lite.sharing.served_models import Prompt, ServedModels, ServingPlan, started_models
from unstable_lite.types import Generation

MAX_BODY_BYTES = 4 << 20
SHUTDOWN_S = 2.0
"""Time that requests in flight get to end when the server is stopped."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Address:
    """Address to listen at, and the key that requests must have."""

    host: str
    port: int
    key: str | None = field(repr=False)

    @property
    def is_local(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def checked_address(host: str, port: int, key_variable: str | None) -> Address:
    """Return the address with its key. `key_variable`: environment variable that holds the key.

    Raises ConfigError for a variable that is not set, and for an address that other machines can reach without a key.
    """
    key = None
    if key_variable is not None:
        if not key_variable.endswith("_API_KEY"):
            raise ConfigError(f"--api-key-env {key_variable}: the name must end in _API_KEY, which no worker receives")
        if not (key := os.environ.get(key_variable)):
            raise ConfigError(f"--api-key-env {key_variable}: this environment variable is not set; export a key in it")
    address = Address(host, port, key)
    if not address.is_local and key is None:
        raise ConfigError(
            f"--host {host} can be reached by other machines, so requests need a key: export SERVE_API_KEY=… and add "
            "--api-key-env SERVE_API_KEY"
        )
    return address


def bound_socket(address: Address) -> socket.socket:
    """Return a socket that is bound and does not listen yet. Raises ConfigError if the address cannot be used."""
    found = None
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(name)
        found.listen(1024)
    except OSError as error:
        if found is not None:
            found.close()
        raise ConfigError(
            f"cannot listen at {address.host}:{address.port}: {error.strerror}; choose another --host or --port"
        ) from error
    return found


async def serve(serving: ServingPlan, address: Address, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; then end the engines and return.

    Raises ConfigError if the address cannot be used, and the errors of `started_models`.
    """
    with bound_socket(address) as listening:
        stop = asyncio.Event()
        with handled_signals(stop.set):
            try:
                await unless_set(_serve(serving, address, listening, say), stop)
            except BaseExceptionGroup as group:
                raise first_reason(group) from group
        if stop.is_set():
            say("stopped")


async def _serve(serving: ServingPlan, address: Address, listening: socket.socket, say: Callable[[str], None]) -> None:
    server = Server(address.key)
    runner = web.AppRunner(
        server.app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S, access_log=None, handle_signals=False
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        async with started_models(serving, say) as models:
            server.models = models
            host, port = listening.getsockname()[:2]
            if not address.is_local:
                say(f"warning: other machines can reach {host}:{port}; the key and the answers are not encrypted")
            shown = f"[{host}]" if ":" in host else host
            say(f"serving {', '.join(models.models)} at http://{shown}:{port}/v1; Ctrl-C ends it")
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()


class Server:
    def __init__(self, key: str | None) -> None:
        self.models: ServedModels | None = None
        """Served models; None while the engines start."""
        self._key = None if key is None else f"Bearer {key}".encode()
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._list),
                web.get("/v1/models/{name:.+}", self._list),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
            ]
        )

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and give every error OpenAI's form."""
        try:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if self._key is not None and request.path != "/health" and not hmac.compare_digest(given, self._key):
                raise Refusal(401, "the API key is missing or wrong: Authorization: Bearer KEY", "invalid_api_key")
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
        except web.HTTPException as error:
            refusal = Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
        except Refusal as error:
            refusal = error
        headers = {"Retry-After": "2"} if refusal.status == 503 else {}
        return web.json_response(refusal.body, status=refusal.status, headers=headers)

    @property
    def _started(self) -> ServedModels:
        if self.models is None:
            raise Refusal(503, "the engine is starting; try again in a while")
        return self.models

    async def _health(self, _request: web.Request) -> web.Response:
        models = self._started
        if not (up := models.engines.up):
            raise Refusal(503, "the engine has died and is started again")
        pending = sum(engine.channel.num_pending for engine in up)
        return web.json_response({"status": "ok", "engines": len(up), "unanswered": pending})

    async def _list(self, request: web.Request) -> web.Response:
        listed = self._started.listed()
        if (name := request.match_info.get("name")) is None:
            return web.json_response({"object": "list", "data": listed})
        for one in listed:
            if one["id"] == name:
                return web.json_response(one)
        raise Refusal(404, f"there is no model {name!r}", "model_not_found")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse(await request.read(), ChatRequest))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse(await request.read(), CompletionRequest))

    async def _answer(self, request: web.Request, asked: SamplingRequest) -> web.StreamResponse:
        models, count = self._started, asked.n or 1
        prompt = await models.prompt(asked)
        if asked.stream:
            stream = _Stream(request, asked, prompt)
            with contextlib.suppress(ConnectionError):  # the client has left
                await stream.send(models, count)
            return stream.response
        try:
            async with asyncio.TaskGroup() as tasks:
                choices = [tasks.create_task(models.answer(asked, prompt, index)) for index in range(count)]
        except BaseExceptionGroup as group:
            raise first_reason(group) from None
        generations = [choice.result() for choice in choices]
        texts = [prompt.opened + generation.text for generation in generations]
        return web.json_response(Shape(asked).whole(generations, texts))


class _Stream:
    """An answer as server-sent events. Nothing is sent before an engine begins to answer, so an error has a status."""

    def __init__(self, request: web.Request, asked: SamplingRequest, prompt: Prompt) -> None:
        self._request = request
        self._asked = asked
        self._prompt = prompt
        self._shape = Shape(asked)
        self._sent: dict[int, int] = {}
        """Number of characters that were sent of each choice."""
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    async def send(self, models: ServedModels, count: int) -> None:
        """Send `count` choices, in parts as they grow. Raises Refusal if the first part cannot be made."""
        parts: asyncio.Queue[tuple[int, str | Generation]] = asyncio.Queue()

        async def answer(index: int) -> None:
            generation = await models.answer(
                self._asked, self._prompt, index, lambda text: parts.put_nowait((index, text))
            )
            parts.put_nowait((index, generation))

        generations: dict[int, Generation] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(count):
                    tasks.create_task(answer(index))
                while len(generations) < count:
                    index, part = await parts.get()
                    if isinstance(part, Generation):
                        generations[index] = part
                    await self._send_part(index, part)
        except BaseExceptionGroup as group:
            error = first_reason(group)
            if not self.response.prepared or not isinstance(error, UnstableError):
                raise error from None
            await self._send_event(error.body if isinstance(error, Refusal) else Refusal(503, str(error)).body)
        else:
            if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
                await self._send_event(self._shape.usage(list(generations.values())))
            await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def _send_part(self, index: int, part: str | Generation) -> None:
        is_first, finish_reason, text = index not in self._sent, None, part
        sent = self._sent.setdefault(index, 0)
        if isinstance(part, Generation):
            text, finish_reason = part.text[sent:], part.finish_reason
        assert isinstance(text, str)
        self._sent[index] = sent + len(text)
        opened = self._prompt.opened if is_first else ""
        await self._send_event(self._shape.chunk(index, opened + text, is_first, finish_reason))

    async def _send_event(self, event: dict[str, Any]) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(f"data: {json.dumps(event)}\n\n".encode())
