"""Reasons why this machine cannot run a config: vLLM, GPU driver, shared memory. Loads neither torch nor vLLM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from unstable_lite.adapters.store import SHARED_MEMORY
from unstable_lite.config import Config
from unstable_lite.engines.devices import cuda_of_torch, driver_version
from unstable_lite.engines.vllm_checks import vllm_problems
from unstable_lite.errors import ConfigError
from unstable_lite.planning.adapter_slots import adapters_in_memory
from unstable_lite.planning.engine_choice import engine_of
from unstable_lite.planning.memory import shape_of
from unstable_lite.planning.placement import Devices

OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest GPU driver for each major version of CUDA (NVIDIA's release notes of CUDA, "minor version compatibility")."""
NCCL_BYTES = 1 << 30
"""Shared memory of processes that divide a model or a batch, so that they can talk; Docker's default is 64 MB."""


def machine_problems(config: Config, engine_devices: Devices, learner_devices: Devices) -> Iterator[str]:
    """Yield each reason why the workers cannot run on these devices of this machine."""
    try:
        kind, _ = engine_of(config, engine_devices)
    except ConfigError as error:
        yield from error.problems
        return
    if engine_devices:
        yield from vllm_problems(config.engine, kind, engine_devices)
    if config.learner.kernels == "liger" and "cpu" in learner_devices:
        yield "learner.kernels = 'liger' needs a GPU, and the learner is on the CPU; set 'torch'"
    if any(isinstance(device, int) for device in (*engine_devices, *learner_devices)):
        yield from _driver_problems()
    if config.engine.tensor_parallel > 1 or sum(isinstance(device, int) for device in learner_devices) > 1:
        yield from _too_little_shared_memory(NCCL_BYTES, "processes that divide a model or a batch need")


def _driver_problems() -> Iterator[str]:
    driver, cuda = driver_version(), cuda_of_torch()
    if driver is None or cuda is None or _is_driver_replaced():
        return
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(driver.split(".")[0]) < oldest:
        yield (
            f"the GPU driver {driver} is too old: torch here is built for CUDA {cuda}, which needs driver {oldest} or "
            "newer; update the driver, or install a torch for an older CUDA (https://pytorch.org/get-started)"
        )


def _is_driver_replaced() -> bool:
    """Return whether CUDA's compatibility package stands in for an older driver (data-centre GPUs only)."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    has_library = any((Path(folder) / "libcuda.so.1").exists() for folder in folders if "compat" in folder)
    return has_library or bool(os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY"))


def machine_warnings(config: Config, engine_devices: Devices, learner_devices: Devices) -> Iterator[str]:
    """Yield a warning if /dev/shm is too small as such for a run's adapters, which then pass through the disk."""
    shape = shape_of(config.model_name)
    has_gpu = any(isinstance(device, int) for device in (*engine_devices, *learner_devices))
    if has_gpu and engine_devices and learner_devices and shape is not None:
        adapters = 4 * shape.lora_parameters(config.lora) * adapters_in_memory(config)
        yield from _too_little_shared_memory(adapters, "adapters, which pass through the run directory instead, need")


def _too_little_shared_memory(needed: int, who_needs: str) -> Iterator[str]:
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    if size < needed:
        gib = -(-needed // (1 << 30))
        yield (
            f"{SHARED_MEMORY} has {size / 1e6:.0f} MB, but {who_needs} up to {needed / 1e6:.0f} MB there; start the "
            f"container with --shm-size={gib}g (Kubernetes: mount an emptyDir with medium Memory at {SHARED_MEMORY})"
        )
