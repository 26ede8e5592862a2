"""Engines that sleep, and say when; some do not wake as they lay down. Loaded as `sleeping_engines:Class`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from unstable_lite.engines.adapters import BASE
from unstable_lite.engines.fused_model import FusedModel
from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.engines.transformers import TransformersEngine
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import Generate, Generated


class KeepsADiary(TransformersEngine):
    """Writes what it does, one word a line, to diary.jsonl in the run's output directory."""

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


class ForgetsInItsSleep(TransformersEngine):
    """Loses its adapters, and does not notice."""

    def wake_up(self) -> None:
        super().wake_up()
        assert isinstance(self._model, FusedModel)
        weights = self._model._weights
        for version in weights:
            weights[version] = weights[BASE]


class DiesInItsSleep(KeepsADiary):
    """Once."""

    def sleep(self) -> None:
        super().sleep()
        if self._diary.read_text().count('"sleep"') == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class NeverSleeps(ScriptedEngine):
    sleep = None  # type: ignore[assignment]
