from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.tracking.repetition import repetition
from unstable_lite.types import Generation, Step


def step(ids: Sequence[int]) -> Step:
    generation = Generation(
        prompt_ids=np.array([1], np.int32),
        completion_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        text="",
        finish_reason="stop",
        adapter_version=1,
    )
    return Step(pid=0, obs="", act="", reward=0.0, env_id="E", generation=generation)


@given(st.lists(st.lists(st.integers(0, 2) | st.integers(2**31 - 3, 2**31 - 1), max_size=12), max_size=6))
def test_repeated_4grams_are_those_seen_earlier_in_the_completion(completions: list[list[int]]) -> None:
    repeated = total = 0
    for ids in completions:
        grams = [tuple(ids[start : start + 4]) for start in range(len(ids) - 3)]
        total += len(grams)
        repeated += sum(gram in grams[:index] for index, gram in enumerate(grams))
    metrics = repetition(map(step, completions))
    assert metrics["num_4grams"] == total
    assert metrics["repeated_4grams"] == pytest.approx(repeated / max(total, 1))


def test_identical_completions_are_counted_for_the_commonest_one() -> None:
    metrics = repetition(map(step, [[1, 2], [1, 2], [1], [2, 1], [1, 2], [258]]))
    assert (metrics["identical_completions"], metrics["num_completions"]) == (0.5, 6)
    assert repetition([])["identical_completions"] == 0
