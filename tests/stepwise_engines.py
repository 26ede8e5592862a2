"""Engines that take their time in steps."""

from __future__ import annotations

from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.transport.messages import Generated


class OneAStep(ScriptedEngine):
    """Finishes one request a step, in their order."""

    def step(self) -> list[Generated]:
        return [self._finished.pop(0)]
