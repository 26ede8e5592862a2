"""Models behind an OpenAI-compatible endpoint, tested with a real HTTP server on loopback."""

import asyncio
import gc
import gzip
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from fakes.openai_server import Server, chat_reply, serving
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.errors import ConfigError, OpponentError
from unstable_lite.games.answers import KNOWN_TAGS
from unstable_lite.games.api_keys import OPENROUTER_URL, api_key, endpoint_url, is_loopback, key_variable
from unstable_lite.games.players import openai_compatible
from unstable_lite.games.players.openai_compatible import (
    FAILURES_BEFORE_PAUSE,
    MAX_ANSWER_BYTES,
    MAX_TEXT_CHARS,
    Endpoint,
)
from unstable_lite.games.players.policy import OpenAICompatiblePlayer
from unstable_lite.games.templates import CHAT_TEMPLATES, Template
from unstable_lite.types import AgentSpec, ModelRef

Connect = Callable[..., Endpoint]
"""Function that makes an endpoint; it is closed after the test."""
KEY = "sk-very-secret-key"
MODEL = "vendor/model:free"
REF = ModelRef(uid=f"fixed-{MODEL}", kind="fixed", name=MODEL)
AGENT = AgentSpec(pid=0, model=REF, collect_data=False, prompt_template="tiny", action_extraction_fn="default")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def reported() -> list[str]:
    """Return what the endpoints of `connect` reported."""
    return []


