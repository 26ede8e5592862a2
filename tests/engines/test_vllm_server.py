"""The engine that talks to vLLM's server, against one that misbehaves: every failure is told, with the server's URL.

Against the real server the conformance suite runs, and test_vllm_server_run.py.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_vllm
from fake_vllm import IDS, LOGPROBS, FakeVLLM, error
from remote_engine import engine_spec
from unstable_lite.engines import vllm_server
from unstable_lite.engines.vllm_server import VLLMServerEngine
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.transport.messages import Failed, Generate, Generated

KEY = "a key that nobody may read"
Connect = Callable[..., VLLMServerEngine]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "RETRY_AFTER_S", (0.0, 0.0))
    monkeypatch.setattr(vllm_server, "NOT_SEEN_YET_S", (0.0,))
    monkeypatch.setattr(vllm_server, "LOOK_AGAIN_S", 0.01)


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with fake_vllm.serving() as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "folder").mkdir()
    return folder


@pytest.fixture
def connect(server: FakeVLLM, folder: Path) -> Iterator[Connect]:
    engines = []

    def connect(**engine: Any) -> VLLMServerEngine:
        settings = {"urls": [server.url], "adapter_folder": str(folder), "start_timeout_s": 0.5} | engine
        endpoint = "ipc:///tmp/unstable_lite-mine/bus"
        engines.append(VLLMServerEngine(engine_spec(endpoint, server.url, kind="vllm-server", **settings)))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    from random_models import make_adapter
    from unstable_lite.models import BUILTIN

    return make_adapter(BUILTIN["builtin:tiny"], tmp_path / "adapter", 1)


def request(number: int = 1, version: int = 0, **fields: Any) -> Generate:
    defaults: dict[str, Any] = {"max_tokens": 3, "temperature": 0.7, "top_p": 1.0, "stop": (), "seed": None}
    return Generate(request_id=number, prompt="Your move:", adapter_version=version, **(defaults | fields))


def serve(engine: VLLMServerEngine, *requests: Generate) -> list[Any]:
    for one in requests:
        engine.add_request(one)
    replies: list[Any] = []
    while engine.has_unfinished():
        replies += engine.step()
    return sorted(replies, key=lambda reply: reply.request_id)


def completions(server: FakeVLLM) -> list[Any]:
    return [body for _, path, body in server.seen if path == "/v1/completions"]


def test_what_is_sent_and_what_comes_back_are_token_ids(server: FakeVLLM, connect: Connect) -> None:
    engine = connect()
    (reply,) = serve(engine, request(seed=7, stop=("never met",)))
    generation = reply.generation
    sent = completions(server)[-1]
    assert sent["prompt"] == generation.prompt_ids.tolist() == server.tokenizer.encode("Your move:").tolist()
    assert (generation.completion_ids.tolist(), generation.logprobs.tolist()) == (IDS, LOGPROBS)
    assert (generation.finish_reason, generation.adapter_version) == ("length", 0)
    assert (sent["temperature"], sent["top_p"], sent["seed"], sent["stop"]) == (0.7, 1.0, 7, ["never met"])
    # A server takes what is not said from the model's generation config.
    assert {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1, "max_tokens": 3}.items() <= sent.items()
    assert engine.facts["max_model_len"] == 512 and engine.stats().running == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": None}, "token ids that are not"),
        ({"token_ids": []}, "token ids that are not 1 to 3"),
        ({"token_ids": [5, 6, 7, 8]}, "token ids that are not 1 to 3"),
        ({"token_ids": [5, 6, 1 << 40]}, "token ids that are not"),
        ({"token_ids": [5, True, 7]}, "token ids that are not"),
        ({"prompt_token_ids": [1, 2]}, "another prompt"),
        ({"prompt_token_ids": None}, "another prompt"),
        ({"logprobs": [-0.5, -1.25]}, "log-probabilities that are not those of 3 tokens"),
        ({"logprobs": [-0.5, -1.25, float("nan")]}, "log-probabilities that are not"),
        ({"logprobs": [-0.5, -1.25, 2.0]}, "log-probabilities that are not"),
        ({"logprobs": None}, "log-probabilities that are not"),
        ({"finish_reason": "abort"}, "did not come to its end"),
        ({"model": "somebody-else"}, "by a model 'somebody-else'"),
        ({"model": None}, "by a model"),
    ],
    ids=str,
)
def test_an_answer_that_is_not_one_to_what_was_asked_fails_its_request_alone(
    server: FakeVLLM, connect: Connect, changes: dict[str, Any], says: str
) -> None:
    engine = connect()
    server.misbehave = lambda path, body: (200, server.completion(body, **changes))
    (reply,) = serve(engine, request())
    assert isinstance(reply, Failed) and says in reply.error and server.url in reply.error
    server.misbehave = lambda path, body: None
    assert isinstance(serve(engine, request(2))[0], Generated)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, b"<html>busy</html>"), "what is no JSON"),
        ((200, b"[" * 100_000), "what is no JSON"),
        ((200, []), "no completion with token ids"),
        ((200, {"choices": []}), "no completion with token ids"),
        ((200, {"choices": [{"text": "an old server"}], "model": "tiny"}), "no completion with token ids"),
        (error(400, "prompt is too long"), "answers 400: prompt is too long"),
        (error(500, "it broke"), "answers 500: it broke"),
        ((418, b"\xff\x00"), "answers 418"),
    ],
    ids=str,
)
def test_garbage_and_refusals_fail_their_request_and_name_the_url(
    server: FakeVLLM, connect: Connect, answer: Any, says: str
) -> None:
    engine = connect()
    server.misbehave = lambda path, body: answer
    (reply,) = serve(engine, request())
    assert isinstance(reply, Failed) and says in reply.error and server.url in reply.error
    assert len(reply.error) < 2000


def test_an_answer_without_end_is_cut(server: FakeVLLM, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = connect()
    monkeypatch.setattr(vllm_server, "MAX_ANSWER_BYTES", 1000)
    server.misbehave = lambda path, body: (200, b" " * 5000)
    (reply,) = serve(engine, request())
    assert "more than 1000 bytes" in reply.error and server.url in reply.error


@pytest.mark.parametrize("failure", [error(503, "busy"), error(500, "a hiccup"), "cut"], ids=str)
def test_what_may_pass_is_asked_again(server: FakeVLLM, connect: Connect, failure: Any) -> None:
    engine = connect()
    failures = [failure, failure]
    if failure == "cut":
        server.cut_next = 2
    else:
        server.misbehave = lambda path, body: failures.pop() if failures else None
    (reply,) = serve(engine, request())
    assert isinstance(reply, Generated)
    assert len(completions(server)) == 2 + 3  # two of the start's own


@pytest.mark.parametrize("how", ["busy for ever", "cut for ever", "not there"])
def test_a_server_that_is_gone_ends_the_worker_so_that_others_are_asked(
    server: FakeVLLM, connect: Connect, how: str
) -> None:
    engine = connect()
    if how == "not there":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            engine._server.url = server.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    elif how == "busy for ever":
        server.misbehave = lambda path, body: error(503, "busy")
    else:
        server.cut_next = 1000
    with pytest.raises(ConnectionError, match=server.url):
        serve(engine, request(), request(2))


def test_a_server_that_forgot_an_adapter_is_another_server(
    server: FakeVLLM, connect: Connect, adapter_dir: Path
) -> None:
    engine = connect()
    engine.load_adapter(1, adapter_dir)
    assert serve(engine, request(version=1))[0].generation.adapter_version == 1
    server.loras.clear()
    with pytest.raises(ConnectionError, match=r"does not know .*-v1 any more.* started again"):
        serve(engine, request(version=1))


def test_a_server_that_is_lost_to_the_last_request_while_an_adapter_is_loaded_ends_the_worker(
    server: FakeVLLM, connect: Connect, adapter_dir: Path
) -> None:
    engine = connect()
    is_loading, is_asked = threading.Event(), threading.Event()

    def forget_the_base(path: str, body: Any) -> Any:
        if path == "/v1/completions":
            is_asked.set()
            is_loading.wait(10)
            return error(404, "The model does not exist")
        is_loading.set()
        time.sleep(0.3)  # the answer to the completion is there first
        return None

    server.misbehave = forget_the_base
    engine.add_request(request())
    while not is_asked.is_set():
        engine.step()
    engine.load_adapter(1, adapter_dir)
    with pytest.raises(ConnectionError, match=f"{server.url} does not know tiny any more"):
        serve(engine)


def test_the_base_is_never_taken_for_an_adapter(server: FakeVLLM, connect: Connect, adapter_dir: Path) -> None:
    engine = connect()
    with pytest.raises(RequestError, match="version 3 is not loaded"):
        engine.add_request(request(version=3))
    engine.load_adapter(3, adapter_dir)
    server.misbehave = lambda path, body: (200, server.completion(body, model="tiny"))
    (reply,) = serve(engine, request(version=3))
    assert reply.generation.adapter_version == 0, "what the server says; the client refuses it"


def test_a_hanging_server_fails_a_request_in_time_and_the_worker_when_nothing_comes(
    server: FakeVLLM, connect: Connect
) -> None:
    engine, stuck = connect(request_timeout_s=0.2), connect(stall_timeout_s=0.2)
    server.hangs.set()
    (reply,) = serve(engine, request())
    assert "no completion after 0.19 s" in reply.error and server.url in reply.error
    with pytest.raises(ConnectionError, match=r"2 requests and has answered none"):
        serve(stuck, request(), request(2))


def test_no_more_requests_at_once_than_max_parallel_seq(server: FakeVLLM, connect: Connect) -> None:
    engine = connect(max_parallel_seq=3)
    before = len(completions(server))
    server.hangs.set()
    for number in range(10):
        engine.add_request(request(number))
    while len(completions(server)) < before + 3:
        engine.step()
    for _ in range(10):
        engine.step()
    stats = engine.stats()
    assert (len(completions(server)) - before, stats.running, stats.queued) == (3, 3, 7)
    server.goes_on.set()
    assert len(serve(engine)) == 10


def test_adapters_are_in_the_folder_while_they_are_loaded(
    server: FakeVLLM, connect: Connect, folder: Path, adapter_dir: Path
) -> None:
    engine = connect(max_loras=2)
    for version in (1, 2):
        engine.load_adapter(version, adapter_dir)
    assert sorted(server.loras.values()) == sorted(str(path) for path in folder.iterdir())
    weights = "adapter_model.safetensors"
    assert all((path / weights).read_bytes() == (adapter_dir / weights).read_bytes() for path in folder.iterdir())
    with pytest.raises(AdapterError, match="max_loras"):
        engine.load_adapter(3, adapter_dir)
    engine.unload_adapter(1)
    assert len(list(folder.iterdir())) == len(server.loras) == 1
    engine.close()
    assert list(folder.iterdir()) == [] and server.loras == {}


def test_an_adapter_that_the_server_refuses_leaves_nothing_behind(
    server: FakeVLLM, connect: Connect, folder: Path, adapter_dir: Path
) -> None:
    engine = connect()
    server.misbehave = lambda path, body: error(404, f"No adapter found for {body['lora_path']}")
    with pytest.raises(AdapterError, match=f"version 1: {server.url}.*No adapter found.*under this very path"):
        engine.load_adapter(1, adapter_dir)
    assert list(folder.iterdir()) == []
    server.misbehave = lambda path, body: None
    engine.load_adapter(1, adapter_dir)


def test_an_adapter_that_the_server_does_not_unload_stays_loaded_and_can_be_unloaded_later(
    server: FakeVLLM, connect: Connect, folder: Path, adapter_dir: Path
) -> None:
    engine = connect(max_loras=1)
    engine.load_adapter(1, adapter_dir)
    server.misbehave = _is("/v1/unload_lora_adapter", error(400, "not now"))
    for _ in range(2):
        with pytest.raises(AdapterError, match=f"{server.url}.*not now"):
            engine.unload_adapter(1)
    assert serve(engine, request(version=1))[0].generation.adapter_version == 1
    server.misbehave = lambda path, body: None
    engine.unload_adapter(1)
    assert list(folder.iterdir()) == [] and server.loras == {}
    engine.load_adapter(2, adapter_dir)


def test_a_load_whose_answer_was_lost_is_a_load(server: FakeVLLM, connect: Connect, adapter_dir: Path) -> None:
    engine = connect()

    def lose_the_answer(path: str, body: Any) -> Any:
        server.misbehave = lambda path, body: None
        server.answer(path, body)
        return error(503, "a proxy's own")

    server.misbehave = lose_the_answer
    engine.load_adapter(1, adapter_dir)
    assert serve(engine, request(version=1))[0].generation.adapter_version == 1


def test_what_a_worker_left_that_died_in_ones_place_is_removed_and_nothing_else(
    server: FakeVLLM, connect: Connect, folder: Path, adapter_dir: Path
) -> None:
    connect().load_adapter(1, adapter_dir)  # and is not closed, as one that was killed
    others = "unstable_lite-0123456789ab-engine-0-aaaa-v1"
    shutil.copytree(adapter_dir, folder / others)
    server.loras[others] = str(folder / others)
    connect()
    assert [path.name for path in folder.iterdir()] == list(server.loras) == [others]


def _is(wanted: str, answer: Any) -> Callable[[str, Any], Any]:
    return lambda path, body: answer if path == wanted else None


@pytest.mark.parametrize(
    ("misbehave", "says"),
    [
        (_is("/v1/load_lora_adapter", (404, {"detail": "Not Found"})), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (_is("/v1/load_lora_adapter", error(500, "LoRA is not enabled")), "--enable-lora"),
        (_is("/tokenize", (200, {"tokens": [1, 2, 3]})), "whose tokenizer is not that of model_name"),
        (_is("/v1/models", (200, {"data": [{"id": "gpt"}]})), "is no vLLM server"),
        (_is("/v1/models", (200, b"<html>")), "what is no JSON"),
        (_is("/v1/models", (404, b"")), "answers 404"),
        (_is("/v1/models", error(401, "Unauthorized")), "from the environment variable VLLM_API_KEY"),
        (_is("/version", (200, {"model": "none"})), "is no vLLM server that tells token ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_that_cannot_serve_is_refused_with_what_it_lacks(
    server: FakeVLLM, connect: Connect, misbehave: Any, says: str
) -> None:
    server.misbehave = misbehave
    with pytest.raises(ModelError, match=server.url) as caught:
        connect()
    assert says in str(caught.value)


def test_a_server_that_reports_raw_log_probabilities_is_refused(server: FakeVLLM, connect: Connect) -> None:
    server.is_raw = True
    with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
        connect()


def test_a_server_that_rotates_by_the_long_factors_of_longrope_is_refused(connect: Connect, tmp_path: Path) -> None:
    from random_models import LONGROPE, make_model

    model = make_model(tmp_path / "model", "Llama", rope_parameters=LONGROPE)
    with pytest.raises(ModelError, match="start it with --max-model-len 64"):
        connect(model=str(model))


def test_a_server_without_tokenize_is_taken(server: FakeVLLM, connect: Connect) -> None:
    server.misbehave = _is("/tokenize", (404, {"detail": "Not Found"}))
    assert connect().facts["vllm"] == "0.32.0"


def test_a_server_that_starts_is_waited_for_and_one_that_does_not_is_told(server: FakeVLLM, connect: Connect) -> None:
    starting = [error(503, "starting"), error(503, "starting")]
    server.misbehave = lambda path, body: starting.pop() if starting else None
    assert connect(start_timeout_s=10.0).facts["device"] == server.url
    server.misbehave = lambda path, body: error(503, "starting")
    with pytest.raises(ConnectionError, match=rf"{server.url} is not up after 0 s.*starting"):
        connect(start_timeout_s=0.1)
    server.misbehave = lambda path, body: None
    server.hangs.set()
    with pytest.raises(ConnectionError, match=rf"{server.url} is not up after 0 s"):
        connect(start_timeout_s=0.1)


def test_the_key_goes_to_the_server_and_into_no_error(
    server: FakeVLLM, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    engine = connect()
    server.misbehave = lambda path, body: error(400, f"your header was Bearer {KEY}")
    (refused,) = serve(engine, request())
    server.misbehave = lambda path, body: (200, KEY.encode())
    (garbage,) = serve(engine, request(2))
    assert {key for key, _, _ in server.seen} == {f"Bearer {KEY}"}
    assert "<key>" in refused.error and KEY not in refused.error + garbage.error
