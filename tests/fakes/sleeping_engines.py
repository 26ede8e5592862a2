"""Engines that record their sleep; some do not wake up as they were. Loaded as `fakes.sleeping_engines:Class`."""

import json
import os
import signal
import time
from pathlib import Path

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.transport.messages import Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec


class KeepsADiary(ScriptedEngine):
    """Writes each action as a line of one word to diary.jsonl in the run's output directory."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._diary = Path(spec.config.run.output_dir) / "diary.jsonl"
        self.note("start")

    def note(self, what: str) -> None:
        with self._diary.open("a") as file:
            print(json.dumps(what), file=file)

    def add_request(self, request: Generate) -> None:
        self.note("request")
        super().add_request(request)

    def step(self) -> list[Generated]:
        time.sleep(0.01)  # else thousands of games are played during a turn of the learner
        finished = super().step()
        for _ in finished:
            self.note("answer")
        return finished

    def load_adapter(self, version: int, path: Path) -> str:
        self.note("load")
        return super().load_adapter(version, path)

    def sleep(self) -> None:
        super().sleep()
        self.note("sleep")

    def wake_up(self) -> None:
        super().wake_up()
        self.note("wake")


class SignsItsDiary(KeepsADiary):
    """Writes its name before each action."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._name = spec.name
        super().__init__(spec)

    def note(self, what: str) -> None:
        super().note(f"{self._name} {what}")


class ForgetsInItsSleep(TransformersEngine):
    """Loses its adapters without noticing."""

    def wake_up(self) -> None:
        super().wake_up()
        for layer in self._model._layers.values():
            layer.pairs = {version: (a_RI, b_OR * 0) for version, (a_RI, b_OR) in layer.pairs.items()}


class DiesInItsSleep(KeepsADiary):
    def sleep(self) -> None:
        super().sleep()
        if self._diary.read_text().count('"sleep"') == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class NeverSleeps(ScriptedEngine):
    sleep = None  # type: ignore[assignment]