@pytest.fixture
async def connect(server: Server, reported: list[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made: list[Endpoint] = []

    def new(max_retries: int = 0, pauses: tuple[float, float] = (10.0, 600.0), **config: Any) -> Endpoint:
        monkeypatch.setattr(openai_compatible, "MAX_RETRIES", max_retries)
        monkeypatch.setattr(openai_compatible, "PAUSE_S", pauses[0])
        monkeypatch.setattr(openai_compatible, "MAX_PAUSE_S", pauses[1])
        made.append(Endpoint(OpponentsConfig(**{"base_url": server.url} | config), reported.append))
        return made[-1]

    yield new
    for endpoint in made:
        await endpoint.close()


async def error_of(endpoint: Endpoint, says: str | None = None) -> OpponentError:
    with pytest.raises(OpponentError, match=says) as caught:
        await endpoint.complete(MODEL, "hello")
    return caught.value


async def test_model_gets_our_prompt_and_its_box_is_its_action(server, connect):
    player = OpenAICompatiblePlayer(connect(), AGENT, num_players=2)
    reply = await player.act("THE BOARD <|im_end|>")
    (body,) = server.bodies
    assert body == {"model": MODEL, "messages": [{"role": "user", "content": reply.prompt}]}
    assert reply.prompt == Template("", CHAT_TEMPLATES["chat"].user).prompt("THE BOARD <|im_end|>", 2)
    for says in ("THE BOARD < |im_end|>", "two-player game", r"\boxed{}"):
        assert says in reply.prompt
    assert (reply.action, reply.text, reply.format_ok) == ("[4]", "\\boxed{4}", True)
    assert server.keys == [f"Bearer {KEY}"]
    await connect(temperature=0.3, max_tokens=77).complete(MODEL, "hello")
    assert (server.bodies[1]["temperature"], server.bodies[1]["max_tokens"]) == (0.3, 77)


async def test_another_name_of_max_tokens_is_learnt_once(server, connect):
    refusal = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )
    server.answer = lambda body: (400, {"error": {"message": refusal}}) if "max_tokens" in body else chat_reply("4")
    endpoint = connect(max_tokens=77)
    for _ in range(2):
        assert (await endpoint.complete(MODEL, "hello")).text == "4"
    names = [{"max_tokens", "max_completion_tokens"} & body.keys() for body in server.bodies]
    assert names == [{"max_tokens"}, {"max_completion_tokens"}, {"max_completion_tokens"}]
    assert server.bodies[-1]["max_completion_tokens"] == 77
    assert (endpoint.failures, endpoint.metrics()["opponents/requests"]) == (0, 3)


@pytest.mark.parametrize(
    ("limit", "says", "num_requests"),
    [
        (77, "max_tokens is too large", [1, 0, 1, 0]),
        (77, "max_tokens and prompt exceed the context length", [1, 1]),
        (77, "no such model", [1, 1]),
        (None, "max_tokens is unknown", [0, 0]),
    ],
)
async def test_other_refusals_keep_max_tokens(server, connect, limit, says, num_requests):
    server.answer = lambda _body: (400, {"error": {"message": says}})
    endpoint = connect(max_tokens=limit)
    for _ in range(2):
        await error_of(endpoint, says)
    assert ["max_tokens" in body for body in server.bodies] == num_requests


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_transient_error_is_retried_until_the_last_attempt(server, connect, status):
    answers = iter([(status, {"error": "later"}), (status, b"<html>"), chat_reply("[1]")])
    server.answer = lambda _body: next(answers, (status, {"error": {"message": "out of order"}}))
    endpoint = connect(max_retries=2)
    assert (await endpoint.complete(MODEL, "hello")).text == "[1]"
    assert (len(server.bodies), endpoint.failures) == (3, 0)
    await error_of(endpoint, r"vendor/model:free.*out of order")
    assert (len(server.bodies), endpoint.failures) == (6, 1)


TOO_LONG = [
    (400, {"error": {"message": "Please shorten it.", "code": "context_length_exceeded"}}),
    (400, {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."}),
    (400, {"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 5000, "n_ctx": 4096}}),
    (422, {"error": "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000"}),
    (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4090 `inputs` tokens and 20"}),
    (400, {"error": {"message": "prompt is too long: 208310 tokens > 200000 maximum"}}),
    (
        400,
        {"error": {"message": "The input token count (50000) exceeds the maximum number of tokens allowed (32768)."}},
    ),
    (400, {"message": "Prompt contains 40000 tokens, too large for model with 32768 maximum length"}),
    (200, {"error": {"code": 400, "message": "This endpoint's maximum context length is 8192 tokens."}}),
]


OTHER_REFUSALS = [
    (400, "max_tokens is too large: 5000. This model supports at most 4096 completion tokens."),
    (400, "max_tokens: 10000 > 8192, which is the maximum allowed number of output tokens"),
    (429, "Rate limit reached: too many tokens per minute"),
    (404, "no such model"),
]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        *((status, body, "prompt_too_long") for status, body in TOO_LONG),
        *((status, {"error": {"message": says}}, "opponent_failed") for status, says in OTHER_REFUSALS),
    ],
)
async def test_only_refusals_of_a_long_prompt_do_not_pause_a_server(server, connect, status, body, reason):
    server.answer = lambda _body: (status, body)
    endpoint = connect(max_retries=0)
    for number in range(1, FAILURES_BEFORE_PAUSE + 1):
        error = await error_of(endpoint, "vendor/model:free")
        assert (error.reason, endpoint.failures) == (reason, number * (reason == "opponent_failed"))
    assert (endpoint.failures == 0) == endpoint.can_play(MODEL) == (reason == "prompt_too_long")


async def test_late_or_dripping_answer_times_out_on_each_attempt(server, connect):
    server.drip_s = 0.05
    endpoint = connect(timeout_s=1, max_retries=1)
    with pytest.raises(OpponentError, match="APITimeoutError"):
        await asyncio.wait_for(endpoint.complete(MODEL, "hello"), 30)
    assert len(server.bodies) == 2
    server.drip_s = None
    assert (await endpoint.complete(MODEL, "hello")).text == "\\boxed{4}"
    server.answer = lambda _body: time.sleep(1) or chat_reply("late")
    await error_of(connect(timeout_s=0.1), "APITimeoutError")


ENDLESS = b" " * 2 * MAX_ANSWER_BYTES
GARBAGE = [
    b"{no json", b"\xff\xfe", [], "text", {"choices": []}, {"choices": [{}]}, {"choices": None},
    {"choices": [{"message": None, "finish_reason": "stop"}]}, {"choices": {"0": {"message": {"content": "4"}}}},
    {"choices": [{"message": {"content": "4"}}] * 100}, {"error": {"message": "no provider"}},
    chat_reply({"text": "4"})[1], chat_reply(4)[1], chat_reply([{"type": "text", "text": 4}])[1],
    chat_reply("", "error")[1], chat_reply("4")[1]["choices"], chat_reply("4", created=float("nan"))[1],
    b'{"choices": [{"message": {"content": "\xff\xfe"}}]}', b'{"choices": [{"message": {"content": ' + b"[" * 200_000,
    b"[" * 200_000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "content_type", "body", "says"),
    [
        (400, "application/json; charset=idna", b'{"error": {"message": "no credit"}}', "400 - no credit"),
        (400, "application/json", [{"error": {"message": "no credit"}}], "400 - .*no credit"),
        (502, "text/html", b"<html>Bad Gateway</html>", "502 - '<html>Bad Gateway"),
        (200, "application/json", {"error": {"message": "no credit"}}, "begins with '.*no credit"),
        (200, "text/event-stream", b'data: {"choices": []}', "begins with 'data: "),
        (200, "text/html", f"<html>{KEY}</html>".encode(), "begins with '<html><key></html>'"),
        (200, "text/html", b"<html>Welcome</html>", ""),
        *((200, "application/json", body, "") for body in GARBAGE),
    ],
)
async def test_garbage_is_an_opponent_error_that_shows_its_beginning(server, connect, status, content_type, body, says):
    server.content_type = content_type
    server.answer = lambda _body: (status, body)
    await error_of(connect(), f"{MODEL}.*{says}")


@pytest.mark.parametrize(
    ("content", "finish_reason", "text"),
    [
        ([{"type": "text", "text": "\\boxed"}, {"type": "text", "text": "{4}"}], "length", "\\boxed{4}"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "5"}]}, {"text": "4"}], "content_filter", "4"),
        (["4", None, {"text": "2"}, {"type": None, "text": "!"}, {"type": "reasoning", "text": ["5"]}], "stop", "42!"),
        ([{"type": "reasoning", "text": "5"}, {"type": "output_text", "text": "4", "annotations": []}], {}, "4"),
        *(("4", reason, "4") for reason in ("eos_token", None)),
    ],
)
async def test_text_parts_of_an_answer_are_joined_and_a_truncated_one_is_marked(
    server, connect, content, finish_reason, text
):
    server.answer = lambda _body: chat_reply(content, finish_reason)
    reply = await OpenAICompatiblePlayer(connect(), AGENT, 2).act("board")
    assert (reply.text, reply.is_cut_off) == (text, finish_reason in ("length", "content_filter"))


