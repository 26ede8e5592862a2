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


def test_equal_steps_are_computed_once_and_those_that_train_other_tokens_apart() -> None:
    ids = np.arange(6)
    items = [make_item(prompt_ids=ids[:n], completion_ids=ids[n:]) for n in (2, 3)]
    for at in (0, 1):
        forced = Forced(at=at, ids=ids[2 + at : 3 + at])
        items.append(make_item(prompt_ids=ids[:2], completion_ids=np.delete(ids[2:], at), forced=forced))
    known, compute = Remembered(), Computed()
    for asked in ([*items, items[0]], items[1:]):
        for item, values in zip(asked, known.of(asked, compute), strict=True):
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
