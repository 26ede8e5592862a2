"""The settings that vLLM gets for a GPU, checked without one."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.remote_engine import engine_spec
from unstable_lite.engines import vllm
from unstable_lite.engines.vllm import engine_arguments
from unstable_lite.engines.vllm_checks import DECIDED

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
    assert "cudagraph_capture_sizes" not in arguments(enforce_eager=True)
    assert "cudagraph_capture_sizes" not in arguments(device="cpu")


def test_lora_covers_only_the_adapted_modules(arguments: Any) -> None:
    assert "lm_head" not in arguments()["lora_target_modules"]
    assert arguments()["lora_target_modules"] == list(engine_spec().config.lora.target_modules)


def test_each_argument_is_decided_by_a_key_or_free_for_options(arguments: Any) -> None:
    free = {"max_num_batched_tokens", "cudagraph_capture_sizes", "enable_chunked_prefill", "enable_flashinfer_autotune"}
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