@pytest.mark.parametrize("tags", KNOWN_TAGS)
async def test_unclosed_thought_of_an_endpoint_gives_no_action(server, connect, tags):
    opens, closes = tags
    for content, action in ((f"{opens}\\boxed{{1}}", ""), (f"{opens}\\boxed{{1}}{closes}\\boxed{{2}}", "[2]")):
        server.answer = lambda _body, content=content: chat_reply(content)
        assert (await OpenAICompatiblePlayer(connect(), AGENT, 2).act("board")).action == action


@pytest.mark.parametrize(
    "message",
    [
        {"content": None}, {"content": ""}, {"content": []}, {}, {"content": None, "refusal": "I must not play games."},
        {"content": [{"type": "refusal", "refusal": "I must not play games."}]},
        {"content": None, "reasoning_content": "\\boxed{4}", "tool_calls": [{"id": "1"}]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_answer_without_text_is_an_empty_move_and_no_failure(server, connect, message, finish_reason):
    server.answer = lambda _body: (200, {"choices": [{"message": message, "finish_reason": finish_reason}]})
    endpoint = connect()
    for _ in range(4):  # more than the failures before a pause
        reply = await OpenAICompatiblePlayer(endpoint, AGENT, 2).act("board")
        assert (reply.action, reply.format_ok, reply.is_cut_off) == ("", False, finish_reason == "length")
    assert endpoint.failures == 0 and endpoint.can_play(MODEL)


VALID = json.dumps(chat_reply("4")[1]["choices"][0])


@pytest.mark.parametrize(
    "body",
    [
        '{"choices":[' + ",".join(["{}"] * 2_600_000) + "]}",
        f'{{"choices":[{VALID},' + ",".join(["{}"] * 2_500_000) + "]}",
        '{"choices":[' + ",".join([VALID] * 80_000) + "]}",
        '{"choices":[{"message":{"content":[' + ",".join(["{}"] * 2_600_000) + "]}}]}",
        '{"choices":[{"message":{"content":' + ",".join(['{"a":[]}'] * 900_000) + "}}]}",
        '{"error":[' + ",".join(['{"a":{}}'] * 900_000) + "]}",
    ],
    ids=["empty", "one-valid", "valid", "parts", "no-json", "error"],
)
async def test_huge_answer_fails_without_blocking_the_event_loop(server, connect, body):
    content, status = body.encode(), 400 if "error" in body[:10] else 200
    assert 7_000_000 < len(content) < MAX_ANSWER_BYTES
    server.answer = lambda _body: (status, content)
    gc.collect()  # a collection that is due would count as time of the answer
    before = time.thread_time()
    error = await error_of(connect(), MODEL)
    assert time.thread_time() - before < 1.0
    assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("keys", "answer", "says"),
    [
        *(({"has_length": has}, (status, ENDLESS), f"{MAX_ANSWER_BYTES} bytes") for has in (True, False)
          for status in (200, 400)),
        ({"content_encoding": "gzip"}, (200, gzip.compress(json.dumps(chat_reply("x" * 1000)[1]).encode())), "gzip"),
        ({"location": "https://elsewhere/v1"}, (307, ENDLESS), r"https://elsewhere/v1.*opponents\.base_url"),
    ],
)  # fmt: skip
async def test_endless_compressed_and_redirected_answers_are_refused_once(server, connect, keys, answer, says):
    for name, value in keys.items():
        setattr(server, name, value)
    server.answer = lambda _body: answer
    await error_of(connect(max_retries=3), says)
    assert len(server.bodies) == 1, "another attempt would cost money, too"
    assert server.accepted == ["identity"]


async def test_long_reply_loses_its_middle_with_a_note(server, connect, caplog):
    server.answer = lambda _body: chat_reply("I think" + "." * 2 * MAX_TEXT_CHARS + "\\boxed{4}")
    reply = await OpenAICompatiblePlayer(connect(), AGENT, num_players=2).act("hello")
    assert reply.action == "[4]"
    assert reply.text.startswith("I think...") and len(reply.text) < MAX_TEXT_CHARS + 100
    assert f"{MAX_TEXT_CHARS + 16} characters" in reply.text
    assert f"{2 * MAX_TEXT_CHARS + 16} characters" in caplog.text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"[1] \ud800", "[1] ?"), (r"\uDFFF[1]", "?[1]"), (r"\ud83d\ud83d\ude00", "?\U0001f600"),
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\\ud800", r"\ud800"), (r"\\\ud800", "\\?"), (r"\\\\ud800", r"\\ud800"), (r"\ude00\ud83d", "??"),
        (r"\u00e9", "\u00e9"),
    ],
)  # fmt: skip
async def test_lone_surrogate_in_an_answer_becomes_a_question_mark(server, connect, written, read):
    server.answer = lambda _body: (200, json.dumps(chat_reply("TEXT")[1]).replace("TEXT", written).encode())
    assert (await connect().complete(MODEL, "hello")).text == read


