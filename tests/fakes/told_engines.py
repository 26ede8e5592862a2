"""An engine that logs whether it was restarted. Loaded as `fakes.told_engines:PrintsWhetherResumed`."""

from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.transport.worker_main import WorkerSpec


class PrintsWhetherResumed(TransformersEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.info["resumed:"] = spec.is_restart
