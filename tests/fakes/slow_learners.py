"""Learners without torch that are slow or skip a batch: `fakes.slow_learners:Class`, see `numpy_learner`."""

import json
import time
from pathlib import Path

from fakes.numpy_learner import NumpyLearner
from unstable_lite.adapters.table import IDS_OF_POLICY
from unstable_lite.transport.messages import Message, SaveLearner, Update, Updated
from unstable_lite.transport.worker_main import WorkerSpec


class KeepsADiary(NumpyLearner):
    """Writes "learnt" after each update and "saved" after each save as a line of diary.jsonl."""

    seconds = 0.0
    """Duration of an update."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._diary = Path(spec.config.run.output_dir) / "diary.jsonl"

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if isinstance(message, Update):
            time.sleep(self.seconds)
            self._note("learnt")
        elif isinstance(message, SaveLearner):
            self._note("saved")
        return reply

    def _note(self, what: str) -> None:
        with self._diary.open("a") as file:
            print(json.dumps(what), file=file)


class SkipsItsFirstBatch(NumpyLearner):
    has_skipped = False

    def answer(self, message: Message) -> Message:
        if isinstance(message, Update) and message.version % IDS_OF_POLICY == 2 and not self.has_skipped:
            self.has_skipped = True
            return Updated(request_id=message.request_id, metrics={}, skipped="a loss that is not finite")
        return super().answer(message)


class TakesAWhile(KeepsADiary):
    seconds = 0.5  # ten of them outlast the restarts of two workers


class TakesASecond(KeepsADiary):
    seconds = 1.0


class TakesFourSeconds(KeepsADiary):
    seconds = 4.0


class TakesItsTime(KeepsADiary):
    """Takes longer for an update than an engine takes to start."""

    seconds = 10.0
