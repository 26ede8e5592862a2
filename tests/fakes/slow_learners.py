"""Slow learners; loaded as `fakes.slow_learners:Class`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.learner import UpdateResult
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.types import TrainItem


class TakesItsTime(REINFORCELearner):
    """Takes longer for an update than an engine takes to start. Writes "learnt" to diary.jsonl after each update."""

    seconds = 10.0

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        self._diary = Path(config.run.output_dir) / "diary.jsonl"

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        result = super().update(items, version)
        time.sleep(self.seconds)
        with self._diary.open("a") as file:
            print(json.dumps("learnt"), file=file)
        return result


class TakesFourSeconds(TakesItsTime):
    seconds = 4.0


class NotesItsSaves(REINFORCELearner):
    """Writes "saved" to diary.jsonl whenever it saves its state."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        diary, save = Path(config.run.output_dir) / "diary.jsonl", self.training.save

        def noted(directory: Path) -> None:
            save(directory)
            with diary.open("a") as file:
                print(json.dumps("saved"), file=file)

        self.training.save = noted  # type: ignore[method-assign]


class TakesASecond(TakesItsTime):
    seconds = 1.0
