"""An engine that, as vLLM, must not start while another one starts on its GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.errors import ModelError
from unstable_lite.transport.worker_main import WorkerSpec


class MeasuresTheWholeGPU(ScriptedEngine):
    def __init__(self, spec: WorkerSpec) -> None:
        starting = Path(os.environ["STARTING"]) / f"gpu-{os.environ['CUDA_VISIBLE_DEVICES']}"
        try:
            starting.touch(exist_ok=False)
        except FileExistsError:
            raise ModelError(f"{spec.name}: another engine is starting on this GPU") from None
        time.sleep(0.5)
        super().__init__(spec)
        starting.unlink()
