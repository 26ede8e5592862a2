"""The OpenAI-compatible endpoint of a run.

It owns the state shared by all players behind it: the client, the limit of concurrent requests, the budget, and the
health of each model. A model that fails repeatedly is paused: it gets no games until the pause is over, then one game
tries it, and pauses double until one succeeds.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import openai

from unstable_lite.config.games import OpponentsConfig
from unstable_lite.errors import ConfigError, OpponentError
from unstable_lite.games.api_keys import api_key, endpoint_url, is_loopback, proxy_for
from unstable_lite.types import BUDGET_SPENT, PROMPT_TOO_LONG

log = logging.getLogger(__name__)

FAILURES_BEFORE_PAUSE = 3
"""Number of consecutive failures before a pause; each is counted after the client's own retries."""
MAX_RETRIES = 4
"""Number of further attempts, with growing waits, after a transient error: no connection, 408, 409, 429, 5xx."""
PAUSE_S, MAX_PAUSE_S = 10.0, 600.0
"""First pause of a model that fails repeatedly, which doubles until the model answers, and the longest one."""
OUTAGE_S = 600.0
"""Time for which an evaluation by `run.eval_games` waits for a model that is down; then its games are void."""
POLL_S = 0.5
_http: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
"""HTTP library of the `openai` client: httpx, or its replacement in a later version."""
TOO_LONG = re.compile(
    r"context[_ -](length|window|size)"
    r"|(prompt|inputs?|messages)\b.{0,80}?(too (long|large)|exceed|longer|must be <=|must have less than)"
    r"|too many (input |prompt )?tokens|maximum prompt length|model token limit|range of input length",
    re.IGNORECASE | re.DOTALL,
)
"""Words of the servers of vLLM, SGLang, TGI, llama.cpp, Ollama and others, which have no field for it in common."""
MAX_ANSWER_BYTES, MAX_ERROR_BYTES = 8 << 20, 1 << 16
"""Size limit of one HTTP answer, about 100,000 tokens in JSON's longest encoding, and size to which an error is cut."""
MAX_TEXT_CHARS = 200_000
"""Length limit of one reply, which the transcripts keep; the middle of a longer one is cut out."""
CHARS_PER_TOKEN = 3
"""Estimate used if the endpoint does not report its usage; rather too many tokens than too few."""
CUT_OFF = (b'"length"', b'"content_filter"')
"""Finish reasons of an answer that the model did not end itself; servers have many words for the other case."""
MOST_CHOICES, MOST_PARTS, MOST_TOKENS = 16, 10_000, 10_000_000
"""Largest numbers of choices (one is asked for), of parts of a text, and of reported tokens of an answer."""
_NULL = msgspec.Raw(b"null")
_LONE_SURROGATE = re.compile(
    rb"(?i)(?<!\\)((?:\\\\)*)(?:\\ud[89ab][\da-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][\da-f]{2})\\ud[c-f][\da-f]{2})"
)