async def test_key_appears_in_no_error_and_no_log(server, connect, reported, caplog):
    caplog.set_level(logging.DEBUG)
    endpoint = connect()
    answers = iter([*[(401, {"error": {"message": f"no such key: {KEY}"}})] * 3, (200, {"choices": [], "you": KEY})])
    server.answer = lambda _body: next(answers)
    for _ in range(4):
        error = await error_of(endpoint, MODEL)
        assert error.__suppress_context__ or error.__context__ is None
        assert KEY not in f"{error} {error.__cause__}"
    assert "paused" in caplog.text
    assert KEY not in caplog.text + str(reported)


async def test_concurrent_requests_are_limited(server, connect):
    server.answer = lambda _body: time.sleep(0.02) or chat_reply("[1]")
    endpoint = connect(max_concurrent_requests=3)
    await asyncio.gather(*(endpoint.complete(MODEL, str(n)) for n in range(20)))
    assert len(server.bodies) == 20
    assert server.most_at_once == 3


@pytest.mark.parametrize("limit", [{"max_requests": 3}, {"max_total_tokens": 250}])
async def test_spending_limits_are_reached_and_never_exceeded(server, connect, reported, limit):
    endpoint = connect(**limit)
    for _ in range(3):
        assert endpoint.can_play(MODEL)
        await endpoint.complete(MODEL, "hello")
    assert not endpoint.can_play(MODEL)
    for _ in range(2):
        await error_of(endpoint, f"opponents.{next(iter(limit))}")
    with pytest.raises(OpponentError, match="limit"):
        await endpoint.wait_for(MODEL)
    assert len(server.bodies) == 3
    assert len(reported) == 1
    assert endpoint.metrics()["opponents/tokens"] == 300


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        "free",
        *(
            {"prompt_tokens": prompt, "completion_tokens": answer}
            for strange in (-1000, 2**70, 2**40, 10**4000, True, 1.5, "90", None, [[]], {}, 1e300)
            for prompt, answer in ((strange, 10), (90, strange))
        ),
    ],
)
async def test_endpoint_without_plausible_usage_is_not_free(server, connect, usage):
    server.answer = lambda _body: chat_reply("x" * 300, usage=usage)
    endpoint = connect()
    await endpoint.complete(MODEL, "y" * 600)
    assert 250 < endpoint.budget.num_tokens < 400


