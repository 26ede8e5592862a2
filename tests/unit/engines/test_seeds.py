"""The seeds of requests that bring none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fakes.remote_engine import engine_spec, finish, request
from unstable_lite.engines.embedded.engine import TransformersEngine


def drawn(seed: int | None, **spec: Any) -> list[list[int]]:
    """Return the tokens of the first four requests."""
    engine = TransformersEngine(replace(engine_spec(kind="transformers", max_model_len=64), **spec))
    for number in range(4):
        engine.add_request(request(number, prompt="Your move:", max_tokens=8, temperature=1.0, seed=seed))
    return [generation.completion_ids.tolist() for generation in finish(engine)]


def test_default_seed_follows_run_seed_and_engine_name_until_a_restart() -> None:
    first = drawn(None)
    assert drawn(None) == first != drawn(None, name="engine-1")
    again = drawn(None, is_restart=True)
    assert first != again != drawn(None, is_restart=True)


def test_explicit_seed_draws_the_same_after_a_restart() -> None:
    assert drawn(7) == drawn(7, is_restart=True)
