"""The token that is drawn, and the seeds of requests that bring none.

test_conformance.py checks the distribution of the draws on whole engines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fakes.remote_engine import engine_spec, finish, request
from unstable_lite.engines.embedded.engine import TransformersEngine, draw

ULP = 2.0**-24


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2 * ULP, 3), (1 - ULP, 3)])
def test_zero_weight_token_is_never_drawn_despite_rounded_sums(uniform: float, expected: int) -> None:
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


def test_default_seed_follows_run_seed_and_engine_name_until_a_restart() -> None:
    first = drawn(None)
    assert drawn(None) == first != drawn(None, name="engine-1")
    again = drawn(None, is_restart=True)
    assert first != again != drawn(None, is_restart=True)


def test_explicit_seed_draws_the_same_after_a_restart() -> None:
    assert drawn(7) == drawn(7, is_restart=True)
