"""Requests and answers of an OpenAI-compatible server: the accepted fields, and the JSON that is sent.

Owns the formats. A field that would change the answer and is not supported is refused, never ignored. Knows no engines.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from unstable_lite.errors import UnstableError
from unstable_lite.games.templates import MAX_PLAYERS
from unstable_lite.types import Generation

MAX_CHOICES = 64
MAX_STOPS = 16
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
"""Fields that do not change an answer."""
_NEUTRAL: tuple[Any, ...] = (None, 0, "", "none", [], {}, {"type": "text"})
"""Values with which an unsupported field has no effect; 0 is also False."""

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Refusal(UnstableError):
    """A request that gets an error as its answer."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kinds = {401: "authentication_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of requests have; None: the run's own value."""

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Text | Annotated[list[Text], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Whether the answer contains the token ids of prompt and completion, as vLLM's servers do."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """Largest number of tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


class ChatRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    num_players: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLAYERS)] | None = None
    """Number of players of the game whose observation is the only message; None: a conversation."""


class CompletionRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    prompt: Text | Annotated[list[int], msgspec.Meta(min_length=1)]
    """Text, or token ids."""


R = TypeVar("R", bound=SamplingRequest)


def parse(body: bytes, kind: type[R]) -> R:
    """Return a request. Raises Refusal with the place in the body if it cannot be served."""
    try:
        table = msgspec.json.decode(body)
        if isinstance(table, dict):
            own = set(kind.__struct_fields__)
            table = {
                name: value
                for name, value in table.items()
                if name in own or (name not in _IGNORED and value not in _NEUTRAL)
            }
        return msgspec.convert(table, kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise Refusal(400, f"the request cannot be served: {error}") from None


class Shape:
    """Form of the answers to one request: `chat.completion` or `text_completion`, whole or in chunks."""

    def __init__(self, request: SamplingRequest) -> None:
        self.is_chat = isinstance(request, ChatRequest)
        self._has_ids = bool(request.return_token_ids)
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, generations: Sequence[Generation], texts: Sequence[str]) -> dict[str, Any]:
        """Return the answer with all of its choices; `texts`: the text of each."""
        choices = []
        for index, (generation, text) in enumerate(zip(generations, texts, strict=True)):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
            )
            ids = {"token_ids": generation.completion_ids.tolist()} if self._has_ids else {}
            choices.append({"index": index, "finish_reason": generation.finish_reason, "logprobs": None, **said, **ids})
        kind = "chat.completion" if self.is_chat else "text_completion"
        answer = {**self._head, "object": kind, "choices": choices, "usage": _usage(generations)}
        return answer | ({"prompt_token_ids": generations[0].prompt_ids.tolist()} if self._has_ids else {})

    def chunk(self, index: int, text: str, is_first: bool, finish_reason: str | None) -> dict[str, Any]:
        """Return a part of one choice."""
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"delta": {**({"role": "assistant"} if is_first else {}), **({"content": text} if text else {})}}
        choice = {"index": index, "finish_reason": finish_reason, "logprobs": None, **said}
        return {**self._head, "object": self._chunks, "choices": [choice]}

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the last chunk, if the client asks for the usage."""
        return {**self._head, "object": self._chunks, "choices": [], "usage": _usage(generations)}

    @property
    def _chunks(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"


def _usage(generations: Sequence[Generation]) -> dict[str, int]:
    prompt = len(generations[0].prompt_ids)
    completion = sum(len(one.completion_ids) + (len(one.forced.ids) if one.forced else 0) for one in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