async def test_repeatedly_failing_model_is_paused_probed_and_resumed(server, connect, reported):
    endpoint = connect(pauses=(0.2, 0.3))
    server.answer = lambda _body: (500, {"error": "down"})
    for _ in range(3):
        assert endpoint.can_play(MODEL)
        await error_of(endpoint)
    assert not endpoint.can_play(MODEL)
    assert endpoint.can_play("another/model")
    await error_of(endpoint)  # in a game that had already started: no new pause
    assert [text for text in reported if "0.2 s" in text] == reported
    await asyncio.sleep(0.25)
    assert [endpoint.can_play(MODEL) for _ in range(3)] == [True, False, False]
    await error_of(endpoint)
    assert "0.3 s" in reported[-1]
    assert endpoint.metrics()["opponents/paused"] == 1
    await asyncio.sleep(0.35)
    server.answer = lambda _body: chat_reply("[1]")
    assert [endpoint.can_play(MODEL) for _ in range(2)] == [True, False]
    await endpoint.complete(MODEL, "hello")
    assert all(endpoint.can_play(MODEL) for _ in range(3))
    assert "again" in reported[-1]
    assert endpoint.metrics()["opponents/paused"] == 0


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets a proxy without exceptions."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def use(proxy: str) -> None:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy)

    return use


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://nowhere:1", "nonsense"])
async def test_server_on_this_machine_is_reached_past_a_proxy(server, connect, proxied, proxy, host):
    proxied(proxy)
    endpoint = connect(base_url=server.url.replace("127.0.0.1", host))
    assert (await endpoint.complete(MODEL, "hello")).text == "\\boxed{4}"


async def test_connection_error_names_the_proxy_without_its_password(connect, proxied):
    with serving() as gone:
        port = gone.url.removesuffix("/v1").rpartition(":")[2]
    proxied(f"http://me:hunter2@127.0.0.1:{port}")
    endpoint = connect(base_url="http://models.example/v1")
    error = await error_of(endpoint, rf"proxy 127\.0\.0\.1:{port} .*NO_PROXY=models\.example")
    assert "APIConnectionError" in str(error) and "hunter2" not in str(error)


@pytest.mark.parametrize("proxy", ["nonsense://me:hunter2@nowhere:1", "http://me:hunter2@nowhere:port"])
def test_unusable_proxy_is_a_config_error(connect, proxied, proxy):
    proxied(proxy)
    with pytest.raises(ConfigError, match="proxy") as caught:
        connect(base_url="http://models.example/v1")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_near"),
    [
        ("http://127.0.0.1:8000/v1", True), ("http://127.9.9.9/v1", True), ("HTTP://LocalHost/v1", True),
        ("https://[::1]:8000/v1", True), ("http://0.0.0.0:8000/v1", True), ("http://api.localhost/v1", False),
        ("http://10.0.0.1/v1", False), ("http://localhost.example.com/v1", False), ("http://127.0.0.1.nip.io", False),
        ("http://gpu-node-7:8000", False), ("http://localhost@evil/v1", False), ("http://[fe80::1]/v1", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_loopback(url, is_near):
    assert is_loopback(url) is is_near


def test_openrouter_gets_its_own_key_and_others_the_openai_key(monkeypatch):
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


async def test_waiting_request_is_dropped_when_its_model_is_paused(server, connect):
    server.answer = lambda _body: time.sleep(1) or chat_reply("late")
    endpoint = connect(timeout_s=0.5, max_concurrent_requests=1, pauses=(60, 600))
    requests = [endpoint.complete(MODEL, "hello") for _ in range(12)]
    errors = [str(error) for error in await asyncio.gather(*requests, return_exceptions=True)]
    assert len(server.bodies) == 3
    assert sum("paused" in error for error in errors) == 9
