"""The engine for vLLM's server, against a fake server that misbehaves: every failure is reported with the URL.

The conformance suite and test_vllm_server_run.py use the real server.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import fake_vllm
from fakes.fake_vllm import IDS, LOGPROBS, FakeVLLM, error
from fakes.http_servers import reserve_port
from fakes.remote_engine import engine_spec
from unstable_lite.engines import vllm_http, vllm_server
from unstable_lite.engines.vllm_server import VLLMServerEngine
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.transport.messages import Failed, Generate, Generated

KEY = "a key that must stay secret"
Connect = Callable[..., VLLMServerEngine]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "RETRY_AFTER_S", (0.0, 0.0))
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
        settings = {"urls": [server.url], "adapter_folder": str(folder), "start_timeout_s": 30} | engine
        endpoint = "ipc:///tmp/unstable_lite-mine/bus"
        engines.append(VLLMServerEngine(engine_spec(endpoint, server.url, kind="vllm-server", **settings)))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fakes.random_models import make_adapter
    from unstable_lite.models import BUILTIN

    return make_adapter(BUILTIN["builtin:tiny"], tmp_path_factory.mktemp("adapter"), 1)


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


def test_token_ids_are_sent_and_received(server: FakeVLLM, connect: Connect) -> None:
    engine = connect()
    (reply,) = serve(engine, request(seed=7, stop=("never met",)))
    generation = reply.generation
    sent = completions(server)[-1]
    assert sent["prompt"] == generation.prompt_ids.tolist() == server.tokenizer.encode("Your move:").tolist()
    assert (generation.completion_ids.tolist(), generation.logprobs.tolist()) == (IDS, LOGPROBS)
    assert (generation.finish_reason, generation.adapter_version) == ("length", 0)
    assert (sent["temperature"], sent["top_p"], sent["seed"], sent["stop"]) == (0.7, 1.0, 7, ["never met"])
    # A server takes unset fields from the model's generation config.
    assert {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1, "max_tokens": 3}.items() <= sent.items()
    assert engine.info["max_model_len"] == 512 and engine.stats().running == 0
    assert sent["skip_special_tokens"] is True


def test_server_shows_special_tokens_if_they_mark_thoughts(server: FakeVLLM, connect: Connect) -> None:
    engine = connect()
    engine._tokenizer.has_special_tags = True
    server.misbehave = lambda path, body: (200, server.completion(body, text="<think>a", stop_reason="never met"))
    (reply,) = serve(engine, request(stop=("never met",)))
    assert completions(server)[-1]["skip_special_tokens"] is False
    assert reply.generation.text == "<think>a"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token ids"),
        ({"token_ids": [5, 6, 7, 8]}, "token ids"),
        ({"token_ids": [5, 6, 1 << 40]}, "token ids"),
        ({"token_ids": [5, True, 7]}, "token_ids"),
        ({"prompt_token_ids": [1, 2]}, "prompt"),
        ({"prompt_token_ids": None}, "prompt"),
        ({"logprobs": [-0.5, -1.25]}, "log-probabilities"),
        ({"logprobs": [-0.5, -1.25, float("nan")]}, "log-probabilities"),
        ({"logprobs": [-0.5, -1.25, 2.0]}, "log-probabilities"),
        ({"logprobs": None}, "token_logprobs"),
        ({"finish_reason": "abort"}, "abort"),
        ({"model": "another-model"}, "another-model"),
        ({"model": None}, "model"),
        ((200, b"<html>busy</html>"), "JSON"),
        ((200, b"[" * 100_000), "JSON"),
        ((200, []), "JSON"),
        ((200, {"choices": []}), "JSON"),
        ((200, {"choices": [{"text": "an old server"}], "model": "tiny"}), "token_ids"),
        ((200, b" " * 100_001), "100000 bytes"),
        (error(400, "prompt is too long"), "400: prompt is too long"),
        (error(500, "it broke"), "500: it broke"),
        ((418, b"\xff\x00"), "418"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_mismatched_answer_garbage_and_refusal_fail_only_their_request(
    server: FakeVLLM, connect: Connect, answer: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connect()
    monkeypatch.setattr(vllm_http, "MAX_ANSWER_BYTES", 100_000)
    is_completion = isinstance(answer, dict)
    server.misbehave = lambda path, body: (200, server.completion(body, **answer)) if is_completion else answer
    (reply,) = serve(engine, request())
    assert isinstance(reply, Failed) and says in reply.error and server.url in reply.error
    assert len(reply.error) < 2000
    server.misbehave = lambda path, body: None
    assert isinstance(serve(engine, request(2))[0], Generated)


@pytest.mark.parametrize("failure", [error(503, "busy"), error(500, "a hiccup"), "cut"], ids=str)
def test_transient_failure_is_retried(server: FakeVLLM, connect: Connect, failure: Any) -> None:
    engine = connect()
    failures = [failure, failure]
    if failure == "cut":
        server.cut_next = 2
    else:
        server.misbehave = lambda path, body: failures.pop() if failures else None
    (reply,) = serve(engine, request())
    assert isinstance(reply, Generated)
    assert len(completions(server)) == 2 + 3  # two were made at start


@pytest.mark.parametrize("how", ["busy forever", "cut forever", "not listening"])
def test_unreachable_server_ends_the_worker(server: FakeVLLM, connect: Connect, how: str) -> None:
    engine = connect()
    if how == "not listening":
        engine._server.url = server.url = f"http://127.0.0.1:{reserve_port()}"
    elif how == "busy forever":
        server.misbehave = lambda path, body: error(503, "busy")
    else:
        server.cut_next = 1000
    with pytest.raises(ConnectionError, match=server.url):
        serve(engine, request(), request(2))


def test_server_that_forgot_an_adapter_counts_as_restarted(
    server: FakeVLLM, connect: Connect, adapter_dir: Path
) -> None:
    engine = connect()
    engine.load_adapter(1, adapter_dir)
    assert serve(engine, request(version=1))[0].generation.adapter_version == 1
    server.loras.clear()
    with pytest.raises(ConnectionError, match=r"-v1\b"):
        serve(engine, request(version=1))


def test_server_lost_while_an_adapter_loads_ends_the_worker(
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
        time.sleep(0.3)  # the answer to the completion arrives first
        return None

    server.misbehave = forget_the_base
    engine.add_request(request())
    while not is_asked.is_set():
        engine.step()
    engine.load_adapter(1, adapter_dir)
    with pytest.raises(ConnectionError, match=f"{server.url}.* tiny"):
        serve(engine)


def test_base_is_never_taken_for_an_adapter(server: FakeVLLM, connect: Connect, adapter_dir: Path) -> None:
    engine = connect()
    with pytest.raises(RequestError, match="version 3"):
        engine.add_request(request(version=3))
    engine.load_adapter(3, adapter_dir)
    server.misbehave = lambda path, body: (200, server.completion(body, model="tiny"))
    (reply,) = serve(engine, request(version=3))
    assert reply.generation.adapter_version == 0, "the engine reports it, and the client refuses it"


def test_hanging_server_fails_requests_on_timeout_and_then_the_worker(
    server: FakeVLLM, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("unstable_lite.engines.vllm_server.REQUEST_TIMEOUT_S", 0.2)
        engine = connect()
    monkeypatch.setattr("unstable_lite.engines.vllm_server.ENGINE_STALL_S", 0.2)
    stuck = connect()
    server.hangs.set()
    (reply,) = serve(engine, request())
    assert "0.19 s" in reply.error and server.url in reply.error
    with pytest.raises(ConnectionError, match=r"2 requests"):
        serve(stuck, request(), request(2))


def test_requests_in_flight_are_limited_to_max_parallel_seq(server: FakeVLLM, connect: Connect) -> None:
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
    server.is_restart.set()
    assert len(serve(engine)) == 10


def test_adapters_stay_in_the_folder_while_they_are_loaded(
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


def test_adapter_refused_by_the_server_leaves_no_files(
    server: FakeVLLM, connect: Connect, folder: Path, adapter_dir: Path
) -> None:
    engine = connect()
    server.misbehave = lambda path, body: error(404, f"No adapter found for {body['lora_path']}")
    with pytest.raises(AdapterError, match=f"version 1: {server.url}.*No adapter found"):
        engine.load_adapter(1, adapter_dir)
    assert list(folder.iterdir()) == []
    server.misbehave = lambda path, body: None
    engine.load_adapter(1, adapter_dir)


def test_adapter_that_fails_to_unload_stays_loaded_and_can_be_retried(
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


def test_load_with_a_lost_answer_counts_as_loaded(server: FakeVLLM, connect: Connect, adapter_dir: Path) -> None:
    engine = connect()

    def lose_the_answer(path: str, body: Any) -> Any:
        server.misbehave = lambda path, body: None
        server.answer(path, body)
        return error(503, "from a proxy")

    server.misbehave = lose_the_answer
    engine.load_adapter(1, adapter_dir)
    assert serve(engine, request(version=1))[0].generation.adapter_version == 1


def test_leftovers_of_a_dead_predecessor_are_removed(
    server: FakeVLLM, connect: Connect, folder: Path, adapter_dir: Path
) -> None:
    connect().load_adapter(1, adapter_dir)  # never closed, as if killed
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
        (_is("/tokenize", (200, {"tokens": [1, 2, 3]})), "model_name"),
        (_is("/v1/models", (200, {"data": [{"id": "gpt"}]})), "vLLM server"),
        (_is("/v1/models", (200, b"<html>")), "JSON"),
        (_is("/v1/models", (404, b"")), "404"),
        (_is("/v1/models", error(401, "Unauthorized")), "VLLM_API_KEY"),
        (_is("/version", (200, {"model": "none"})), "vLLM server"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsuitable_server_is_refused_with_the_missing_part(
    server: FakeVLLM, connect: Connect, misbehave: Any, says: str
) -> None:
    server.misbehave = misbehave
    with pytest.raises(ModelError, match=server.url) as caught:
        connect()
    assert says in str(caught.value)


def test_server_with_longrope_long_factors_or_raw_logprobs_is_refused(
    connect: Connect, tmp_path: Path, server: FakeVLLM
) -> None:
    from fakes.random_models import LONGROPE, make_model

    model = make_model(tmp_path / "model", "Llama", rope_parameters=LONGROPE)
    with pytest.raises(ModelError, match="--max-model-len 64"):
        connect(model=str(model))
    server.is_raw = True
    with pytest.raises(ModelError, match="--logprobs-mode processed_logprobs"):
        connect()


def test_server_without_tokenize_is_accepted(server: FakeVLLM, connect: Connect) -> None:
    server.misbehave = _is("/tokenize", (404, {"detail": "Not Found"}))
    assert connect().info["vllm"] == "0.32.0"


def test_starting_server_is_awaited_until_start_timeout(server: FakeVLLM, connect: Connect) -> None:
    starting = [error(503, "starting"), error(503, "starting")]
    server.misbehave = lambda path, body: starting.pop() if starting else None
    assert connect(start_timeout_s=10.0).info["device"] == server.url
    server.misbehave = lambda path, body: error(503, "starting")
    with pytest.raises(ConnectionError, match=rf"{server.url} .*starting"):
        connect(start_timeout_s=2.0)
    server.misbehave = lambda path, body: None
    server.hangs.set()
    with pytest.raises(ConnectionError, match=server.url):
        connect(start_timeout_s=0.1)


def test_api_key_reaches_the_server_and_no_error(
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
