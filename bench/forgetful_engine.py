"""The embedded engine, which turns every prompt into tokens anew.

Otherwise it knows its last thousands of prompts. In a run nearly every prompt is new; asked for a second time, alone,
none would be.
"""

from __future__ import annotations

from unstable_lite.engines.transformers import TransformersEngine
from unstable_lite.transport.child import WorkerSpec


class ForgetfulEngine(TransformersEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        vars(self._tokenizer)["encode"] = self._tokenizer.encode.__wrapped__
