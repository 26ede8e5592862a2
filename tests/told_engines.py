"""An engine that tells what it was told. Loaded as `told_engines:TellsWhetherItGoesOn`."""

from __future__ import annotations

from unstable_lite.engines.transformers import TransformersEngine
from unstable_lite.transport.child import WorkerSpec


class TellsWhetherItGoesOn(TransformersEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.facts["goes on"] = spec.goes_on
