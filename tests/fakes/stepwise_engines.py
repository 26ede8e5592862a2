"""Engines that need many steps."""

from __future__ import annotations

import time

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.transport.messages import Generated


class OneAStep(ScriptedEngine):
    """Finishes one request per step, in order."""

    def step(self) -> list[Generated]:
        return [self._finished.pop(0)]


class Unhurried(OneAStep):
    """Takes 0.1 s per step."""

    def step(self) -> list[Generated]:
        time.sleep(0.1)
        return super().step()
