"""Players for models behind an OpenAI-compatible endpoint, and the endpoint itself.

The model gets the prompt of the `chat` template, as our own model would, so that neither side is handicapped. The
endpoint owns the state shared by all such players of a run: the client, the limit of concurrent requests, the budget,
and the health of each model. A model that fails repeatedly is paused: it gets no games until the pause is over, then
one game tries it, and pauses double until one succeeds.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import openai

from unstable_lite.config.games import OpponentsConfig
from unstable_lite.errors import OpponentError
from unstable_lite.games.api_keys import api_key, endpoint_url
from unstable_lite.games.templates import CHAT_TEMPLATES, find_extraction
from unstable_lite.types import AgentSpec, Reply

log = logging.getLogger(__name__)

FAILURES_BEFORE_PAUSE = 3
"""Number of consecutive failures before a pause; each is counted after the client's own retries."""
POLL_S = 0.5
_http: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
"""HTTP library of the `openai` client: httpx, or its replacement in a later version."""
CUT_OFF = ("length", "content_filter")
"""Finish reasons of an answer that the model did not end itself; servers have many words for the other case."""
MAX_ANSWER_BYTES = 8 << 20
"""Size limit of one HTTP answer: about 100,000 tokens in JSON's longest encoding."""
MAX_TEXT_CHARS = 200_000
"""Length limit of one reply, which the transcripts keep; the middle of a longer one is cut out."""
CHARS_PER_TOKEN = 3
"""Estimate used if the endpoint does not report its usage; rather too many tokens than too few."""


class OpenAICompatiblePlayer:
    def __init__(self, endpoint: Endpoint, agent: AgentSpec, num_players: int) -> None:
        assert agent.model.name is not None
        self._endpoint = endpoint
        self._model = agent.model.name
        self._extract = find_extraction(agent.action_extraction_fn)
        self._num_players = num_players

    async def act(self, observation: str) -> Reply:
        """Ask the model for its action. Raises OpponentError."""
        message = CHAT_TEMPLATES["chat"].message(observation, self._num_players)
        answer = await self._endpoint.complete(self._model, message)
        action, format_ok = self._extract(answer.text)
        return Reply(action=action, text=answer.text, prompt=message, format_ok=format_ok, is_cut_off=answer.is_cut_off)


