"""HTTP with a vLLM server: retries, limits, errors that name the server, and the check of its options."""

from __future__ import annotations

import asyncio
import json
import math
import os
import reprlib
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from unstable_lite.errors import ModelError, RequestError
from unstable_lite.games.api_keys import SERVER_KEY
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.types import FinishReason

T = TypeVar("T")

RETRY_AFTER_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses after a transient failure; after the last attempt the server counts as gone."""
BUSY = frozenset({429, 502, 503, 504})
KEEP_ALIVE_S = 4.0
"""Time for which an idle connection is kept; less than a server's, so that none closes while a request is sent."""
MAX_ANSWER_BYTES = 1 << 26
_PROBE = "The rules:\nmove 17 is [3], and \\boxed{[0]} ends é 🎲."
PLAIN_SAMPLING = {
    "n": 1,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Part of every request, because a server's defaults may come from the model's generation config."""


class Logprobs(msgspec.Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    token_ids: list[int]
    prompt_token_ids: list[int]
    logprobs: Logprobs
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    """Stop string, or id of the stop token, that ended the completion; None for the model's own end or the limit."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class Completion(msgspec.Struct):
    """The part of a server's answer to `/v1/completions` that is used."""

    model: str
    choices: tuple[Choice]
    usage: Usage | None = None

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens that were not computed again."""
        details = self.usage and self.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0


class Refused(RequestError):
    """A server's answer with the status of an error."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"{url} answers {status}: {reason}")


class Server:
    """HTTP client of one server. Every error names the URL; none contains the key."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.heard_at = time.monotonic()
        self._key = os.environ.get(SERVER_KEY, "")
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
        may_pass: frozenset[int] = BUSY,
        retry_after_s: Sequence[float] | None = None,
    ) -> bytes:
        """Return the content of the answer.

        Retries connection errors and the statuses `may_pass`. Raises Refused for the status of an error,
        ConnectionError without an answer.
        """
        for wait_s in (*(RETRY_AFTER_S if retry_after_s is None else retry_after_s), None):
            try:
                if self._session is None:
                    self._session = self._open()
                # A redirection would send the key to its target.
                async with self._session.request(method, self.url + path, allow_redirects=False, json=body) as response:
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
                    reason += f" (its key is taken from the environment variable {SERVER_KEY})"
                if status not in may_pass:
                    raise Refused(self.url, status, reason)
            if wait_s is not None:
                await asyncio.sleep(wait_s)
        if status and status not in BUSY:
            raise Refused(self.url, status, reason)
        raise ConnectionError(f"{self.url} does not answer: {f'{status} ' * bool(status)}{reason}")

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


async def check_server(server: Server, served: str, tokenizer: Tokenizer, absent_name: str) -> str:
    """Return the server's version. Raises ModelError with the missing option.

    served: the server's name of the base. absent_name: name for an adapter that does not exist.
    """
    try:
        version = (await server.ask(dict[str, Any], "GET", "/version"))["version"]
        prompt_ids = tokenizer.encode(_PROBE).tolist()
        await _check_tokenizer(server, served, prompt_ids)
        await _check_logprobs(server, served, prompt_ids)
    except (RequestError, LookupError) as error:
        raise ModelError(f"{server.url} is not a vLLM server that returns token ids: {error}") from error
    absent = {"lora_name": absent_name, "lora_path": "/nonexistent/unstable_lite"}
    try:
        await server.send("POST", "/v1/load_lora_adapter", absent)
    except Refused as refusal:
        if "lora_path" in refusal.reason or "/nonexistent/unstable_lite" in refusal.reason:
            return str(version)
        if refusal.status in (404, 405):
            raise ModelError(
                f"{server.url} loads no adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 set"
            ) from refusal
        raise ModelError(f"{refusal}; it cannot load adapters: start it with --enable-lora") from refusal
    raise ModelError(f"{server.url} loads an adapter that does not exist; this version of vLLM is not supported")


async def _check_tokenizer(server: Server, served: str, ours: list[int]) -> None:
    try:
        answer = await server.ask(dict[str, Any], "POST", "/tokenize", {"model": served, "prompt": _PROBE})
    except Refused as refusal:
        if refusal.status == 404:  # the server does not offer it; the canary still checks the tokens
            return
        raise
    if (theirs := answer["tokens"]) != ours:
        raise ModelError(
            f"{server.url} serves {served!r}, whose tokenizer is not that of model_name: {_PROBE!r} is "
            f"{reprlib.repr(theirs)} there and {reprlib.repr(ours)} here"
        )


async def _check_logprobs(server: Server, served: str, prompt_ids: list[int]) -> None:
    """Check that twice the temperature halves the differences of log-probabilities, as those of the sampled ones do."""
    body = PLAIN_SAMPLING | {"model": served, "prompt": prompt_ids, "max_tokens": 1, "seed": 0, "logprobs": 5}
    found: list[dict[str, float]] = []
    for temperature in (1.0, 2.0):
        answer = await server.ask(Completion, "POST", "/v1/completions", body | {"temperature": temperature})
        top = (answer.choices[0].logprobs.top_logprobs or [None])[0]
        if top is None:
            raise LookupError("it reports no top_logprobs")
        found.append(top)
    cool, hot = found
    common = sorted(cool.keys() & hot.keys(), key=cool.__getitem__)
    gaps = [logprobs[common[-1]] - logprobs[common[0]] for logprobs in (cool, hot)]
    if sum(map(math.exp, cool.values())) > 1.01 or gaps[1] > 0.75 * gaps[0] > 0.1:
        raise ModelError(
            f"{server.url} does not report the log-probabilities of its sampling distribution (they differ by "
            f"{gaps[0]:.3f} at temperature 1, by {gaps[1]:.3f} at 2): start it with "
            "--logprobs-mode processed_logprobs"
        )
