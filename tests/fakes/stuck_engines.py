"""Scripted engines that hang, are slow, raise, die, need many steps, or measure their GPU."""

import os
import signal
import time
from pathlib import Path

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.errors import ModelError
from unstable_lite.transport.messages import Generated
from unstable_lite.transport.worker_main import WorkerSpec


class Loops(ScriptedEngine):
    def step(self) -> list[Generated]:
        return endless_loop()


class Slow(ScriptedEngine):
    """Takes longer for a step than a step should."""

    def step(self) -> list[Generated]:
        time.sleep(5.1)
        return super().step()


class Raises(ScriptedEngine):
    """Raises in this file's own code, under a call of the package's."""

    def step(self) -> list[Generated]:
        return self.no_such_method()  # type: ignore[attr-defined,no-any-return]


class RunsOutOfMemory(ScriptedEngine):
    def step(self) -> list[Generated]:
        raise MemoryError("cannot allocate memory")


class DiesInItsStart(ScriptedEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def endless_loop() -> list[Generated]:
    while True:
        pass


# engines that need many steps


class OneAStep(ScriptedEngine):
    """Finishes one request per step, in order."""

    def step(self) -> list[Generated]:
        return [self._finished.pop(0)]


class Unhurried(OneAStep):
    """Takes 0.1 s per step."""

    def step(self) -> list[Generated]:
        time.sleep(0.1)
        return super().step()


# an engine that, as vLLM, must not start while another one starts on its GPU


class MeasuresTheWholeGPU(ScriptedEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        starting = Path(os.environ["STARTING"]) / f"gpu-{os.environ['CUDA_VISIBLE_DEVICES']}"
        try:
            starting.touch(exist_ok=False)
        except FileExistsError:
            raise ModelError(f"{spec.name}: another engine is starting on this GPU") from None
        time.sleep(0.5)
        super().__init__(spec)
        starting.unlink()
