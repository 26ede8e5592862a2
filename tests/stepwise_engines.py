"""Engines that take their time in steps."""

from __future__ import annotations

import time

from unstable_lite.engines.scripted import ScriptedEngine
from unstable_lite.transport.messages import Generated


class OneAStep(ScriptedEngine):
    """Finishes one request a step, in their order."""

    def step(self) -> list[Generated]:
        return [self._finished.pop(0)]


class Unhurried(OneAStep):
    """And takes its time."""

    def step(self) -> list[Generated]:
        time.sleep(0.1)
        return super().step()


class ForgetsNothing(Unhurried):
    forget_requests = None  # type: ignore[assignment]
