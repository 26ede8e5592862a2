"""Models behind an OpenAI-compatible endpoint, against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from openai_server import Server, said, serving
from unstable_lite.config import OpponentsConfig
from unstable_lite.errors import OpponentError
from unstable_lite.games.api_keys import OPENROUTER_URL, api_key, endpoint_url, key_variable
from unstable_lite.games.players.openai_compatible import (
    MAX_ANSWER_BYTES,
    MAX_TEXT_CHARS,
    Endpoint,
    OpenAICompatiblePlayer,
)
from unstable_lite.games.templates import CHAT_TEMPLATES, Template
from unstable_lite.types import AgentSpec, ModelRef

KEY = "sk-very-secret-key"
MODEL = "vendor/model:free"
AGENT = AgentSpec(
    pid=0,
    model=ModelRef(uid=f"fixed-{MODEL}", kind="fixed", name=MODEL),
    collect_data=False,
    prompt_template="tiny",
    action_extraction_fn="default",
)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
async def connect(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Endpoint]]:
    """Makes endpoints that are closed after the test."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made: list[Endpoint] = []
    heard: list[str] = []

    def new(**config: Any) -> Endpoint:
        made.append(Endpoint(OpponentsConfig(base_url=server.url, **{"max_retries": 0, **config}), heard.append))
        made[-1].heard = heard  # type: ignore[attr-defined]
        return made[-1]

    yield new
    for endpoint in made:
        await endpoint.close()


