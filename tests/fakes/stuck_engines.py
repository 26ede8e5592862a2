"""Engines that start well and then hang, are slow, or raise."""

from __future__ import annotations

import time

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.transport.messages import Generated


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


def endless_loop() -> list[Generated]:
    while True:
        pass
