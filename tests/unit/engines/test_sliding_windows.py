"""The embedded engine computes what the learner computes beyond a window, for every shape of batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.game_records import make_item
from fakes.random_models import make_model
from fakes.remote_engine import engine_spec, finish, request
from unstable_lite.config.training import LoraConfig
from unstable_lite.engines.embedded.attention import CachedAttention
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.engines.embedded.kv_cache import CacheShape, KVCache
from unstable_lite.learner.model import Policy
from unstable_lite.types import Generation

WINDOW = 16
BEYOND = 5 * WINDOW
"""Tokens of a prompt that is longer than the window."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3Text": {"num_hidden_layers": 3, "layer_types": [LOCAL, GLOBAL, LOCAL], "query_pre_attn_scalar": 32},
    "Mistral": {},
    "Qwen2": {"head_dim": 16, "use_sliding_window": True, "layer_types": [GLOBAL, LOCAL]},
    "Phi3": {},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # has its window in the mask alone
}
CPU = torch.device("cpu")

Serve = Callable[[TransformersEngine], list[Generation]]


def text(number: int, size: int) -> str:
    """Return a text of `size` tokens, which are bytes, that no other number shares a beginning with."""
    return "".join(chr(97 + (7 * number + 5 * index + index * index) % 26) for index in range(size))


def serve_long_prompts(engine: TransformersEngine) -> list[Generation]:
    """Serve prompts up to and beyond the window, each in one pass."""
    for number, size in enumerate((WINDOW - 1, WINDOW, WINDOW + 1, BEYOND)):
        engine.add_request(request(number, prompt=text(number, size), max_tokens=1))
    return finish(engine)


def serve_pieces(engine: TransformersEngine) -> list[Generation]:
    """Serve a prompt that is computed in pieces shorter than the window."""
    engine._prompt_tokens_per_step = WINDOW - 3
    engine.add_request(request(0, prompt=text(0, BEYOND), max_tokens=1))
    return finish(engine)


def serve_decoding(engine: TransformersEngine) -> list[Generation]:
    """Decode rows of several lengths past the window."""
    for number in range(5):
        engine.add_request(request(number, prompt=text(number, 2 + 9 * number), max_tokens=2 * WINDOW))
    return finish(engine)


def serve_shared_prefixes(engine: TransformersEngine) -> list[Generation]:
    """Serve prompts that begin like finished ones, beyond the window and within it."""
    engine.add_request(request(0, prompt=text(0, BEYOND), max_tokens=2))
    served = finish(engine)
    engine.stats()
    for number, shared in ((1, BEYOND), (2, BEYOND - 5), (3, WINDOW // 2)):
        engine.add_request(request(number, prompt=text(0, shared) + text(number, WINDOW), max_tokens=WINDOW))
    served += finish(engine)
    assert engine.stats().cached_share > 0.4
    return served


def serve_mixed_batches(engine: TransformersEngine) -> list[Generation]:
    """Serve prompts of all sizes that arrive while others decode, so that their slots are not adjacent."""
    served: dict[int, Generation] = {}
    engine._prompt_tokens_per_step = 2 * WINDOW
    for number, size in enumerate((3, BEYOND, 20, 7, 55, 40, BEYOND + 9, 5)):
        engine.add_request(request(number, prompt=text(number, size), max_tokens=4 + 5 * (number % 4)))
        served |= {done.request_id: done.generation for _ in range(2) for done in engine.step()}
    return [*served.values(), *finish(engine)]


SERVE: list[Serve] = [serve_long_prompts, serve_pieces, serve_decoding, serve_shared_prefixes, serve_mixed_batches]


@pytest.fixture(scope="module", params=MODELS)
def served_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"sliding_window": WINDOW, **MODELS[request.param]}
    return make_model(tmp_path_factory.mktemp("model"), request.param, **fields)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def policy(request: pytest.FixtureRequest, served_model: Path) -> Policy:
    config = engine_spec(model=str(served_model), temperature=0.8).config
    learner = config.learner.model_copy(update={"dtype": "float32"})
    lora = LoraConfig(target_modules=("o_proj",))
    return Policy(config.model_copy(update={"learner": learner, "lora": lora}), request.param)


@pytest.mark.parametrize("serve", SERVE)
def test_engine_and_learner_agree_beyond_the_window(serve, served_model, policy):
    settings = {"kind": "transformers", "dtype": "float32", "max_model_len": 128, "max_parallel_seq": 6}
    engine = TransformersEngine(engine_spec(model=str(served_model), device=policy.device.type, **settings))
    served = serve(engine)
    assert max(len(one.prompt_ids) + len(one.completion_ids) for one in served) > WINDOW + 1
    items = [make_item(one.prompt_ids, one.completion_ids, one.logprobs) for one in served]
    for one, logprobs in zip(served, policy.item_logprobs(items), strict=True):
        np.testing.assert_allclose(one.logprobs, logprobs.numpy(), atol=2e-4)


SHAPE = CacheShape(num_layers=2, num_heads=1, key_width=4, value_width=4, dtype=torch.float32, device=CPU)


def test_windowed_layers_read_no_keys_before_the_window_and_cost_nothing_until_it_is_full():
    attention = CachedAttention(KVCache(SHAPE, 64, 4, 0), [WINDOW, 64])
    attention.plan(np.array([0, 1]), np.array([1, 1]), np.array([40, 50]))
    ((bucket,), _) = attention._buckets
    assert bucket.keys[WINDOW].positions == slice(40 - WINDOW + 1, 51)
    assert bucket.keys[64].positions == slice(0, 51)
    attention.plan(np.array([0]), np.array([WINDOW]), np.arange(WINDOW))
    ((bucket,), _) = attention._buckets
    assert bucket.keys[WINDOW] is bucket.keys[64]


def test_plan_reads_nothing_back_from_the_device():
    """Tensors on the device "meta" have no values, so that reading one is an error."""
    attention = CachedAttention(KVCache(replace(SHAPE, device=torch.device("meta")), 64, 4, 0), [WINDOW, 64])
    attention.plan(np.array([0, 3]), np.array([1, 40]), np.array([20, *range(40)]))
    buckets, put = attention._buckets
    tensors = [put, attention._write_at, *(bucket.take for bucket in buckets)]
    tensors += [keys.mask_R1QT for bucket in buckets for keys in bucket.keys.values()]
    assert len(tensors) == 8 and all(tensor.is_meta for tensor in tensors)


def test_engine_turns_attention_by_cudnn_off():
    torch.backends.cuda.enable_cudnn_sdp(True)
    TransformersEngine(engine_spec(kind="transformers", max_model_len=64))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
