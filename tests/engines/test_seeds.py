"""What an engine draws where a request brings no seed of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remote_engine import engine_spec, finish, request
from unstable_lite.engines.transformers import TransformersEngine


def drawn(seed: int | None, **spec: Any) -> list[list[int]]:
    """The tokens of the first few requests."""
    engine = TransformersEngine(replace(engine_spec(kind="transformers", max_model_len=64), **spec))
    for number in range(4):
        engine.add_request(request(number, prompt="Your move:", max_tokens=8, temperature=1.0, seed=seed))
    return [generation.completion_ids.tolist() for generation in finish(engine)]


def test_it_follows_from_the_runs_seed_and_the_engines_name_the_first_time_and_never_again() -> None:
    first = drawn(None)
    assert drawn(None) == first != drawn(None, name="engine-1")
    again = drawn(None, goes_on=True)
    assert first != again != drawn(None, goes_on=True)


def test_a_requests_own_seed_draws_the_same_in_an_engine_that_goes_on() -> None:
    assert drawn(7) == drawn(7, goes_on=True)