class Answer(NamedTuple):
    text: str
    is_cut_off: bool
    """Whether the endpoint reports that the model did not finish its answer."""


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
            max_retries=config.max_retries,
            http_client=_BoundedClient(config.timeout_s),
        )
        self._slots = asyncio.Semaphore(config.max_concurrent_requests)
        self._models: defaultdict[str, _Health] = defaultdict(lambda: _Health(config))
        self._is_spending_reported = False

    async def complete(self, model: str, message: str) -> Answer:
        """Return the model's answer. Raises OpponentError if there is none, or if the budget is spent."""
        health = self._models[model]
        num_pauses = health.num_pauses
        async with self._slots:
            self._check_budget()
            if health.num_pauses > num_pauses:
                raise OpponentError(f"opponent {model!r} was paused while a request waited: {health.reason}")
            self.budget.num_requests += 1
            try:
                completion: Any = await self._client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": message}],
                    temperature=openai.omit if self._config.temperature is None else self._config.temperature,
                    max_tokens=openai.omit if self._config.max_tokens is None else self._config.max_tokens,
                )
            # ValueError: the answer claims to be JSON and is not; RecursionError: JSON that is nested too deeply.
            except (openai.OpenAIError, ValueError, RecursionError) as error:
                # Raised without its cause: a server's answer may repeat the key.
                raise self._failed(model, f"{type(error).__name__}: {self._without_key(str(error))[:500]}") from None
        answer = _answer(completion)
        self.budget.count(getattr(completion, "usage", None), message, answer.text if answer else "")
        if answer is None:
            raise self._failed(model, f"an answer without text: {self._without_key(repr(completion))[:500]}")
        if pause_s := health.succeeded():
            self._report(f"opponent {model!r} answers again after {pause_s:.0f} s")
        # Remove the key here: the transcript keeps everything that the server sends.
        text = self._without_key(answer.text)
        if len(text) > MAX_TEXT_CHARS:
            log.warning("opponent %r: the middle of a reply of %d characters is left out", model, len(text))
            half = MAX_TEXT_CHARS // 2  # keep the end, where the move is
            text = f"{text[:half]}\n[… {len(text) - 2 * half} characters are left out here …]\n{text[-half:]}"
        return answer._replace(text=text)

    def can_play(self, model: str) -> bool:
        """Return whether the model may play now; after a pause, True once, for the game that tries it."""
        return self.budget.spent is None and self._models[model].may_be_tried()

    async def wait_for(self, model: str) -> None:
        """Wait until the model can play. Raises OpponentError if it is down for `outage_s` or the budget is spent."""
        while not self.can_play(model):
            self._check_budget()
            if (down_s := self._models[model].down_s) > self._config.outage_s:
                raise OpponentError(
                    f"opponent {model!r} has been down for {down_s:.0f} s (opponents.outage_s = "
                    f"{self._config.outage_s:g}): {self._models[model].reason}"
                )
            await asyncio.sleep(POLL_S)

    def metrics(self) -> dict[str, float]:
        """Return the endpoint's metrics."""
        return {
            "opponents/requests": self.budget.num_requests,
            "opponents/failures": self.failures,
            "opponents/tokens": self.budget.num_tokens,
            "opponents/usd": self.budget.usd,
            "opponents/paused": sum(health.is_paused for health in self._models.values()),
        }

    async def close(self) -> None:
        await self._client.close()

    def _failed(self, model: str, reason: str) -> OpponentError:
        self.failures += 1
        if pause_s := self._models[model].failed(reason):
            self._report(f"opponent {model!r} is paused for {pause_s:g} s, its games are void: {reason}")
        return OpponentError(f"opponent {model!r}: {reason}")

    def _check_budget(self) -> None:
        if (spent := self.budget.spent) is not None:
            if not self._is_spending_reported:
                self._is_spending_reported = True
                self._report(f"{spent}: no more games against models behind {self._client.base_url}")
            raise OpponentError(spent)

    def _report(self, text: str) -> None:
        log.warning(text)
        self._say(text)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "<key>") if len(self._key) > 4 else text


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """Bounds the time and the size of each attempt.

    The library bounds only the time of single reads, which an occasional byte satisfies, and never the size. Compressed
    answers are refused, because some kilobytes can become gigabytes.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout=timeout_s)
        self._timeout_s = timeout_s

    async def send(self, request: Any, **options: Any) -> Any:
        """Return the whole answer, or a 413 with the reason if the answer is refused."""
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
    return _http.Response(
        response.status_code, headers=response.headers, content=bytes(content), request=response.request
    )


class Budget:
    """Spending limits and spending of a run on opponents. Requests in flight when a limit is reached are still paid."""

    def __init__(self, config: OpponentsConfig) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.usd = 0.0
        self._config = config

    @property
    def spent(self) -> str | None:
        """Limit that is reached, if any."""
        config = self._config
        limits = (
            ("max_requests", self.num_requests, config.max_requests),
            ("max_total_tokens", self.num_tokens, config.max_total_tokens),
            ("max_usd", self.usd, config.max_usd),
        )
        for name, value, limit in limits:
            if limit is not None and value >= limit:
                return f"spending limit reached: opponents.{name} = {limit:g}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"num_requests": self.num_requests, "num_tokens": self.num_tokens, "usd": self.usd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_requests, self.num_tokens, self.usd = state["num_requests"], state["num_tokens"], state["usd"]

    def count(self, usage: Any, message: str, text: str) -> None:
        """Add the tokens that the endpoint reports, or an estimate if it reports none or a negative number."""
        num_prompt, num_completion = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        if (
            not isinstance(num_prompt, int)
            or not isinstance(num_completion, int)
            or min(num_prompt, num_completion) < 0
        ):
            num_prompt, num_completion = len(message) // CHARS_PER_TOKEN + 1, len(text) // CHARS_PER_TOKEN + 1
        self.num_tokens += num_prompt + num_completion
        self.usd += num_prompt * self._config.usd_per_million_prompt_tokens / 1e6
        self.usd += num_completion * self._config.usd_per_million_completion_tokens / 1e6


class _Health:
    """Health of one model: its failures in a row and its pauses."""

    def __init__(self, config: OpponentsConfig) -> None:
        self.is_paused = False
        self.num_pauses = 0
        self.reason = ""
        """Reason of the last failure."""
        self._config = config
        self._failures_in_a_row = 0
        self._pause_s = config.pause_s
        self._next_try = 0.0
        self._is_tried = False
        """Whether a game has been let through to try the model after a pause."""
        self._down_since = 0.0

    @property
    def down_s(self) -> float:
        return time.monotonic() - self._down_since if self.is_paused else 0.0

    def may_be_tried(self) -> bool:
        if not self.is_paused:
            return True
        if time.monotonic() < self._next_try:
            return False
        # If this try has no result, the next one is due after another pause.
        self._is_tried, self._next_try = True, time.monotonic() + self._pause_s
        return True

    def failed(self, reason: str) -> float:
        """Count a failure; return the seconds of the pause that it starts, or 0."""
        self.reason = reason
        self._failures_in_a_row += 1
        if self.is_paused and self._is_tried:
            self._pause_s = min(2 * self._pause_s, self._config.max_pause_s)
        elif not self.is_paused and self._failures_in_a_row >= FAILURES_BEFORE_PAUSE:
            self.is_paused, self._pause_s, self._down_since = True, self._config.pause_s, time.monotonic()
        else:
            return 0.0
        self.num_pauses += 1
        self._is_tried, self._next_try = False, time.monotonic() + self._pause_s
        return self._pause_s

    def succeeded(self) -> float:
        """Count a success; return the seconds that the model was down if this ends a pause, or 0."""
        down_s = self.down_s
        self._failures_in_a_row = 0
        self.is_paused = self._is_tried = False
        return down_s


def _answer(completion: Any) -> Answer | None:
    """Return the answer, or None. Servers send anything, and the client checks little of it."""
    try:
        choice = completion.choices[0]
        content, reason = choice.message.content, choice.finish_reason
    except (AttributeError, TypeError, LookupError):
        return None
    if isinstance(content, str) and content:
        text = content.encode(
            errors="replace"
        ).decode()  # JSON may contain lone surrogates, which cannot be written to a file
        return Answer(text, is_cut_off=reason in CUT_OFF)
    # A model that thinks until its tokens are used up has answered without a move, as our own model would.
    return Answer("", is_cut_off=True) if reason == "length" else None