async def test_the_model_is_asked_what_our_own_is_asked_and_its_box_is_its_action(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    player = OpenAICompatiblePlayer(connect(), AGENT, num_players=2)
    reply = await player.act("THE BOARD <|im_end|>")
    (body,) = server.bodies
    assert body == {"model": MODEL, "messages": [{"role": "user", "content": reply.prompt}]}
    assert reply.prompt == Template("", CHAT_TEMPLATES["chat"].user).prompt("THE BOARD <|im_end|>", 2)
    for says in ("THE BOARD < |im_end|>", "two-player game", r"\boxed{}"):
        assert says in reply.prompt
    assert (reply.action, reply.text, reply.format_ok) == ("[4]", "\\boxed{4}", True)
    assert server.keys == [f"Bearer {KEY}"]


async def test_temperature_and_tokens_are_sent_where_they_are_configured(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    await connect(temperature=0.3, max_tokens=77).complete(MODEL, "hello")
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (0.3, 77)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_error_that_may_pass_is_tried_again(
    server: Server, connect: Callable[..., Endpoint], status: int
) -> None:
    answers = iter([(status, {"error": "later"}), (status, b"<html>"), said("[1]")])
    server.answer = lambda _body: next(answers)
    endpoint = connect(max_retries=2)
    assert (await endpoint.complete(MODEL, "hello")).text == "[1]"
    assert len(server.bodies) == 3
    assert endpoint.failures == 0


async def test_an_error_that_does_not_pass_is_an_opponents_error_and_names_the_model(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: (500, {"error": {"message": "out of order"}})
    with pytest.raises(OpponentError, match=r"vendor/model:free.*out of order"):
        await connect(max_retries=1).complete(MODEL, "hello")
    assert len(server.bodies) == 2


async def test_no_answer_in_time_is_an_error(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.answer = lambda _body: time.sleep(1) or said("late")
    with pytest.raises(OpponentError, match="APITimeoutError"):
        await connect(timeout_s=0.1).complete(MODEL, "hello")


async def test_an_answer_that_drips_for_ever_is_none_in_time_attempt_by_attempt(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.drip_s = 0.05
    endpoint = connect(timeout_s=0.3, max_retries=1)
    with pytest.raises(OpponentError, match="APITimeoutError"):
        await asyncio.wait_for(endpoint.complete(MODEL, "hello"), 30)
    assert len(server.bodies) == 2
    server.drip_s = None
    assert (await endpoint.complete(MODEL, "hello")).text == "\\boxed{4}"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{no json"),
        ("application/json", b"\xff\xfe"),
        ("application/json", []),
        ("application/json", "text"),
        ("application/json", {"choices": []}),
        ("application/json", {"choices": [{}]}),
        ("application/json", {"choices": None}),
        ("application/json", {"choices": [{"message": None, "finish_reason": "stop"}]}),
        ("application/json", said(None)[1]),
        ("application/json", said("")[1]),
        ("application/json", said(["not", "text"])[1]),
        ("text/html", b"<html>Welcome</html>"),
        ("application/json", b"[" * 200_000),
    ],
)
async def test_garbage_is_an_opponents_error_and_nothing_else(
    server: Server, connect: Callable[..., Endpoint], content_type: str, body: Any
) -> None:
    server.content_type, server.answer = content_type, lambda _body: (200, body)
    with pytest.raises(OpponentError, match=MODEL):
        await connect().complete(MODEL, "hello")


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("has_length", [True, False])
async def test_answer_without_end_is_given_up(
    server: Server, connect: Callable[..., Endpoint], status: int, has_length: bool
) -> None:
    server.has_length = has_length
    server.answer = lambda _body: (status, b" " * 2 * MAX_ANSWER_BYTES)
    with pytest.raises(OpponentError, match=f"answered more than {MAX_ANSWER_BYTES} bytes"):
        await connect(max_retries=3).complete(MODEL, "hello")
    assert len(server.bodies) == 1, "another attempt would be paid, too"


async def test_answer_that_inflates_is_declined(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.content_encoding = "gzip"
    server.answer = lambda _body: (200, gzip.compress(json.dumps(said("x" * 1000)[1]).encode()))
    with pytest.raises(OpponentError, match=r"compressed its answer \(gzip\)"):
        await connect().complete(MODEL, "hello")
    assert server.accepted == ["identity"]


async def test_redirect_is_not_followed_but_named(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.location, server.answer = "https://elsewhere/v1", lambda _body: (307, b" " * 2 * MAX_ANSWER_BYTES)
    with pytest.raises(OpponentError, match=r"redirects to https://elsewhere/v1: set opponents\.base_url"):
        await connect(max_retries=3).complete(MODEL, "hello")
    assert len(server.bodies) == 1


async def test_long_reply_loses_its_middle_and_says_so(
    server: Server, connect: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = lambda _body: said("I think" + "." * 2 * MAX_TEXT_CHARS + "\\boxed{4}")
    reply = await OpenAICompatiblePlayer(connect(), AGENT, num_players=2).act("hello")
    assert reply.action == "[4]"
    assert reply.text.startswith("I think...") and len(reply.text) < MAX_TEXT_CHARS + 100
    assert f"[… {MAX_TEXT_CHARS + 16} characters are left out here …]" in reply.text
    assert f"a reply of {2 * MAX_TEXT_CHARS + 16} characters" in caplog.text


async def test_half_a_character_in_an_answer_becomes_a_question_mark(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: (200, json.dumps(said("[1] \ud800")[1]).encode())
    assert (await connect().complete(MODEL, "hello")).text == "[1] ?"


async def test_an_answer_that_used_up_its_tokens_in_thought_is_an_answer_without_a_move(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: said(None, finish_reason="length")
    reply = await OpenAICompatiblePlayer(connect(), AGENT, 2).act("board")
    assert (reply.action, reply.format_ok, reply.is_cut_off) == ("", False, True)


@pytest.mark.parametrize(
    ("finish_reason", "is_cut_off"),
    [("length", True), ("content_filter", True), ("stop", False), ("eos_token", False), (None, False), ({}, False)],
)
async def test_an_answer_that_its_model_did_not_end_is_told_from_others(
    server: Server, connect: Callable[..., Endpoint], finish_reason: Any, is_cut_off: bool
) -> None:
    server.answer = lambda _body: said("\\boxed{4}", finish_reason)
    reply = await OpenAICompatiblePlayer(connect(), AGENT, 2).act("board")
    assert (reply.text, reply.is_cut_off) == ("\\boxed{4}", is_cut_off)


async def test_the_key_is_in_no_error_and_in_no_log(
    server: Server, connect: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint = connect()
    answers = iter([*[(401, {"error": {"message": f"no such key: {KEY}"}})] * 3, (200, {"choices": [], "you": KEY})])
    server.answer = lambda _body: next(answers)
    for _ in range(4):
        with pytest.raises(OpponentError, match=MODEL) as caught:
            await endpoint.complete(MODEL, "hello")
        chain = [caught.value, caught.value.__cause__]
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert not any(KEY in str(error) for error in chain)
    assert "is paused" in caplog.text
    assert KEY not in caplog.text
    assert KEY not in str(endpoint.heard)  # type: ignore[attr-defined]


async def test_no_more_requests_are_under_way_than_is_allowed(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.answer = lambda _body: time.sleep(0.02) or said("[1]")
    endpoint = connect(max_concurrent_requests=3)
    await asyncio.gather(*(endpoint.complete(MODEL, str(n)) for n in range(20)))
    assert len(server.bodies) == 20
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    ("limit", "num_answers"),
    [
        ({"max_requests": 3}, 3),
        ({"max_total_tokens": 250}, 3),
        ({"max_usd": 0.0025, "usd_per_million_prompt_tokens": 5, "usd_per_million_completion_tokens": 55}, 3),
    ],
)
async def test_what_may_be_spent_is_spent_and_no_more(
    server: Server, connect: Callable[..., Endpoint], limit: dict[str, Any], num_answers: int
) -> None:
    endpoint = connect(**limit)
    for _ in range(num_answers):
        assert endpoint.can_play(MODEL)
        await endpoint.complete(MODEL, "hello")
    assert not endpoint.can_play(MODEL)
    for _ in range(2):
        with pytest.raises(OpponentError, match=f"spending limit reached: opponents.{next(iter(limit))}"):
            await endpoint.complete(MODEL, "hello")
    with pytest.raises(OpponentError, match="spending limit"):
        await endpoint.wait_for(MODEL)
    assert len(server.bodies) == num_answers
    assert len(endpoint.heard) == 1  # type: ignore[attr-defined]
    assert endpoint.figures()["opponents/tokens"] == 100 * num_answers


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -1000, "completion_tokens": 10, "total_tokens": -990}])
async def test_endpoint_without_plausible_usage_is_not_free(
    server: Server, connect: Callable[..., Endpoint], usage: dict[str, int] | None
) -> None:
    server.answer = lambda _body: said("x" * 300, usage=usage)
    endpoint = connect()
    await endpoint.complete(MODEL, "y" * 600)
    assert 250 < endpoint.budget.num_tokens < 400


async def test_a_model_that_fails_again_and_again_is_paused_tried_by_one_and_resumed(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    endpoint = connect(pause_s=0.2, max_pause_s=0.3)

    async def fails(model: str = MODEL) -> None:
        with pytest.raises(OpponentError):
            await endpoint.complete(model, "hello")

    server.answer = lambda _body: (500, {"error": "down"})
    for _ in range(3):
        assert endpoint.can_play(MODEL)
        await fails()
    assert not endpoint.can_play(MODEL)
    assert endpoint.can_play("another/model")
    await fails()  # of a game that was under way: no new pause
    assert [text for text in endpoint.heard if "0.2 s" in text] == endpoint.heard  # type: ignore[attr-defined]
    await asyncio.sleep(0.25)
    assert [endpoint.can_play(MODEL) for _ in range(3)] == [True, False, False]
    await fails()
    assert "paused for 0.3 s" in endpoint.heard[-1]  # type: ignore[attr-defined]
    assert endpoint.figures()["opponents/paused"] == 1
    await asyncio.sleep(0.35)
    server.answer = lambda _body: said("[1]")
    assert [endpoint.can_play(MODEL) for _ in range(2)] == [True, False]
    await endpoint.complete(MODEL, "hello")
    assert all(endpoint.can_play(MODEL) for _ in range(3))
    assert "answers again" in endpoint.heard[-1]  # type: ignore[attr-defined]
    assert endpoint.figures()["opponents/paused"] == 0


async def test_a_server_that_is_not_there_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        url = gone.url
    endpoint = Endpoint(OpponentsConfig(base_url=url, max_retries=0), print)
    with pytest.raises(OpponentError, match="APIConnectionError"):
        await endpoint.complete(MODEL, "hello")
    await endpoint.close()


def test_openrouters_key_goes_to_openrouter_and_the_other_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENROUTER_API_KEY", "for openrouter")
    monkeypatch.setenv("OPENAI_API_KEY", "for others")
    assert endpoint_url(None) == OPENROUTER_URL
    assert api_key(OPENROUTER_URL) == "for openrouter"
    for other in ("https://api.example.com/v1", "https://openrouter.ai.example.com", "https://notopenrouter.ai/v1"):
        assert api_key(other) == "for others"
    monkeypatch.delenv("OPENAI_API_KEY")
    assert api_key("https://api.example.com/v1") is None
    assert key_variable("https://api.example.com/v1") == "OPENAI_API_KEY"
    assert api_key("http://127.0.0.1:8000/v1") is not None, "a server of one's own may ask for none"
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.example.com/v1")
    assert endpoint_url(None) == "https://api.example.com/v1"
    assert endpoint_url("https://configured.example.com") == "https://configured.example.com"


async def test_a_request_that_waits_for_a_slot_is_given_up_when_its_model_is_paused(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: time.sleep(0.5) or said("late")
    endpoint = connect(timeout_s=0.1, max_concurrent_requests=1, pause_s=60)
    requests = [endpoint.complete(MODEL, "hello") for _ in range(12)]
    errors = [str(error) for error in await asyncio.gather(*requests, return_exceptions=True)]
    assert len(server.bodies) == 3
    assert sum("was paused while a request waited" in error for error in errors) == 9
