"""A served run, as clients see it: real server process, engine, sockets and OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from fakes import runs
from fakes.endpoint_games import endpoint_games
from fakes.handmade_adapters import fitting, write_adapter, write_run
from fakes.serving import KEY, Served, served
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.games.templates import CHAT_TEMPLATES
from unstable_lite.models import BUILTIN
from unstable_lite.models.tokenization import Tokenizer

pytestmark = pytest.mark.timeout(900)
NIM = "Welcome to Nim, Player 0!\n\nCurrent Pile:\n  pile 0: 3\n  pile 1: 4"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with the template `chat`, whose system message only training sees, and two checkpoints."""
    directory = tmp_path_factory.mktemp("served") / "mine"
    for number in (1, 2):
        write_adapter(directory / "checkpoints" / f"ckpt-{number}", fitting("builtin:tiny", number))
    text = runs.write_small(directory.parent).read_text()
    text = text.replace('prompt_template = "tiny"', 'prompt_template = "chat"').replace("= 512", "= 2048")
    (directory / "config.toml").write_text(text)
    return directory


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Served]:
    with served(run, run.parent / "log", "--checkpoint", "1", "--checkpoint", "last") as found:
        yield found


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=300)


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def post(server: Served, path: str, body: bytes, key: str = KEY) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{server.url}/{path}", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def health(server: Served) -> dict[str, Any]:
    with urllib.request.urlopen(server.url.replace("/v1", "/health"), timeout=60) as answer:
        return dict(json.load(answer))


def test_openai_client_lists_and_asks_each_model(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["mine/ckpt-1", "mine/ckpt-2", "base"]
    assert client.models.retrieve("mine/ckpt-2").id == "mine/ckpt-2"
    texts = set()
    for name in names:
        ask: Any = {"model": name, "messages": say(NIM), "max_tokens": 6, "seed": 3, "n": 8, "temperature": 2}
        answers = [client.chat.completions.create(**ask) for _ in range(2)]
        first, second = (tuple(choice.message.content for choice in answer.choices) for answer in answers)
        assert first == second and len(set(first)) > 1, "a seed gives the same answers, one for each choice"
        assert answers[0].usage is not None and answers[0].usage.prompt_tokens > 10
        assert answers[0].usage.completion_tokens <= 48
        texts.add(first)
    assert len(texts) == 3


def test_answer_ends_at_its_limit_or_its_stop_string(client: openai.OpenAI) -> None:
    ask: Any = {"model": "base", "prompt": "a", "temperature": 5.0, "max_tokens": 12}
    whole = {seed: client.completions.create(**ask, seed=seed).choices[0] for seed in range(20)}
    seed, cut = next((seed, one) for seed, one in whole.items() if one.finish_reason == "length")
    counted = client.completions.create(**ask, seed=seed)
    assert counted.usage is not None and counted.usage.completion_tokens == 12
    stop = cut.text[5:8]
    stopped = client.completions.create(**ask, seed=seed, stop=[stop]).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", cut.text.partition(stop)[0])


@pytest.mark.parametrize("stop", [None, " pile"])
def test_streamed_parts_make_the_whole_answer(client: openai.OpenAI, stop: str | None) -> None:
    ask: Any = {"model": "mine/ckpt-2", "messages": say(NIM), "max_tokens": 60, "seed": 5, "temperature": 3, "n": 2}
    ask |= {"stop": stop} if stop else {}
    whole = client.chat.completions.create(**ask)
    texts, reasons, parts, usage = ["", ""], ["", ""], 0, None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            parts += 1
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert parts > 8, "the text comes while it grows"


async def test_endpoint_player_shows_the_served_model_its_training_prompt(
    server: Served, client: openai.OpenAI
) -> None:
    config = OpponentsConfig(base_url=server.url, temperature=1.0, max_tokens=16, max_retries=0)
    os.environ["OPENAI_API_KEY"] = KEY
    tokenizer, chat = Tokenizer(BUILTIN["builtin:tiny"]), CHAT_TEMPLATES["chat"]
    text, end_of_turn = tokenizer.prompts([chat])["chats"]["chat"]
    trained = chat.laid_out(text, tuple(end_of_turn))
    records, metrics = await endpoint_games(config, "mine/ckpt-2", "chat", 4)
    observations = [turn.observation for record in records for turn in record.turns if turn.pid == 0]
    for observation in observations:
        answer = client.chat.completions.create(
            model="mine/ckpt-2",
            messages=say(chat.message(observation, 2)),
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        prompt = trained.prompt(observation, 2)
        assert "You play text games" in prompt
        assert answer.prompt_token_ids == tokenizer.encode(prompt).tolist()  # type: ignore[attr-defined]
    assert metrics["opponents/failures"] == 0
    assert len(observations) >= 4


async def test_many_requests_at_once_are_answered(server: Served) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=300) as client:
        names = ["mine/ckpt-1", "mine/ckpt-2", "base"]
        asked = [
            client.chat.completions.create(model=names[i % 3], messages=say(f"{NIM} {i}"), max_tokens=8, seed=i)
            for i in range(60)
        ]
        answers = await asyncio.gather(*asked)
    assert [answer.model for answer in answers] == [names[i % 3] for i in range(60)]
    assert all(answer.choices[0].finish_reason in ("stop", "length") for answer in answers)


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("chat/completions", b"{", 400, "truncated"),
        ("chat/completions", b'{"model": "base", "messages": []}', 400, "messages"),
        (
            "chat/completions",
            b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "tools": [1]}',
            400,
            "tools",
        ),
        ("chat/completions", b'{"model": "gpt", "messages": [{"role": "user", "content": "x"}]}', 404, "mine/ckpt-2"),
        ("completions", b'{"model": "base", "prompt": [99999]}', 400, "token ids"),
        ("completions", json.dumps({"model": "base", "prompt": "a b" * 3000}).encode(), 400, "2048"),
        ("completions", b" " * (5 << 20), 413, "larger"),
        ("embeddings", b"{}", 404, "Not Found"),
    ],
)
def test_bad_request_gets_an_openai_error(server: Served, path: str, body: bytes, status: int, named: str) -> None:
    code, answer = post(server, path, body)
    assert code == status, answer
    assert named in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"


