"""Values of equal steps are computed once, and the oldest are forgotten."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fakes.game_records import make_item
from unstable_lite.learner import answers
from unstable_lite.learner.answers import Remembered
from unstable_lite.types import Forced, TrainItem


class Computed(list[int]):
    """Numbers of steps of each computation, whose values are the completions' tokens."""

    def __call__(self, items: Sequence[TrainItem]) -> list[torch.Tensor]:
        self.append(len(items))
        return [torch.from_numpy(item.completion_ids).float() for item in items]


def test_equal_steps_are_computed_once() -> None:
    one, other = (make_item(prompt_ids=np.arange(3), completion_ids=np.array([last])) for last in (7, 8))
    known, compute = Remembered(), Computed()
    for items in ([one, other, one], [other], [one, one]):
        expected = [float(item.completion_ids[0]) for item in items]
        assert [values.item() for values in known.of(items, compute)] == expected
    assert compute == [2]


def test_steps_of_equal_tokens_that_train_others_are_others() -> None:
    ids = np.arange(6)
    items = [make_item(prompt_ids=ids[:n], completion_ids=ids[n:]) for n in (2, 3)]
    for at in (0, 1):
        forced = Forced(at=at, ids=ids[2 + at : 3 + at])
        items.append(make_item(prompt_ids=ids[:2], completion_ids=np.delete(ids[2:], at), forced=forced))
    known, compute = Remembered(), Computed()
    for _ in range(2):
        for item, values in zip(items, known.of(items, compute), strict=True):
            assert values.tolist() == item.completion_ids.tolist()
    assert compute == [4]


def test_oldest_steps_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [make_item(prompt_ids=np.arange(3), completion_ids=np.array([last])) for last in range(4)]
    monkeypatch.setattr(answers, "MOST_BYTES", 3 * (items[0].prompt_ids.nbytes + items[0].completion_ids.nbytes))
    known, compute = Remembered(), Computed()
    assert len(known.of(items, compute)) == 4
    known.of(items[1:], compute)
    assert compute == [4]
    known.of(items[:1], compute)
    assert compute == [4, 1]
