"""Prefixes are found to the exact token, within one version, and copied without loss."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from unstable_lite.engines.embedded.kv_cache import CacheShape, KVCache

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


def test_longest_common_prefix_is_reused(cache: KVCache) -> None:
    assert run(cache, "rules; move 1") == 0
    assert run(cache, "rules; move 1, 2") == len("rules; move 1")
    assert run(cache, "rules; pass") == len("rules; ")
    assert run(cache, "rules; pass") == len("rules; pass") - 1


def test_versions_share_no_prefix(cache: KVCache) -> None:
    run(cache, "same words", version=1)
    assert run(cache, "same words", version=2) == 0
    assert run(cache, "same words", version=0) == 0


def test_kept_prefixes_outlive_the_slots_of_running_requests() -> None:
    cache = KVCache(SHAPE, max_len=32, num_running=1, num_kept=6)
    games = [f"{game} of many games" for game in "abcde"]
    for game in games:
        run(cache, game)
    assert [run(cache, game + "!") for game in games] == [len(games[0])] * 5


def test_least_recently_used_prefix_is_evicted_first() -> None:
    cache = KVCache(SHAPE, max_len=32, num_running=1, num_kept=2)
    for game in ("aaaa", "bbbb", "aaaa", "cccc", "x"):
        run(cache, game)
    assert cache.find(tokens("bbbb"), 0).length == 0
    assert cache.find(tokens("cccc"), 0).length == 4


def test_forgotten_version_serves_no_prefix(cache: KVCache) -> None:
    run(cache, "old words", version=1)
    run(cache, "old words", version=2)
    cache.forget(1)
    assert cache.find(tokens("old words"), 1).length == 0
    assert run(cache, "old words", version=2) == len("old words") - 1


def test_cleared_cache_serves_no_prefix(cache: KVCache) -> None:
    run(cache, "a game", version=1)
    run(cache, "a game", version=2)
    cache.clear()
    assert cache.find(tokens("a game"), 1).length == cache.find(tokens("a game"), 2).length == 0
    assert run(cache, "a game", version=1) == 0


def test_released_cache_holds_no_memory_and_no_prefix(cache: KVCache) -> None:
    run(cache, "a game")
    held = weakref.ref(cache.key_LSHTD), weakref.ref(cache.value_LSHTD)
    cache.release()
    gc.collect()
    assert [one() for one in held] == [None, None]
    cache.allocate()
    assert cache.find(tokens("a game"), 0).length == 0 and not cache.key_LSHTD.any()


def test_running_prompt_promises_its_uncomputed_tokens(cache: KVCache) -> None:
    slot = cache.take(tokens("twins"), 3, 0, 0)
    prefix = cache.find(tokens("twins and more"), 3)
    assert (prefix.length, prefix.promised) == (0, len("twins"))
    compute(cache, slot, "twins", seed=0)
    assert cache.find(tokens("twins and more"), 3).length == len("twins")


def test_random_requests_never_get_the_tokens_of_another() -> None:
    rng = np.random.default_rng(0)
    cache = KVCache(SHAPE, max_len=32, num_running=2, num_kept=5)
    for _ in range(300):
        run(cache, "".join(rng.choice(list("ab"), rng.integers(1, 30))), version=int(rng.integers(3)))


def test_kept_sequence_is_extended_to_its_new_end() -> None:
    cache = KVCache(SHAPE, max_len=32, num_running=1, num_kept=2)
    for game in ("turn 1", "turn 1, turn 2", "another"):
        run(cache, game)
    assert run(cache, "turn 1, turn 2, turn 3") == len("turn 1, turn 2")
