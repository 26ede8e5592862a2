"""Prefixes are found to the exact token; drawn tokens and seeds; layers with rows of many adapter versions."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.remote_engine import engine_spec, finish, generate, request
from unstable_lite.engines.embedded.engine import TransformersEngine, draw
from unstable_lite.engines.embedded.kv_cache import CacheShape, KVCache
from unstable_lite.engines.lora import Group, LoraLinear, LoraModel
from unstable_lite.errors import ModelError

SHAPE = CacheShape(
    num_layers=2, num_heads=1, key_width=4, value_width=3, dtype=torch.float32, device=torch.device("cpu")
)


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def compute(cache: KVCache, slot: int, text: str, seed: float) -> None:
    """Extend a slot by the rest of `text`, as a forward pass does."""
    start = int(cache.length_S[slot])
    new = tokens(text)[start:]
    position = np.arange(start, start + len(new))
    for kind in (cache.key_LSHTD, cache.value_LSHTD):
        kind[:, slot, :, position] = (torch.from_numpy(new).float() + seed)[None, None, :, None]
    cache.extend(np.array([slot]), np.array([len(new)]), position, new)


def run(cache: KVCache, text: str, version: int = 0) -> int:
    """Serve a request from start to end and return the number of its tokens that were cached."""
    prefix = cache.find(tokens(text), version)
    shared = min(prefix.length, len(text) - 1)
    slot = cache.take(tokens(text), version, prefix.slot, shared)
    compute(cache, slot, text, seed=version)
    expected = torch.from_numpy(tokens(text)).float() + version
    assert torch.equal(cache.key_LSHTD[1, slot, 0, : len(text), 0], expected)
    assert torch.equal(cache.value_LSHTD[0, slot, 0, : len(text), 2], expected)
    cache.give_back(slot, len(text))
    return shared


@pytest.fixture(params=[0, 2, 6], ids=lambda kept: f"{kept} kept")
def cache(request: pytest.FixtureRequest) -> KVCache:
    return KVCache(SHAPE, max_len=32, num_running=2, num_kept=request.param)


def test_longest_common_prefix_is_reused(cache):
    assert run(cache, "rules; move 1") == 0
    assert run(cache, "rules; move 1, 2") == len("rules; move 1")
    assert run(cache, "rules; pass") == len("rules; ")
    assert run(cache, "rules; pass") == len("rules; pass") - 1


def test_versions_share_no_prefix_and_a_forgotten_one_serves_none(cache):
    run(cache, "same words", version=1)
    assert run(cache, "same words", version=2) == 0
    assert run(cache, "same words", version=0) == 0
    run(cache, "old words", version=1)
    run(cache, "old words", version=2)
    cache.forget(1)
    assert cache.find(tokens("old words"), 1).length == 0
    assert run(cache, "old words", version=2) == len("old words") - 1


def test_kept_prefixes_outlive_requests_grow_and_leave_in_order_of_use():
    cache = KVCache(SHAPE, max_len=32, num_running=1, num_kept=6)
    games = [f"{game} of many games" for game in "abcde"]
    for game in games:
        run(cache, game)
    assert [run(cache, game + "!") for game in games] == [len(games[0])] * 5
    cache = KVCache(SHAPE, max_len=32, num_running=1, num_kept=2)
    for game in ("aaaa", "bbbb", "aaaa", "cccc", "x"):
        run(cache, game)
    assert cache.find(tokens("bbbb"), 0).length == 0
    assert cache.find(tokens("cccc"), 0).length == 4
    cache = KVCache(SHAPE, max_len=32, num_running=1, num_kept=2)
    for game in ("turn 1", "turn 1, turn 2", "another"):
        run(cache, game)
    assert run(cache, "turn 1, turn 2, turn 3") == len("turn 1, turn 2")


def test_cleared_or_released_cache_serves_no_prefix(cache):
    run(cache, "a game", version=1)
    run(cache, "a game", version=2)
    cache.clear()
    assert cache.find(tokens("a game"), 1).length == cache.find(tokens("a game"), 2).length == 0
    assert run(cache, "a game", version=1) == 0
    run(cache, "a game")
    held = weakref.ref(cache.key_LSHTD), weakref.ref(cache.value_LSHTD)
    cache.release()
    gc.collect()
    assert [one() for one in held] == [None, None]
    cache.allocate()
    assert cache.find(tokens("a game"), 0).length == 0 and not cache.key_LSHTD.any()


def test_running_prompt_promises_its_uncomputed_tokens(cache):
    slot = cache.take(tokens("twins"), 3, 0, 0)
    prefix = cache.find(tokens("twins and more"), 3)
    assert (prefix.length, prefix.promised) == (0, len("twins"))
    compute(cache, slot, "twins", seed=0)
    assert cache.find(tokens("twins and more"), 3).length == len("twins")


def test_random_requests_never_get_the_tokens_of_another():
    rng = np.random.default_rng(0)
    cache = KVCache(SHAPE, max_len=32, num_running=2, num_kept=5)
    for _ in range(300):
        run(cache, "".join(rng.choice(list("ab"), rng.integers(1, 30))), version=int(rng.integers(3)))


ULP = 2.0**-24


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2 * ULP, 3), (1 - ULP, 3)])
def test_zero_weight_token_is_never_drawn_despite_rounded_sums(uniform, expected):
    prob_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]] * 2)
    sequential = prob_BV[0].cumsum(-1)
    parallel = torch.tensor([0.0, 0.5 - ULP / 2, 0.5, 1 - 3 * ULP, 1 - 2 * ULP, 1 - 3 * ULP, 1 - ULP, 1.0])
    id_B1 = draw(prob_BV, torch.stack((sequential, parallel)), torch.tensor([[uniform], [uniform]]))
    assert id_B1.tolist()[0] == [expected]
    assert prob_BV.gather(-1, id_B1).tolist() == [[0.5], [0.5]]


def drawn(seed: int | None, **spec: Any) -> list[list[int]]:
    """Return the tokens of the first four requests."""
    engine = TransformersEngine(replace(engine_spec(kind="transformers", max_model_len=64), **spec))
    for number in range(4):
        engine.add_request(request(number, prompt="Your move:", max_tokens=8, temperature=1.0, seed=seed))
    return [generation.completion_ids.tolist() for generation in finish(engine)]


def test_default_seed_changes_with_a_restart_and_an_explicit_one_does_not():
    first = drawn(None)
    assert drawn(None) == first != drawn(None, name="engine-1")
    again = drawn(None, is_restart=True)
    assert first != again != drawn(None, is_restart=True)
    assert drawn(7) == drawn(7, is_restart=True)


def test_each_group_of_rows_gets_its_own_terms():
    torch.manual_seed(0)
    groups: list[Group] = []
    layer = LoraLinear(torch.nn.Linear(6, 5).requires_grad_(False), groups)
    pairs = {version: (torch.randn(2, 6), torch.randn(5, 2)) for version in (3, 8)}
    for version, (a, b) in pairs.items():
        layer.load(version, a, b, scale=0.5)
    x = torch.randn(1, 9, 6)
    groups[:] = [Group(0, 2, 0), Group(2, 5, 3), Group(5, 6, 4), Group(6, 9, 8)]
    expected = layer.base(x)
    for rows, version in ((slice(2, 5), 3), (slice(6, 9), 8)):
        a, b = pairs[version]
        expected[0, rows] += 0.5 * x[0, rows] @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ModelError, match="3 of 9 tokens"):
        layer(torch.randn(3, 6))


def test_unloaded_version_leaves_nothing_behind(model_dir, adapter_dirs):
    engine = TransformersEngine(
        engine_spec(model=str(model_dir), kind="transformers", max_model_len=128, dtype="bfloat16")
    )
    for version, path in enumerate(adapter_dirs, start=1):
        engine.load_adapter(version, path)
    generate(engine, 1, 2)
    engine.unload_adapter(1)
    assert isinstance(engine._model, LoraModel)
    layers = engine._model._layers.values()
    assert len(layers) == 14 and all(layer.pairs.keys() == {2} for layer in layers)
    assert not (engine._cache._version_S == 1).any()