class Endpoint:
    """Endpoint of one run; created and closed on the run's event loop."""

    def __init__(self, config: OpponentsConfig, say: Callable[[str], None]) -> None:
        self.budget = Budget(config)
        self.failures = 0
        self._config = config
        self._say = say
        url = endpoint_url(config.base_url)
        self._key = api_key(url) or ""
        self._client = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=url,
            timeout=config.timeout_s,
            max_retries=MAX_RETRIES,
            http_client=_BoundedClient(config.timeout_s, url),
        )
        self._remark = f" ({remark})" if (remark := proxy_for(url)) else ""
        self._limit_name = "max_tokens"
        """Name of the parameter that limits the tokens of an answer."""
        self._slots = asyncio.Semaphore(config.max_concurrent_requests)
        self._models: defaultdict[str, _Health] = defaultdict(_Health)
        self._is_spending_reported = False

    async def complete(self, model: str, message: str) -> Answer:
        """Return the model's answer. Raises OpponentError if there is none, or if the budget is spent."""
        health = self._models[model]
        num_pauses = health.num_pauses
        async with self._slots:
            self._check_budget()
            if health.num_pauses > num_pauses:
                raise OpponentError(f"opponent {model!r} was paused while a request waited: {health.reason}")
            content = b""
            try:
                answer = read_answer(content := await self._request(model, message))
            except openai.OpenAIError as error:
                # Raised without its cause: a server's answer may repeat the key.
                response: Any = getattr(error, "response", None)
                is_bare = re.fullmatch(r"Error code: \d+", str(error)) is not None
                said = f"{error} - {response.text[:200]!r}" if is_bare else str(error)
                text = f"{type(error).__name__}: {self._without_key(said)[:500]}{self._remark}"
                is_refusal = getattr(response, "status_code", 0) in (400, 413, 422, 500)
                raise self._failed(model, text, response.text if is_refusal else "") from None
            # RecursionError: JSON that is nested too deeply.
            except (ValueError, RecursionError) as error:
                begins = self._without_key(content[:1000].decode(errors="replace"))[:200]
                text = f"the answer is not a chat completion: {str(error)[:200]}; it begins with {begins!r}"
                raise self._failed(model, text, error_of(content)) from None
        self.budget.count(answer.usage, message, answer.text)
        if answer.has_failed:
            raise self._failed(model, "the endpoint reports finish_reason 'error'", error_of(content))
        if pause_s := health.succeeded():
            self._report(f"opponent {model!r} answers again after {pause_s:.0f} s")
        # Remove the key here: the transcript keeps everything that the server sends.
        text = self._without_key(answer.text)
        if len(text) > MAX_TEXT_CHARS:
            log.warning("opponent %r: the middle of a reply of %d characters is left out", model, len(text))
            half = MAX_TEXT_CHARS // 2  # keep the end, where the move is
            text = f"{text[:half]}\n[… {len(text) - 2 * half} characters are left out here …]\n{text[-half:]}"
        return answer._replace(text=text)

    async def _request(self, model: str, message: str) -> bytes:
        """Return the body of the answer, after a second request if the model has another name for `max_tokens`."""
        self.budget.num_requests += 1
        name, limit = self._limit_name, self._config.max_tokens
        try:
            response = await self._client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": message}],
                temperature=openai.omit if self._config.temperature is None else self._config.temperature,
                extra_body=None if limit is None else {name: limit},
            )
        except openai.BadRequestError as error:
            # "context": the prompt is too long, under any name of the parameter.
            if limit is None or name != "max_tokens" or name not in str(error) or "context" in str(error):
                raise
            self._check_budget()
            self._limit_name = "max_completion_tokens"
            try:
                return await self._request(model, message)
            except openai.BadRequestError:
                self._limit_name = name
                raise
        return bytes(response.content)

    def can_play(self, model: str) -> bool:
        """Return whether the model may play now; after a pause, True once, for the game that tries it."""
        return self.budget.spent is None and self._models[model].may_be_tried()

    async def wait_for(self, model: str) -> None:
        """Wait until the model can play. Raises OpponentError if it is down for `OUTAGE_S` or the budget is spent."""
        health = self._models[model]
        while not self.can_play(model):
            self._check_budget()
            if (down_s := health.down_s) > OUTAGE_S:
                raise OpponentError(f"opponent {model!r} has been down for {down_s:.0f} s: {health.reason}")
            await asyncio.sleep(POLL_S)

    def metrics(self) -> dict[str, float]:
        """Return the endpoint's metrics."""
        return {
            "opponents/requests": self.budget.num_requests,
            "opponents/failures": self.failures,
            "opponents/tokens": self.budget.num_tokens,
            "opponents/paused": sum(health.down_since is not None for health in self._models.values()),
        }

    async def close(self) -> None:
        await self._client.close()

    def _failed(self, model: str, reason: str, refusal: str) -> OpponentError:
        """Return a failure; it counts unless `refusal`, a server's text, says that the prompt is too long."""
        if TOO_LONG.search(refusal):
            return OpponentError(f"opponent {model!r}: {reason}", reason=PROMPT_TOO_LONG)
        self.failures += 1
        if pause_s := self._models[model].failed(reason):
            self._report(f"opponent {model!r} is paused for {pause_s:g} s, its games are void: {reason}")
        return OpponentError(f"opponent {model!r}: {reason}")

    def _check_budget(self) -> None:
        if (spent := self.budget.spent) is not None:
            if not self._is_spending_reported:
                self._is_spending_reported = True
                self._report(f"{spent}: no more games against models behind {self._client.base_url}")
            raise OpponentError(spent, reason=BUDGET_SPENT)

    def _report(self, text: str) -> None:
        log.warning(text)
        self._say(text)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "<key>") if len(self._key) > 4 else text


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Bounds the time and the size of each attempt: the library bounds only the time of single reads.

    Compressed answers are refused, because some kilobytes can become gigabytes.
    """

    def __init__(self, timeout_s: float, url: str) -> None:
        """Make a client that uses no proxy of the environment if the URL is on this machine. Raises ConfigError."""
        is_near = is_loopback(url)
        options: dict[str, Any] = {"mounts": dict.fromkeys(("http://", "https://"))} if is_near else {}
        try:
            # The environment also names certificates for https.
            super().__init__(timeout=timeout_s, trust_env=not is_near or url.lower().startswith("https:"), **options)
        except (ImportError, ValueError, _http.InvalidURL) as error:
            raise ConfigError(f"the environment's proxy for {url} cannot be used: {error}") from error
        self._timeout_s = timeout_s

    async def send(self, request: Any, **options: Any) -> Any:
        request.headers["accept-encoding"] = "identity"
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await super().send(request, **{**options, "stream": True, "follow_redirects": False})
                try:
                    return await _read(response)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise _http.ReadTimeout(f"the answer did not end within {self._timeout_s:g} s") from error


async def _read(response: Any) -> Any:
    """Return the whole answer, or a 413 with the reason if it is refused."""
    encoding, content = response.headers.get("content-encoding", "identity"), bytearray()
    refused = ""
    if response.has_redirect_location:  # the library would read the whole answer before it follows
        refused = f"the endpoint redirects to {response.headers['location'][:200]}: set opponents.base_url to match"
    elif encoding.lower() not in ("identity", ""):
        refused = f"the endpoint compressed its answer ({encoding[:20]}) although the request forbids it"
    else:
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                refused = f"the endpoint answered more than {MAX_ANSWER_BYTES} bytes"
                break
    if refused:  # not an exception: the client would retry and then report a connection error
        return _http.Response(413, json={"error": {"message": refused}}, request=response.request)
    if response.is_error:
        del content[MAX_ERROR_BYTES:]  # the library parses and quotes it
    status, headers = response.status_code, response.headers.copy()
    headers["content-type"] = "application/json"  # the library would decode text by any charset that is named here
    return _http.Response(status, headers=headers, content=bytes(content), request=response.request)


@dataclass(slots=True)
class Budget:
    """Spending of a run on opponents, and its limits. Requests in flight when a limit is reached are still paid."""

    config: OpponentsConfig
    num_requests: int = 0
    num_tokens: int = 0

    @property
    def spent(self) -> str | None:
        """Limit that is reached, if any."""
        for name, value in (("max_requests", self.num_requests), ("max_total_tokens", self.num_tokens)):
            limit = getattr(self.config, name)
            if limit is not None and value >= limit:
                return f"spending limit reached: opponents.{name} = {limit:g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"num_requests": self.num_requests, "num_tokens": self.num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_requests, self.num_tokens = state["num_requests"], state["num_tokens"]

    def count(self, usage: Usage | None, message: str, text: str) -> None:
        """Add the tokens that the endpoint reports, or an estimate."""
        if usage is not None:
            self.num_tokens += usage.prompt_tokens + usage.completion_tokens
        else:
            self.num_tokens += len(message) // CHARS_PER_TOKEN + len(text) // CHARS_PER_TOKEN + 2


@dataclass(slots=True)
class _Health:
    """Health of one model: its failures in a row and its pauses."""

    num_pauses: int = 0
    reason: str = ""
    """Reason of the last failure."""
    down_since: float | None = None
    """Beginning of the first of its pauses since it last answered; None: it is not paused."""
    failures_in_a_row: int = 0
    pause_s: float = 0.0
    next_try: float = 0.0
    is_tried: bool = False
    """Whether a game has been let through to try the model after a pause."""

    @property
    def down_s(self) -> float:
        return 0.0 if self.down_since is None else time.monotonic() - self.down_since

    def may_be_tried(self) -> bool:
        if self.down_since is None:
            return True
        if time.monotonic() < self.next_try:
            return False
        # If this try has no result, the next one is due after another pause.
        self.is_tried, self.next_try = True, time.monotonic() + self.pause_s
        return True

    def failed(self, reason: str) -> float:
        """Count a failure; return the seconds of the pause that it starts, or 0."""
        self.reason = reason
        self.failures_in_a_row += 1
        if self.down_since is not None and self.is_tried:
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
        elif self.down_since is None and self.failures_in_a_row >= FAILURES_BEFORE_PAUSE:
            self.pause_s, self.down_since = PAUSE_S, time.monotonic()
        else:
            return 0.0
        self.num_pauses += 1
        self.is_tried, self.next_try = False, time.monotonic() + self.pause_s
        return self.pause_s

    def succeeded(self) -> float:
        """Count a success; return the seconds that the model was down if this ends a pause, or 0."""
        down_s = self.down_s
        self.failures_in_a_row, self.down_since, self.is_tried = 0, None, False
        return down_s


class _Part(msgspec.Struct, gc=False):
    type: msgspec.Raw = _NULL
    text: msgspec.Raw = _NULL


class _Message(msgspec.Struct, gc=False):
    content: str | Annotated[list[_Part | str | None], msgspec.Meta(max_length=MOST_PARTS)] | None = None


class _Choice(msgspec.Struct, gc=False):
    message: _Message
    finish_reason: msgspec.Raw = _NULL


class Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=MOST_CHOICES)]
    usage: msgspec.Raw = _NULL


class _Failure(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"")


class Answer(NamedTuple):
    text: str
    """Text, with a `?` for each lone surrogate; "" for a refusal or an empty content, which is an invalid move."""
    is_cut_off: bool
    """Whether the endpoint reports that the model did not finish its answer."""
    has_failed: bool
    """Whether a proxy reports that its provider failed."""
    usage: Usage | None
    """Numbers of tokens; None if they are missing or cannot be those of an answer."""


def read_answer(content: bytes) -> Answer:
    """Return the first choice of a chat completion. Raises ValueError or RecursionError if it is not one."""
    if rb"\ud" in content.lower():
        content = _LONE_SURROGATE.sub(rb"\1?", content)
    completion = msgspec.json.decode(content, type=_Completion)
    choice = completion.choices[0]
    text, reason = choice.message.content or "", bytes(choice.finish_reason)
    if not isinstance(text, str):
        text = "".join(map(_text_of, text))
    try:
        usage = msgspec.json.decode(completion.usage, type=Usage)
    except (ValueError, RecursionError):
        usage = None
    return Answer(text, reason in CUT_OFF, reason == b'"error"', usage)


def _text_of(part: _Part | str | None) -> str:
    """Return the text of a part of the answer; "" for a part of another kind, such as a thought."""
    if isinstance(part, _Part):
        is_text = bytes(part.type) in (b'"text"', b'"output_text"', b"null")
        part = msgspec.json.decode(part.text, type=str | None) if is_text else ""
    return part or ""


def error_of(content: bytes) -> str:
    """Return the beginning of the field `error` of a body; "" if it has none."""
    try:
        return bytes(msgspec.json.decode(content, type=_Failure).error)[:4096].decode(errors="replace")
    except (ValueError, RecursionError):
        return ""
