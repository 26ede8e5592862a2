"""vLLM resolves our settings for H100s as intended; its CPU build does it, so no kernel runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes import gpus, runs
from fakes.random_models import make_model
from fakes.remote_engine import engine_spec

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)
    # vLLM inspects the architecture once and caches that. With an H100 that is not there it could not.
    inspect = f"from vllm import EngineArgs; EngineArgs(model={str(path)!r}).create_model_config()"
    subprocess.run([sys.executable, "-c", inspect], capture_output=True, check=True)
    return path


@pytest.fixture
def resolved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function of keys of section `engine`: the settings of our engine, and of vLLM's own `LLM`."""
    gpus.install(monkeypatch, tmp_path, 2, gib=80)
    monkeypatch.setenv("PYTHONPATH", runs.TESTS)

    def ask(**engine: Any) -> dict[str, dict[str, Any]]:
        spec = engine_spec(kind="vllm", max_model_len=4096, **engine)
        command = [sys.executable, "-m", "fakes.h100", spec.config_json, str(model)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    return ask


def test_engine_gets_the_limits_of_vllms_offline_engine(resolved: Any) -> None:
    told = resolved()
    ours, llm = told["ours"], told["llm"]
    assert ours["tokens_per_step"] == llm["tokens_per_step"] == 16_384
    assert ours["rows"] == 256
    for key in ("async_scheduling", "chunked_prefill", "prefix_caching", "graph_mode", "dtype"):
        assert ours[key] == llm[key], key
    assert ours["logprobs_mode"] == "processed_logprobs"
    assert max(ours["graph_sizes"]) == 2048 > max(llm["graph_sizes"])
    assert ours["autotune"] is False


def test_lora_and_keys_reach_vllm(resolved: Any) -> None:
    keys = {"max_loras": 5, "tensor_parallel": 2, "quantization": "fp8_per_channel"}
    ours = resolved(**keys, options={"max_num_batched_tokens": 4096})["ours"]
    lora = ours["lora"]
    assert lora["max_loras"] == "5" and lora["max_cpu_loras"] == "6"
    assert lora["lora_dtype"] == "torch.bfloat16"
    assert "lm_head" not in lora["target_modules"] and "q_proj" in lora["target_modules"]
    assert (ours["world_size"], ours["executor"]) == (2, "mp")
    assert ours["quantization"] == "fp8_per_channel"
    assert ours["tokens_per_step"] == 4096
