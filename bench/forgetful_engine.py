"""Embedded engine that tokenizes every prompt again.

The engine itself remembers its last thousands of prompts. In a run nearly every prompt is new; when a bench sends the
same prompts a second time, none would be.
"""

from __future__ import annotations

from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.transport.worker_main import WorkerSpec


class ForgetfulEngine(TransformersEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        vars(self._tokenizer)["encode"] = self._tokenizer.encode.__wrapped__