def test_request_without_the_key_is_refused(server: Served) -> None:
    code, answer = post(server, "completions", b'{"model": "base", "prompt": "a"}', key="wrong")
    assert (code, answer["error"]["code"]) == (401, "invalid_api_key")
    assert KEY not in server.log.read_text()


def test_client_that_leaves_is_forgotten(server: Served) -> None:
    # With this seed each of the answers has more than 120 tokens, so that none is finished when they are counted.
    long = {"max_tokens": 1900, "temperature": 100, "seed": 3}
    body = json.dumps({"model": "base", "prompt": "a", "n": 60, "stream": True, **long})
    host, port = re.search(r"//(.+):(\d+)/", server.url).groups()  # type: ignore[union-attr]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert health(server)["unanswered"] == 60
    runs.wait_for(lambda: health(server)["unanswered"] == 0, 20)
    (engine,) = psutil.Process(server.process.pid).children()
    runs.wait_for(lambda: engine.cpu_percent(0.5) < 20, 30)  # it does not compute them either
    sockets = [one for one in psutil.Process(server.process.pid).net_connections() if one.status == "ESTABLISHED"]
    assert len(sockets) <= 1
    assert "Traceback" not in server.log.read_text()


def test_port_in_use_is_one_message(server: Served, run: Path) -> None:
    port = server.url.rpartition(":")[2].partition("/")[0]
    code, out, err = runs.run("serve", run, "--port", port)
    assert code == 1 and err.count("\n") == 1 and f"127.0.0.1:{port}" in err and "--port" in err, out + err


def test_dead_engine_is_an_error_and_is_replaced(server: Served, client: openai.OpenAI) -> None:
    (engine,) = psutil.Process(server.process.pid).children()
    engine.kill()
    with pytest.raises(openai.InternalServerError) as caught:
        for _ in range(20):
            client.completions.create(model="mine/ckpt-1", prompt="a", max_tokens=500, temperature=5)
    assert caught.value.status_code == 503 and "again" in str(caught.value)

    def answers() -> bool:
        try:
            return bool(client.completions.create(model="mine/ckpt-1", prompt="a", max_tokens=2).choices)
        except openai.InternalServerError:
            return False

    runs.wait_for(answers, 600)


def test_ctrl_c_ends_server_and_engines(server: Served) -> None:
    """Must be the last test of this module."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert runs.are_gone(children)
    log = server.log.read_text()
    assert log.rstrip().endswith("stopped") and "Traceback" not in log


@pytest.fixture
def scripted(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--checkpoint", "7"), "has no ckpt-7"),
        (("--checkpoint", "newer"), "'best' or 'last'"),
        (("--checkpoint", "best"), "none is the best"),
        (("--host", "0.0.0.0"), "--api-key-env"),
        (("--api-key-env", "UNSET_API_KEY"), "UNSET_API_KEY"),
        (("--api-key-env", "HOME"), "_API_KEY"),
        (("--template", "tinny"), "tiny"),
        (("--name", "base"), "base"),
        (("--name", "x", "--checkpoint", "1", "--checkpoint", "2"), "2 checkpoints"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
    ],
)
def test_impossible_service_is_refused_before_anything_starts(
    scripted: Path, arguments: tuple[str, ...], problem: str
) -> None:
    code, out, err = _in_process("serve", scripted, *arguments)
    assert code != 0 and problem in err, out + err
    assert "waiting for" not in out


def test_run_without_a_checkpoint_and_foreign_code_are_refused(scripted: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty" / "config.toml").write_text((scripted / "config.toml").read_text())
    code, _, err = _in_process("serve", tmp_path / "empty")
    assert code == 1 and "has no checkpoint yet" in err
    config = scripted / "config.toml"
    config.write_text(
        config.read_text().replace("[league]", '[[train_envs]]\nenv_id = "evil:Nim"\nnum_players = 2\n[league]')
    )
    code, _, err = _in_process("serve", scripted)
    assert code == 1 and "evil:Nim" in err and "--trust-config" in err


def _in_process(*arguments: str | Path) -> tuple[int, str, str]:
    from typer.testing import CliRunner

    from unstable_lite.cli.app import app

    done = CliRunner().invoke(app, [*map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr
