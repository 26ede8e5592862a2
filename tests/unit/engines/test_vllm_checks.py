"""Keys for vLLM are checked before anything starts, without importing vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from unstable_lite.config.training import EngineConfig
from unstable_lite.engines.vllm_checks import argument_names, vllm_problems


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
