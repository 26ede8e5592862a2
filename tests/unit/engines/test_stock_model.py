"""The models that the embedded engine serves, and the errors for the others."""

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fakes.random_models import EXPERTS, LONGROPE, STOCK_MODELS, make_adapter, make_model, make_tokenizer
from fakes.remote_engine import engine_spec, generate, request
from unstable_lite.config import Config
from unstable_lite.engines.embedded import stock_model
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.errors import ConfigError, ModelError, RequestError
from unstable_lite.planning.plan import make_engine_plan, make_plan
from unstable_lite.planning.validation import find_problems


def load(path: Path, **engine: Any) -> TransformersEngine:
    return TransformersEngine(engine_spec(model=str(path), kind="transformers", **({"max_model_len": 128} | engine)))


LENGTHS = {"max_model_len": 128, "max_generation_len": 16}


@pytest.mark.parametrize(("name", "fields"), STOCK_MODELS, ids=[name for name, *_ in STOCK_MODELS])
def test_stock_models_are_served_with_adapters(name, fields, tmp_path):
    import peft

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


def model_problems(config: Config) -> list[str]:
    """Return the problems, except that the env's prompts are longer than the context of these models."""
    return [problem for problem in find_problems(config) if "the first prompt of a game" not in problem]


GEMMA4 = {"vocab_size_per_layer_input": 288, "hidden_size_per_layer_input": 16}
MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("Mamba", {"state_size": 8}, "layer 0 is recurrent"),
        ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "layer 0 is recurrent"),
        ("Lfm2", {"layer_types": ["full_attention", "conv"]}, "layer 1 is of type 'conv'"),
        ("RecurrentGemma", {"block_types": ["attention", "recurrent"]}, "layer 1 is of type 'recurrent'"),
        ("Llama4Text", {"attention_chunk_size": 64, "no_rope_layers": [0, 1]}, "layer 1 .* chunks of 64 tokens"),
        ("Gemma2", {"sliding_window": 128}, "layer 0 .* soft cap of 50"),
        ("GptOss", {"num_local_experts": 4}, "layer 0 attends to sinks"),
        ("Gemma4Text", {"layer_types": MIXED[::-1], **GEMMA4}, "layer 1 has keys of another size"),
    ],
)
def test_check_refuses_a_model_in_the_words_of_the_engine(name, fields, reason, tmp_path):
    spec = engine_spec(model=str(make_model(tmp_path, name, **fields)), kind="transformers", **LENGTHS)
    with pytest.raises(ModelError, match=reason) as caught:
        TransformersEngine(spec)
    assert "engine.kind = 'vllm'" in str(caught.value)
    assert model_problems(spec.config) == [str(caught.value)]
    others = spec.config.engine.model_copy(update={"kind": "scripted"})
    assert model_problems(spec.config.model_copy(update={"engine": others})) == []
    with pytest.raises(ConfigError, match=reason):
        make_engine_plan(spec.config)


def test_chunks_as_long_as_the_context_are_served(tmp_path):
    path = make_model(tmp_path, "Llama4Text", attention_chunk_size=128, num_local_experts=2, intermediate_size_mlp=128)
    spec = engine_spec(model=str(path), kind="transformers", **LENGTHS)
    assert model_problems(spec.config) == []
    assert len(generate(TransformersEngine(spec), 0)) == 1


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("Bloom", {"n_head": 4, "n_layer": 2}, "BloomForCausalLM"),
        ("Gemma3Text", {"use_bidirectional_attention": True, "layer_types": MIXED}, "layer 0 attends to other tokens"),
    ],
)
def test_model_whose_config_does_not_show_it_is_refused_by_the_engine(name, fields, reason, tmp_path):
    with pytest.raises(ModelError, match=reason) as caught:
        load(make_model(tmp_path, name, **fields))
    assert "engine.kind = 'vllm'" in str(caught.value)


def test_chunks_are_not_taken_for_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(stock_model, "check_layers", lambda *_: None)
    with pytest.raises(ModelError, match="layer 0 attends to other tokens"):
        load(make_model(tmp_path, "Llama4Text", attention_chunk_size=64))


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 128}, [128, 128]),
        ("Mistral", {"sliding_window": None}, [128, 128]),
        ("Mistral", {"sliding_window": 127}, [127, 127]),
        ("Gemma3Text", {"sliding_window": 64, "layer_types": MIXED}, [128, 64]),
        ("Phimoe", {"sliding_window": 64, **EXPERTS}, [64, 64]),  # visible only in the mask
        ("Phimoe", {"sliding_window": None, **EXPERTS}, [128, 128]),
        ("Qwen2Moe", {"sliding_window": 64, "use_sliding_window": True, "layer_types": MIXED, **EXPERTS}, [128, 64]),
        ("Qwen2Moe", {"sliding_window": 64, "use_sliding_window": False, **EXPERTS}, [128, 128]),
    ],
)
def test_windows_are_those_of_the_masks(name, fields, windows, tmp_path):
    engine = load(make_model(tmp_path, name, **fields))
    assert engine._attention._window_L == windows
    assert len(generate(engine, 0)) == 1


