"""The models that the embedded engine serves, and the errors for the others."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.random_models import LONGROPE, make_adapter, make_model, make_tokenizer
from fakes.remote_engine import engine_spec, generate
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.errors import ModelError, RequestError
from unstable_lite.planning.plan import make_plan
from unstable_lite.transport.messages import Generate


def load(path: Path, **engine: Any) -> TransformersEngine:
    return TransformersEngine(engine_spec(model=str(path), kind="transformers", **({"max_model_len": 128} | engine)))


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 0.01}),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    ("Qwen2", {"head_dim": 16}),  # has biases on queries, keys and values
    ("GPT2", {"n_embd": 64, "n_head": 4, "n_layer": 2}),
    ("GPTNeoX", {}),
    ("Granite", {"logits_scaling": 4.0}),  # has the modules of Llama, but computes something else
    ("Granite", {"residual_multiplier": 0.99}),
    ("Gemma", {}),
    ("Olmo2", {}),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("name", "fields"), MODELS, ids=[name for name, *_ in MODELS])
def test_stock_models_are_served_with_adapters(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    import peft
    import torch
    import transformers

    path = make_model(tmp_path / "model", name, **fields)
    targets = {"GPT2": ["c_attn", "c_proj", "c_fc"], "GPTNeoX": ["query_key_value", "dense_h_to_4h"]}
    adapter = make_adapter(
        path,
        tmp_path / "adapter",
        1,
        target_modules=targets.get(name, ["q_proj", "v_proj", "o_proj"]),
        fan_in_fan_out=name == "GPT2",
    )
    engine = load(path)
    engine.load_adapter(1, adapter)
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    judges = [base, peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(path), adapter)]
    for generation, version in zip(generate(engine, 0, 1, 0, 1), (0, 1, 0, 1), strict=True):
        ids = [*generation.prompt_ids.tolist(), *generation.completion_ids.tolist()]
        with torch.inference_mode():
            logits = judges[version].eval()(input_ids=torch.tensor([ids[:-1]])).logits[0]
        size = len(generation.completion_ids)
        logprobs = (logits[-size:] / 0.8).log_softmax(-1)[torch.arange(size), torch.tensor(ids[-size:])]
        np.testing.assert_allclose(generation.logprobs, logprobs.numpy(), atol=2e-4)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("Mamba", {"state_size": 8}, "MambaForCausalLM"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM"),
        # From 5.20 on, transformers itself refuses the attention that the engine requests.
        ("Gemma2", {"sliding_window": 64}, "sliding window|scaled_dot_product_attention"),
        ("Gemma2", {"sliding_window": 128}, "soft cap|scaled_dot_product_attention"),
        ("Mistral", {"sliding_window": 64}, "sliding window"),
        ("Phimoe", {"sliding_window": 64, **EXPERTS}, "sliding window"),  # visible only in the mask
        ("Qwen2Moe", {"sliding_window": 64, "use_sliding_window": True, **EXPERTS}, "sliding window"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "attend"),
    ],
)
def test_unsupported_model_is_refused_with_advice(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load(make_model(tmp_path, name, **fields))
    assert "engine.kind = 'vllm'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Mistral", {"sliding_window": 128}),
        ("Phimoe", {"sliding_window": 128, **EXPERTS}),
        ("Phimoe", {"sliding_window": None, **EXPERTS}),
        ("Qwen2Moe", {"sliding_window": 64, "use_sliding_window": False, **EXPERTS}),
    ],
)
def test_model_with_a_wide_or_unused_window_is_served(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert len(generate(load(make_model(tmp_path, name, **fields)), 0)) == 1


def test_longrope_limits_the_sequence_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = load(make_model(tmp_path, "Llama", rope_parameters=LONGROPE), max_model_len=256)
    assert engine.info["max_model_len"] == 64
    assert "engine.max_model_len = 256" in caplog.text and "64" in caplog.text
    with pytest.raises(RequestError, match="63"):
        engine.add_request(
            Generate(
                request_id=1,
                prompt="x" * 64,
                adapter_version=0,
                max_tokens=1,
                temperature=1.0,
                top_p=1.0,
                stop=(),
                seed=1,
            )
        )
    (generation,) = generate(engine, 0)
    assert len(generation.prompt_ids) + len(generation.completion_ids) < 64


def test_directory_without_model_or_tokenizer_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ModelError, match="tokenizer"):
        load(tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        load(tmp_path)


def test_too_little_memory_for_one_sequence_is_refused_with_sizes(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"kv_cache_gb = 0\.0001.*max_model_len"):
        load(model_dir, max_model_len=1024, kv_cache_gb=0.0001)


def test_memory_for_one_sequence_serves_requests_one_by_one(model_dir: Path) -> None:
    engine = load(model_dir, max_model_len=1024, kv_cache_gb=0.0011, dtype="float32")
    assert engine.info["parallel_seq"] == 1
    assert len(generate(engine, 0, 0, 0)) == 3


@pytest.mark.parametrize(("kv_cache_gb", "fewest"), [(0.0011, 1), (0.01, 8), (0.05, 40)])
def test_cache_takes_no_more_memory_than_configured(model_dir: Path, kv_cache_gb: float, fewest: int) -> None:
    engine = load(model_dir, max_model_len=1024, kv_cache_gb=kv_cache_gb, dtype="float32", max_parallel_seq=16)
    cache = engine._cache
    assert cache.key_LSHTD.nbytes + cache.value_LSHTD.nbytes <= kv_cache_gb * 2**30
    assert engine.info["parallel_seq"] + engine.info["kept_seq"] >= fewest
    assert engine.info["parallel_seq"] <= 16


@pytest.mark.parametrize("threads", [1, 2])
def test_engine_computes_in_as_many_threads_as_configured(model_dir: Path, threads: int) -> None:
    before = torch.get_num_threads()
    sizes = {"max_model_len": 128, "max_generation_len": 16}
    spec = engine_spec(model=str(model_dir), kind="transformers", threads=threads, **sizes)
    planned = make_plan(spec.config).engine_threads
    try:
        engine = TransformersEngine(replace(spec, threads=planned))
        assert torch.get_num_threads() == engine.info["threads"] == threads
    finally:
        torch.set_num_threads(before)


def test_deleted_engine_leaves_no_cache(model_dir: Path) -> None:
    engine = TransformersEngine(engine_spec(model=str(model_dir), max_model_len=128))
    cache = weakref.ref(engine._cache)
    del engine
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize(("schedule", "is_reused"), [("async", True), ("sync", False)])
def test_exact_engine_reuses_nothing_after_it_was_idle(schedule: str, is_reused: bool) -> None:
    engine = TransformersEngine(engine_spec(schedule=schedule, max_model_len=256, max_parallel_seq=4))
    first = generate(engine, 0, 0)
    engine.stats()
    second = generate(engine, 0, 0)
    assert [one.text for one in first] == [other.text for other in second]
    assert (engine.stats().cached_share > 0.5) == is_reused
