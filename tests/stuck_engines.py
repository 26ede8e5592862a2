"""Engines that come up well and then never answer."""

from __future__ import annotations

import time

from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.transport.messages import Generated


class Loops(ScriptedEngine):
    def step(self) -> list[Generated]:
        return a_loop_without_end()


class Slow(ScriptedEngine):
    """Every step takes longer than a step should."""

    def step(self) -> list[Generated]:
        time.sleep(5.1)
        return super().step()


def a_loop_without_end() -> list[Generated]:
    while True:
        pass
