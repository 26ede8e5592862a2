"""Engines that start well and then hang or are slow."""

from __future__ import annotations

import time

from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.transport.messages import Generated


class Loops(ScriptedEngine):
    def step(self) -> list[Generated]:
        return endless_loop()


class Slow(ScriptedEngine):
    """Takes longer for a step than a step should."""

    def step(self) -> list[Generated]:
        time.sleep(5.1)
        return super().step()


def endless_loop() -> list[Generated]:
    while True:
        pass
