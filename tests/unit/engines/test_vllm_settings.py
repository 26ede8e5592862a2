"""The settings for vLLM, in process and as servers: those that it gets, and the keys that are refused, without vLLM."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from fakes.remote_engine import engine_spec
from unstable_lite.config.training import EngineConfig
from unstable_lite.engines import vllm
from unstable_lite.engines.vllm import engine_arguments
from unstable_lite.engines.vllm_checks import (
    DECIDED,
    argument_names,
    server_keys,
    server_problems,
    server_url,
    vllm_problems,
)
from unstable_lite.errors import ConfigError
from unstable_lite.games.api_keys import SERVER_KEY
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.validation import find_problems

GIB = 1 << 30


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(device: str = "cuda:0", gib: int | None = 80, max_model_len: int = 8192, **engine: Any) -> dict[str, Any]:
        monkeypatch.setattr(vllm, "gpu_memory_bytes", lambda device: gib and gib * GIB)
        return engine_arguments(engine_spec(device=device, kind="vllm", **engine), "model", max_model_len)

    return of


@pytest.mark.parametrize(
    ("gib", "max_model_len", "tokens"), [(80, 8192, 16384), (24, 4096, 8192), (None, 4096, 8192), (24, 32768, 32768)]
)
def test_gpu_step_budget_equals_that_of_vllms_offline_engine(arguments, gib, max_model_len, tokens):
    assert arguments(gib=gib, max_model_len=max_model_len)["max_num_batched_tokens"] == tokens


def test_graphs_cover_prompts_lora_the_adapted_modules_and_options_take_precedence(arguments):
    assert max(arguments()["cudagraph_capture_sizes"]) == 2048
    assert "cudagraph_capture_sizes" not in arguments(options={"enforce_eager": True})
    assert "cudagraph_capture_sizes" not in arguments(device="cpu")
    assert "lm_head" not in arguments()["lora_target_modules"]
    assert arguments()["lora_target_modules"] == list(engine_spec().config.lora.target_modules)
    assert arguments(options={"max_num_batched_tokens": 4096})["max_num_batched_tokens"] == 4096


def test_each_argument_is_decided_by_a_key_or_free_for_options(arguments):
    free = {"max_num_batched_tokens", "cudagraph_capture_sizes", "enable_chunked_prefill", "enable_flashinfer_autotune"}
    free.add("enforce_eager")
    assert {*arguments(), *arguments(device="cpu")} == {*DECIDED, *free}


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # deprecations in vLLM and its dependencies
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_vllm_knows_every_argument(arguments, device):
    from vllm import EngineArgs

    given = arguments(device=device)
    made = EngineArgs(**given)
    assert {name: getattr(made, name) for name in given} == given


def problems(kind: str = "vllm", devices: tuple[int | str, ...] = (0,), **engine: Any) -> list[str]:
    return list(vllm_problems(EngineConfig(kind=kind, **engine), kind, devices))


@pytest.mark.parametrize(
    ("kind", "on", "given", "says"),
    [
        ("transformers", (0,), {"tensor_parallel": 2}, "engine.tensor_parallel.*'transformers'"),
        ("transformers", (0,), {"quantization": "fp8_per_tensor"}, "engine.quantization.*'transformers'"),
        ("transformers", (0,), {"options": {"swap_space": 1}}, "engine.options.*'transformers'"),
        ("vllm", (0,), {"dtype": "float32"}, "engine.dtype.*'transformers'"),
        ("vllm", (0, 1, 2), {"tensor_parallel": 2}, "2 GPUs for each engine"),
        ("vllm", (1, 1), {"tensor_parallel": 2}, "each GPU once"),
        ("vllm", ("cpu", "cpu"), {"tensor_parallel": 2}, "CPU"),
        ("vllm", (0,), {"options": {"max_loras": 4}}, "set engine.max_loras"),
        ("vllm", (0,), {"options": {"logprobs_mode": "raw_logits"}}, "needs its own value"),
        ("transformers", (0,), {}, None),
        ("vllm", ("cpu",), {"dtype": "float32"}, None),
        ("vllm", (0, 1, 2, 3), {"tensor_parallel": 2}, None),
    ],
)
def test_unusable_keys_are_refused_by_name(kind, on, given, says):
    found = problems(kind, on, **given)
    assert len(found) == (says is not None), found
    assert not says or re.search(says, found[0]), found


@pytest.mark.vllm
def test_options_that_vllm_does_not_know_are_refused():
    (problem,) = problems(options={"max_num_batched_token": 4096})
    assert "engine.options.max_num_batched_token" in problem and "'max_num_batched_tokens'" in problem
    assert problems(options={"max_num_batched_tokens": 4096, "swap_space": 0}) != []
    assert problems(options={"max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8"}) == []


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # deprecations in vLLM and its dependencies
def test_names_of_the_options_are_read_from_vllms_source():
    from vllm import EngineArgs

    assert set(argument_names()) == {field.name for field in dataclasses.fields(EngineArgs)}


URLS = ("http://gpu-1:8000", "http://gpu-2:8000/v1")


def problems_of_servers(**engine: Any) -> list[str]:
    return list(server_problems(EngineConfig(**engine)))


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({}, "engine.urls is empty"),
        ({"urls": ("gpu-1:8000",)}, "engine.urls.0"),
        ({"urls": ("http://key@gpu-1:8000",)}, "VLLM_API_KEY"),
        ({"urls": ("http://a:1", "http://a:1/v1/")}, "http://a:1"),
        ({"urls": URLS, "devices": (0,)}, "engine.devices = [0]"),
        ({"urls": URLS, "adapter_folder": None}, "engine.adapter_folder"),
        ({"urls": URLS, "adapter_folder": Path("relative")}, "absolute path"),
        ({"urls": URLS, "adapter_folder": Path("/nonexistent/adapters")}, "/nonexistent/adapters"),
        ({"urls": URLS, "adapter_folder": Path("/" + "x" * 5000)}, "x" * 5000),
        ({"urls": URLS, "adapter_folder": Path("/x\0y")}, "writable directory"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unusable_server_config_is_reported(tmp_path, engine, says):
    problems = problems_of_servers(**({"kind": "vllm-server", "adapter_folder": tmp_path} | engine))
    assert any(says in problem for problem in problems), problems
    others = problems_of_servers(kind="vllm", urls=URLS, adapter_folder=tmp_path)
    assert len(others) == 2 and all("engine.kind = 'vllm-server'" in problem for problem in others)
    assert problems_of_servers(kind="vllm") == []


def test_check_finds_problems_and_describes_the_plan(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.urls is empty"):
        make_plan(engine_spec(kind="vllm-server", adapter_folder=tmp_path).config)
    config = engine_spec(kind="vllm-server", urls=URLS, adapter_folder=tmp_path).config
    assert find_problems(config) == []
    plan = make_plan(config)
    rows = dict(plan.describe())
    assert (rows["engine-0"], rows["engine-1"]) == tuple(f"vllm-server on {url}" for url in URLS)
    assert [server_url(url) for url in URLS] == ["http://gpu-1:8000", "http://gpu-2:8000"]
    assert str(tmp_path) in rows["adapters to the servers"]
    assert "engine memory" in rows
    assert rows["learner"].startswith("reinforce on ")
    assert plan.engine_devices == URLS


def test_only_configured_server_keys_are_passed_on(monkeypatch):
    monkeypatch.setenv(SERVER_KEY, "k")
    monkeypatch.setenv("OPENAI_API_KEY", "another's")
    assert server_keys() == {SERVER_KEY: "k"}
