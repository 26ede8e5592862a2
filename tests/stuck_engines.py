"""Engines that come up well and then never answer."""

from __future__ import annotations

from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.transport.messages import Generated


class Loops(ScriptedEngine):
    def step(self) -> list[Generated]:
        return a_loop_without_end()


def a_loop_without_end() -> list[Generated]:
    while True:
        pass
