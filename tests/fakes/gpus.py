"""A program nvidia-smi that reports GPUs which the machine does not have."""

from pathlib import Path

import pytest

from unstable_lite.engines import devices
from unstable_lite.planning import placement


def install(
    monkeypatch: pytest.MonkeyPatch, directory: Path, count: int, gib: float = 24, driver: str = "580.65.06"
) -> None:
    """Put nvidia-smi first in PATH, also for processes that the test starts."""
    listed = "".join(f"GPU {index}: H\\n" for index in range(count))
    smi = directory / "nvidia-smi"
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in\n-L) printf "{listed}";;\n*driver*) echo {driver};;\n'
        f"*) echo {int(gib * 1024)};;\nesac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(placement, "SHARED_MEMORY", directory)  # a container may have too little for a model
    devices.gpu_memory_bytes.cache_clear()
    devices.driver_version.cache_clear()
    assert devices.count_gpus() == count
