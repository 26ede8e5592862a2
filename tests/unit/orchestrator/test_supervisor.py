"""Supervisor of a worker: deaths that count as the same error again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest

from unstable_lite.config.training import RunConfig
from unstable_lite.errors import WorkerDied
from unstable_lite.orchestrator.supervisor import Supervisor

HERE = "KeyError /home/me/own.py:12"


def deaths_until_the_end(places: Sequence[str]) -> int:
    """Return how many deaths at these places are restarted before one ends the run; all of them if none does."""

    async def restore() -> None: ...

    supervisor = Supervisor(cast(Any, None), RunConfig(max_restarts=9), 1.0, 1.0, restore, alarm=lambda text: None)
    for number, place in enumerate(places):
        try:
            supervisor._judge(WorkerDied("learner: KeyError", place=place))
        except WorkerDied as death:
            assert "the same error at the same line" in str(death)
            return number
    return len(places)


def test_death_at_the_same_place_more_than_an_hour_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", itertools.count(0, 4000).__next__)
    assert deaths_until_the_end([HERE, HERE, HERE]) == 3


@pytest.mark.parametrize(
    ("places", "restarts"),
    [
        ([HERE, HERE], 1),
        ([HERE, "", HERE], 2),
        ([HERE, "KeyError /home/me/own.py:13", "TypeError /home/me/own.py:12"], 3),
        (["", "", ""], 3),
    ],
    ids=["the same place", "a kill between", "other lines and errors", "no code of the user"],
)
def test_second_death_at_the_same_place_ends_the_run(places: list[str], restarts: int) -> None:
    assert deaths_until_the_end(places) == restarts
