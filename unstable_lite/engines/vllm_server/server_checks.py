"""Check that a vLLM server was started with the options that the engine needs."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import msgspec

from unstable_lite.engines.vllm_server.http import Refused, Server
from unstable_lite.errors import ModelError, RequestError
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.types import FinishReason

_PROBE = "The rules:\nmove 17 is [3], and \\boxed{[0]} ends é 🎲."
PLAIN_SAMPLING = {
    "n": 1,
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


async def check_server(server: Server, served: str, tokenizer: Tokenizer, absent_name: str) -> str:
    """Return the server's version. Raises ModelError with the missing option.

    served: the server's name of the base. absent_name: name for an adapter that does not exist.
    """
    try:
        version = (await server.ask(dict[str, Any], "GET", "/version"))["version"]
        await _check_tokenizer(server, served, tokenizer)
        await _check_logprobs(server, served, tokenizer.encode(_PROBE).tolist())
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


async def _check_tokenizer(server: Server, served: str, tokenizer: Tokenizer) -> None:
    try:
        answer = await server.ask(dict[str, Any], "POST", "/tokenize", {"model": served, "prompt": _PROBE})
    except Refused as refusal:
        if refusal.status == 404:  # the server does not offer it; the canary still checks the tokens
            return
        raise
    ours = tokenizer.encode(_PROBE).tolist()
    if (theirs := answer["tokens"]) != ours:
        raise ModelError(
            f"{server.url} serves {served!r}, whose tokenizer is not that of model_name: {_PROBE!r} is "
            f"{reprlib.repr(theirs)} there and {reprlib.repr(ours)} here"
        )


async def _check_logprobs(server: Server, served: str, prompt_ids: list[int]) -> None:
    """Check that twice the temperature halves the differences of log-probabilities, as those of the sampled ones do."""
    cool, hot = [await _top_logprobs(server, served, prompt_ids, temperature) for temperature in (1.0, 2.0)]
    common = sorted(cool.keys() & hot.keys(), key=cool.__getitem__)
    gaps = [logprobs[common[-1]] - logprobs[common[0]] for logprobs in (cool, hot)]
    if sum(map(math.exp, cool.values())) > 1.01 or gaps[1] > 0.75 * gaps[0] > 0.1:
        raise ModelError(
            f"{server.url} does not report the log-probabilities of its sampling distribution (they differ by "
            f"{gaps[0]:.3f} at temperature 1, by {gaps[1]:.3f} at 2): start it with "
            "--logprobs-mode processed_logprobs"
        )


async def _top_logprobs(server: Server, served: str, prompt_ids: list[int], temperature: float) -> dict[str, float]:
    body = PLAIN_SAMPLING | {
        "model": served,
        "prompt": prompt_ids,
        "max_tokens": 1,
        "temperature": temperature,
        "top_p": 1.0,
        "seed": 0,
        "logprobs": 5,
    }
    completion = await server.ask(Completion, "POST", "/v1/completions", body)
    top = (completion.choices[0].logprobs.top_logprobs or [None])[0]
    if top is None:
        raise LookupError("it reports no top_logprobs")
    return top
