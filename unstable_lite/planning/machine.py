"""Reasons why this machine cannot run a config: engine, GPU driver, shared memory. Loads neither torch nor vLLM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from unstable_lite.adapters.store import SHARED_MEMORY
from unstable_lite.config import Config
from unstable_lite.engines.devices import choose_engine, cuda_of_torch, driver_version, vllm_usable
from unstable_lite.engines.vllm_checks import vllm_problems
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.models import model_errors, read_json, resolve_model
from unstable_lite.models.layers import check_layers
from unstable_lite.planning.defaults import adapters_in_memory
from unstable_lite.planning.memory import shape_of
from unstable_lite.planning.placement import Devices, Placement

OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest GPU driver for each major version of CUDA (NVIDIA's release notes of CUDA, "minor version compatibility")."""
NCCL_BYTES = 1 << 30
"""Shared memory of processes that divide a model or a batch, so that they can talk; Docker's default is 64 MB."""


def engine_of(config: Config, devices: Devices) -> tuple[str, str]:
    """Return the engine kind for `devices`, and the reason; without devices no engine starts, and any kind will do.

    Raises ConfigError if vLLM is set but cannot serve, or if the embedded engine does not compute a local model.
    """
    kind, reason = choose_engine(config.engine.kind, devices)
    path = resolve_model(config.model_name)
    if devices and kind == "transformers" and (file := Path(path) / "config.json").is_file():
        try:
            with model_errors(file, "is not the config of a model"):
                check_layers(path, read_json(file), config.engine.max_model_len)
        except ModelError as error:
            raise ConfigError(str(error)) from error
    return kind, reason


def machine_problems(placed: Placement) -> Iterator[str]:
    """Yield each reason why the workers cannot run on these devices of this machine."""
    config = placed.config
    try:
        kind, _ = engine_of(config, placed.engine_devices)
    except ConfigError as error:
        yield from error.problems
        return
    if placed.engine_devices:
        yield from vllm_problems(config.engine, kind, placed.engine_devices)
    if config.learner.kernels == "liger" and "cpu" in placed.learner_devices:
        yield "learner.kernels = 'liger' needs a GPU, and the learner is on the CPU; set 'torch'"
    if placed.gpus:
        yield from _driver_problems()
    if config.engine.tensor_parallel > 1 or sum(isinstance(device, int) for device in placed.learner_devices) > 1:
        yield from _too_little_shared_memory(NCCL_BYTES, "processes that divide a model or a batch need")


def machine_warnings(placed: Placement) -> Iterator[str]:
    """Yield a warning if the embedded engine serves on a GPU, and if /dev/shm is too small for a run's adapters.

    These then pass through the disk.
    """
    config, shape = placed.config, shape_of(placed.config.model_name)
    if config.engine.kind == "transformers" and set(placed.engine_devices) - {"cpu"}:
        is_usable, why = vllm_usable(placed.engine_devices)
        remedy = "leave out engine.kind to use vLLM" if is_usable else why
        yield f"the embedded engine serves on a GPU; expect it to be many times slower than vLLM: {remedy}"
    if placed.gpus and placed.engine_devices and placed.learner_devices and shape is not None:
        adapters = 4 * shape.lora_parameters(config.lora) * adapters_in_memory(config)
        yield from _too_little_shared_memory(adapters, "adapters, which pass through the run directory instead, need")


def _driver_problems() -> Iterator[str]:
    driver, cuda = driver_version(), cuda_of_torch()
    # CUDA's compatibility package may stand in for an older driver (data-centre GPUs only).
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    has_library = any((Path(folder) / "libcuda.so.1").exists() for folder in folders if "compat" in folder)
    if not driver or not cuda or has_library or os.environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY"):
        return
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(driver.split(".")[0]) < oldest:
        yield (
            f"the GPU driver {driver} is too old: torch here is built for CUDA {cuda}, which needs driver {oldest} or "
            "newer; update the driver, or install a torch for an older CUDA (https://pytorch.org/get-started)"
        )


def _too_little_shared_memory(needed: int, who_needs: str) -> Iterator[str]:
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    if size < needed:
        gib = -(-needed // (1 << 30))
        yield (
            f"{SHARED_MEMORY} has {size / 1e6:.0f} MB, but {who_needs} up to {needed / 1e6:.0f} MB there; start the "
            f"container with --shm-size={gib}g (Kubernetes: mount an emptyDir with medium Memory at {SHARED_MEMORY})"
        )
