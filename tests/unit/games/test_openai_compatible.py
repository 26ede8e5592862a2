"""Models behind an OpenAI-compatible endpoint, tested with a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from fakes.openai_server import Server, chat_reply, serving
from unstable_lite.config.games import OpponentsConfig
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
    """Yield a function that makes endpoints, which are closed after the test."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made: list[Endpoint] = []
    reported: list[str] = []

    def new(**config: Any) -> Endpoint:
        made.append(Endpoint(OpponentsConfig(base_url=server.url, **{"max_retries": 0, **config}), reported.append))
        made[-1].reported = reported  # type: ignore[attr-defined]
        return made[-1]

    yield new
    for endpoint in made:
        await endpoint.close()


async def test_model_gets_our_prompt_and_its_box_is_its_action(
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


async def test_temperature_and_max_tokens_are_sent_if_configured(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    await connect(temperature=0.3, max_tokens=77).complete(MODEL, "hello")
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (0.3, 77)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_transient_error_is_retried(server: Server, connect: Callable[..., Endpoint], status: int) -> None:
    answers = iter([(status, {"error": "later"}), (status, b"<html>"), chat_reply("[1]")])
    server.answer = lambda _body: next(answers)
    endpoint = connect(max_retries=2)
    assert (await endpoint.complete(MODEL, "hello")).text == "[1]"
    assert len(server.bodies) == 3
    assert endpoint.failures == 0


async def test_permanent_error_is_an_opponent_error_with_the_model(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: (500, {"error": {"message": "out of order"}})
    with pytest.raises(OpponentError, match=r"vendor/model:free.*out of order"):
        await connect(max_retries=1).complete(MODEL, "hello")
    assert len(server.bodies) == 2


async def test_late_answer_is_an_error(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.answer = lambda _body: time.sleep(1) or chat_reply("late")
    with pytest.raises(OpponentError, match="APITimeoutError"):
        await connect(timeout_s=0.1).complete(MODEL, "hello")


async def test_dripping_answer_times_out_on_each_attempt(server: Server, connect: Callable[..., Endpoint]) -> None:
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
        ("application/json", chat_reply(None)[1]),
        ("application/json", chat_reply("")[1]),
        ("application/json", chat_reply(["not", "text"])[1]),
        ("text/html", b"<html>Welcome</html>"),
        ("application/json", b"[" * 200_000),
    ],
)
async def test_garbage_is_always_an_opponent_error(
    server: Server, connect: Callable[..., Endpoint], content_type: str, body: Any
) -> None:
    server.content_type, server.answer = content_type, lambda _body: (200, body)
    with pytest.raises(OpponentError, match=MODEL):
        await connect().complete(MODEL, "hello")


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("has_length", [True, False])
async def test_endless_answer_is_aborted(
    server: Server, connect: Callable[..., Endpoint], status: int, has_length: bool
) -> None:
    server.has_length = has_length
    server.answer = lambda _body: (status, b" " * 2 * MAX_ANSWER_BYTES)
    with pytest.raises(OpponentError, match=f"{MAX_ANSWER_BYTES} bytes"):
        await connect(max_retries=3).complete(MODEL, "hello")
    assert len(server.bodies) == 1, "another attempt would cost money, too"


async def test_compressed_answer_is_refused(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.content_encoding = "gzip"
    server.answer = lambda _body: (200, gzip.compress(json.dumps(chat_reply("x" * 1000)[1]).encode()))
    with pytest.raises(OpponentError, match="gzip"):
        await connect().complete(MODEL, "hello")
    assert server.accepted == ["identity"]


async def test_redirect_is_reported_and_not_followed(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.location, server.answer = "https://elsewhere/v1", lambda _body: (307, b" " * 2 * MAX_ANSWER_BYTES)
    with pytest.raises(OpponentError, match=r"https://elsewhere/v1.*opponents\.base_url"):
        await connect(max_retries=3).complete(MODEL, "hello")
    assert len(server.bodies) == 1


async def test_long_reply_loses_its_middle_with_a_note(
    server: Server, connect: Callable[..., Endpoint], caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = lambda _body: chat_reply("I think" + "." * 2 * MAX_TEXT_CHARS + "\\boxed{4}")
    reply = await OpenAICompatiblePlayer(connect(), AGENT, num_players=2).act("hello")
    assert reply.action == "[4]"
    assert reply.text.startswith("I think...") and len(reply.text) < MAX_TEXT_CHARS + 100
    assert f"{MAX_TEXT_CHARS + 16} characters" in reply.text
    assert f"{2 * MAX_TEXT_CHARS + 16} characters" in caplog.text


async def test_lone_surrogate_in_an_answer_becomes_a_question_mark(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: (200, json.dumps(chat_reply("[1] \ud800")[1]).encode())
    assert (await connect().complete(MODEL, "hello")).text == "[1] ?"


async def test_answer_that_used_all_tokens_for_thought_has_no_move(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: chat_reply(None, finish_reason="length")
    reply = await OpenAICompatiblePlayer(connect(), AGENT, 2).act("board")
    assert (reply.action, reply.format_ok, reply.is_cut_off) == ("", False, True)


@pytest.mark.parametrize(
    ("finish_reason", "is_cut_off"),
    [("length", True), ("content_filter", True), ("stop", False), ("eos_token", False), (None, False), ({}, False)],
)
async def test_truncated_answer_is_marked(
    server: Server, connect: Callable[..., Endpoint], finish_reason: Any, is_cut_off: bool
) -> None:
    server.answer = lambda _body: chat_reply("\\boxed{4}", finish_reason)
    reply = await OpenAICompatiblePlayer(connect(), AGENT, 2).act("board")
    assert (reply.text, reply.is_cut_off) == ("\\boxed{4}", is_cut_off)


async def test_key_appears_in_no_error_and_no_log(
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
    assert "paused" in caplog.text
    assert KEY not in caplog.text
    assert KEY not in str(endpoint.reported)  # type: ignore[attr-defined]


async def test_concurrent_requests_are_limited(server: Server, connect: Callable[..., Endpoint]) -> None:
    server.answer = lambda _body: time.sleep(0.02) or chat_reply("[1]")
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
async def test_spending_limits_are_reached_and_never_exceeded(
    server: Server, connect: Callable[..., Endpoint], limit: dict[str, Any], num_answers: int
) -> None:
    endpoint = connect(**limit)
    for _ in range(num_answers):
        assert endpoint.can_play(MODEL)
        await endpoint.complete(MODEL, "hello")
    assert not endpoint.can_play(MODEL)
    for _ in range(2):
        with pytest.raises(OpponentError, match=f"opponents.{next(iter(limit))}"):
            await endpoint.complete(MODEL, "hello")
    with pytest.raises(OpponentError, match="limit"):
        await endpoint.wait_for(MODEL)
    assert len(server.bodies) == num_answers
    assert len(endpoint.reported) == 1  # type: ignore[attr-defined]
    assert endpoint.metrics()["opponents/tokens"] == 100 * num_answers


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -1000, "completion_tokens": 10, "total_tokens": -990}])
async def test_endpoint_without_plausible_usage_is_not_free(
    server: Server, connect: Callable[..., Endpoint], usage: dict[str, int] | None
) -> None:
    server.answer = lambda _body: chat_reply("x" * 300, usage=usage)
    endpoint = connect()
    await endpoint.complete(MODEL, "y" * 600)
    assert 250 < endpoint.budget.num_tokens < 400


async def test_repeatedly_failing_model_is_paused_probed_and_resumed(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    endpoint = connect(pause_s=0.2, max_pause_s=0.3)

    async def expect_failure(model: str = MODEL) -> None:
        with pytest.raises(OpponentError):
            await endpoint.complete(model, "hello")

    server.answer = lambda _body: (500, {"error": "down"})
    for _ in range(3):
        assert endpoint.can_play(MODEL)
        await expect_failure()
    assert not endpoint.can_play(MODEL)
    assert endpoint.can_play("another/model")
    await expect_failure()  # in a game that had already started: no new pause
    assert [text for text in endpoint.reported if "0.2 s" in text] == endpoint.reported  # type: ignore[attr-defined]
    await asyncio.sleep(0.25)
    assert [endpoint.can_play(MODEL) for _ in range(3)] == [True, False, False]
    await expect_failure()
    assert "0.3 s" in endpoint.reported[-1]  # type: ignore[attr-defined]
    assert endpoint.metrics()["opponents/paused"] == 1
    await asyncio.sleep(0.35)
    server.answer = lambda _body: chat_reply("[1]")
    assert [endpoint.can_play(MODEL) for _ in range(2)] == [True, False]
    await endpoint.complete(MODEL, "hello")
    assert all(endpoint.can_play(MODEL) for _ in range(3))
    assert "again" in endpoint.reported[-1]  # type: ignore[attr-defined]
    assert endpoint.metrics()["opponents/paused"] == 0


async def test_unreachable_server_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        url = gone.url
    endpoint = Endpoint(OpponentsConfig(base_url=url, max_retries=0), print)
    with pytest.raises(OpponentError, match="APIConnectionError"):
        await endpoint.complete(MODEL, "hello")
    await endpoint.close()


def test_openrouter_gets_its_own_key_and_others_the_openai_key(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert api_key("http://127.0.0.1:8000/v1") is not None, "a local server may need none"
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.example.com/v1")
    assert endpoint_url(None) == "https://api.example.com/v1"
    assert endpoint_url("https://configured.example.com") == "https://configured.example.com"


async def test_waiting_request_is_dropped_when_its_model_is_paused(
    server: Server, connect: Callable[..., Endpoint]
) -> None:
    server.answer = lambda _body: time.sleep(0.5) or chat_reply("late")
    endpoint = connect(timeout_s=0.1, max_concurrent_requests=1, pause_s=60)
    requests = [endpoint.complete(MODEL, "hello") for _ in range(12)]
    errors = [str(error) for error in await asyncio.gather(*requests, return_exceptions=True)]
    assert len(server.bodies) == 3
    assert sum("paused" in error for error in errors) == 9
