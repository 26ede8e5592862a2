"""The settings for vLLM: those that it gets, and the keys that are refused, checked without a GPU or vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fakes.remote_engine import engine_spec
from unstable_lite.config.training import EngineConfig
from unstable_lite.engines import vllm
from unstable_lite.engines.vllm import engine_arguments
from unstable_lite.engines.vllm_checks import DECIDED, argument_names, vllm_problems

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
def test_gpu_step_budget_equals_that_of_vllms_offline_engine(
    arguments: Any, gib: int | None, max_model_len: int, tokens: int
) -> None:
    assert arguments(gib=gib, max_model_len=max_model_len)["max_num_batched_tokens"] == tokens


def test_graphs_cover_steps_that_hold_prompts(arguments: Any) -> None:
    assert max(arguments()["cudagraph_capture_sizes"]) == 2048
    assert "cudagraph_capture_sizes" not in arguments(options={"enforce_eager": True})
    assert "cudagraph_capture_sizes" not in arguments(device="cpu")


def test_lora_covers_only_the_adapted_modules(arguments: Any) -> None:
    assert "lm_head" not in arguments()["lora_target_modules"]
    assert arguments()["lora_target_modules"] == list(engine_spec().config.lora.target_modules)


def test_each_argument_is_decided_by_a_key_or_free_for_options(arguments: Any) -> None:
    free = {"max_num_batched_tokens", "cudagraph_capture_sizes", "enable_chunked_prefill", "enable_flashinfer_autotune"}
    free.add("enforce_eager")
    assert {*arguments(), *arguments(device="cpu")} == {*DECIDED, *free}


def test_options_take_precedence(arguments: Any) -> None:
    assert arguments(options={"max_num_batched_tokens": 4096})["max_num_batched_tokens"] == 4096


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # deprecations in vLLM and its dependencies
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_vllm_knows_every_argument(arguments: Any, device: str) -> None:
    from vllm import EngineArgs

    given = arguments(device=device)
    made = EngineArgs(**given)
    assert {name: getattr(made, name) for name in given} == given


def problems(kind: str = "vllm", devices: tuple[int | str, ...] = (0,), **engine: Any) -> list[str]:
    return list(vllm_problems(EngineConfig(kind=kind, **engine), kind, devices))


@pytest.mark.parametrize(
    "given", [{"tensor_parallel": 2}, {"quantization": "fp8_per_tensor"}, {"options": {"swap_space": 1}}]
)
def test_other_engines_refuse_the_keys_of_vllm(given: dict[str, Any]) -> None:
    (problem,) = problems("transformers", **given)
    assert f"engine.{next(iter(given))}" in problem and "'transformers'" in problem
    assert problems("transformers") == []


def test_float32_is_refused_on_gpus_only() -> None:
    (problem,) = problems(dtype="float32")
    assert "engine.dtype" in problem and "'transformers'" in problem
    assert problems(dtype="float32", devices=("cpu",)) == []


@pytest.mark.parametrize(
    ("devices", "named"), [((0, 1, 2), "2 GPUs for each engine"), ((1, 1), "each GPU once"), (("cpu", "cpu"), "CPU")]
)
def test_engines_that_cannot_divide_a_model_are_refused(devices: tuple[int | str, ...], named: str) -> None:
    (problem,) = problems(tensor_parallel=2, devices=devices)
    assert named in problem
    assert problems(tensor_parallel=2, devices=(0, 1, 2, 3)) == []


def test_options_that_a_key_decides_are_refused_with_that_key() -> None:
    assert "set engine.max_loras" in problems(options={"max_loras": 4})[0]
    assert "needs its own value" in problems(options={"logprobs_mode": "raw_logits"})[0]


@pytest.mark.vllm
def test_options_that_vllm_does_not_know_are_refused() -> None:
    (problem,) = problems(options={"max_num_batched_token": 4096})
    assert "engine.options.max_num_batched_token" in problem and "'max_num_batched_tokens'" in problem
    assert problems(options={"max_num_batched_tokens": 4096, "swap_space": 0}) != []
    assert problems(options={"max_num_batched_tokens": 4096, "kv_cache_dtype": "fp8"}) == []


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # deprecations in vLLM and its dependencies
def test_names_of_the_options_are_read_from_vllms_source() -> None:
    from vllm import EngineArgs

    assert set(argument_names()) == {field.name for field in dataclasses.fields(EngineArgs)}