def test_longrope_limits_the_sequence_length(tmp_path, caplog):
    engine = load(make_model(tmp_path, "Llama", rope_parameters=LONGROPE), max_model_len=256)
    assert engine.info["max_model_len"] == 64
    assert "engine.max_model_len = 256" in caplog.text and "64" in caplog.text
    with pytest.raises(RequestError, match="63"):
        engine.add_request(request(1, prompt="x" * 64, max_tokens=1))
    (generation,) = generate(engine, 0)
    assert len(generation.prompt_ids) + len(generation.completion_ids) < 64


def test_directory_without_model_or_tokenizer_is_refused(tmp_path, model_dir):
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ModelError, match="tokenizer"):
        load(tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        load(tmp_path)


def test_template_whose_token_has_no_row_ends_the_start(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_model(tmp_path, vocab_size=258))
    tokenizer.add_special_tokens({"additional_special_tokens": ["Answer:"]})
    tokenizer.save_pretrained(tmp_path)
    spec = engine_spec(model=str(tmp_path), kind="transformers", **LENGTHS)
    assert "'Answer:' (id 258)" in find_problems(spec.config)[0]
    with pytest.raises(ModelError, match="'Answer:' of id 258, and the model's embedding has 258 rows"):
        TransformersEngine(spec)


@pytest.mark.parametrize("token_id", [288, -1])
def test_token_without_a_row_fails_its_request_alone(token_id, model_dir):
    engine = load(model_dir)
    with pytest.raises(RequestError, match=f"token id {token_id}; .* 288 rows"):
        engine.add_request(request(0, prompt_ids=np.array([5, token_id, 7], np.int32)))
    assert len(generate(engine, 0)) == 1


def test_cache_takes_no_more_memory_than_configured_and_less_than_a_sequence_is_refused_with_sizes(model_dir):
    sizes = {"max_model_len": 1024, "dtype": "float32", "max_parallel_seq": 16}
    for kv_cache_gb, fewest, parallel in ((0.0011, 1, 1), (0.01, 8, 16), (0.05, 40, 16)):
        engine = load(model_dir, kv_cache_gb=kv_cache_gb, **sizes)
        assert engine._cache.key_LSHTD.nbytes + engine._cache.value_LSHTD.nbytes <= kv_cache_gb * 2**30
        assert engine.info["parallel_seq"] + engine.info["kept_seq"] >= fewest
        assert engine.info["parallel_seq"] <= parallel
        assert len(generate(engine, 0, 0, 0)) == 3, "sequences that do not fit at once are served one after the other"
    with pytest.raises(ModelError, match=r"kv_cache_gb = 0\.0001.*max_model_len"):
        load(model_dir, kv_cache_gb=0.0001, **sizes)


@pytest.mark.parametrize("threads", [1, 2])
def test_engine_computes_in_as_many_threads_as_configured(model_dir, threads):
    before = torch.get_num_threads()
    sizes = {"max_model_len": 1024, "max_generation_len": 16}
    spec = engine_spec(model=str(model_dir), kind="transformers", threads=threads, **sizes)
    planned = make_plan(spec.config).engine_threads
    try:
        engine = TransformersEngine(replace(spec, threads=planned))
        assert torch.get_num_threads() == engine.info["threads"] == threads
    finally:
        torch.set_num_threads(before)


def test_deleted_engine_leaves_no_cache(model_dir):
    engine = TransformersEngine(engine_spec(model=str(model_dir), max_model_len=128))
    cache = weakref.ref(engine._cache)
    del engine
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize(("schedule", "is_reused"), [("async", True), ("sync", False)])
def test_exact_engine_reuses_nothing_after_it_was_idle(schedule, is_reused):
    engine = TransformersEngine(engine_spec(schedule=schedule, max_model_len=256, max_parallel_seq=4))
    first = generate(engine, 0, 0)
    engine.stats()
    second = generate(engine, 0, 0)
    assert [one.text for one in first] == [other.text for other in second]
    assert (engine.stats().cached_share > 0.5) == is_reused
