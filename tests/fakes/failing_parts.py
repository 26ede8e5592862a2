"""A user's own algorithm with a mistake in it."""

from collections.abc import Sequence

from unstable_lite.learner import UpdateResult
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.types import TrainItem


class Algorithm(REINFORCELearner):
    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        return super().update(items.nope, version)  # type: ignore[attr-defined]
