"""Devices and memory of engines and learner: their shares, whether these can be enough, and if checkpointing is needed.

Computed from the model's shape, if that is known, before anything is loaded; see `memory.py`. Also finds the reasons
why this machine cannot run a config: engine, GPU driver, shared memory. Loads neither torch nor vLLM.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from unstable_lite.adapters.store import SHARED_MEMORY
from unstable_lite.config import Config
from unstable_lite.config.training import LearnerConfig
from unstable_lite.engines.devices import (
    choose_engine,
    cuda_of_torch,
    driver_version,
    gpu_memory_bytes,
    resolve_devices,
    vllm_usable,
)
from unstable_lite.engines.vllm_checks import SERVER_KIND as VLLM_SERVER
from unstable_lite.engines.vllm_checks import vllm_problems
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.models import model_errors, read_json, resolve_model
from unstable_lite.models.layers import check_layers
from unstable_lite.planning.defaults import adapters_in_memory, policy_configs, resolve_defaults
from unstable_lite.planning.memory import ENGINE_PASS_BYTES, GIB, engine_memory, learner_memory, shape_of

ENGINE_SHARE = {"split": 0.5, "sleep": 0.7}
"""Engines' default share of a shared GPU's memory by `engine.when_shared`."""
UNASSIGNED = 0.05
"""Share of a shared GPU that neither side gets: CUDA's contexts, and memory that allocators cannot use."""
LEARNER_CPU_SHARE = 0.25
"""Share of the machine's memory that a learner on the CPU may take by default, its base included; engines, games and
others need the rest."""
UNCOMPUTED = 0.1
"""Share of a learner's memory that stays free for CUDA's context and for errors of the computation."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SCHEDULES = {"async": "games are played while the learner learns", "sync": "a round of games, then an update"}
SHARING = {
    "split": "engine and learner compute at the same time",
    "sleep": "engines sleep while the learner learns, and each is checked when it wakes",
}

OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest GPU driver for each major version of CUDA (NVIDIA's release notes of CUDA, "minor version compatibility")."""
NCCL_BYTES = GIB
"""Shared memory of processes that divide a model or a batch, so that they can talk; Docker's default is 64 MB."""

Devices = tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of a config's workers."""

    config: Config
    engine_devices: Devices
    """Devices of all engines; for a server's engine, the server's URL; empty if no engine is started."""
    learner_devices: Devices
    """Device of each rank on this machine; empty if no learner is started."""

    @property
    def devices_by_engine(self) -> list[Devices]:
        """Devices of each engine: one, or `engine.tensor_parallel` GPUs."""
        size = self.config.engine.tensor_parallel
        return [self.engine_devices[start : start + size] for start in range(0, len(self.engine_devices), size)]

    @property
    def shared_devices(self) -> list[int | str]:
        """Devices that both an engine and the learner use."""
        return [device for device in dict.fromkeys(self.engine_devices) if device in self.learner_devices]

    @property
    def gpus(self) -> list[int]:
        """GPU of each engine and of each rank on this machine."""
        return [device for device in (*self.engine_devices, *self.learner_devices) if isinstance(device, int)]

    @property
    def num_ranks(self) -> int:
        """Number of the learner's ranks on all machines."""
        return len(self.learner_devices) + self.config.learner.remote_ranks

    def divided_for(self, devices: Sequence[int | str]) -> Config:
        """Return the config of the worker on these devices, with `gpu_memory_utilization` set if it shares a GPU.

        An engine apart from the learner shares its GPU only with other engines. The learner's share may be 0.
        """
        engine, learner = self.config.engine, self.config.learner
        is_apart = set(devices).isdisjoint(self.learner_devices)
        gpus = [gpu for gpu in self.engine_devices if isinstance(gpu, int) and (gpu in devices or not is_apart)]
        is_shared = not is_apart and not set(gpus).isdisjoint(self.learner_devices)
        num_engines = max(map(gpus.count, gpus), default=1)
        if not is_shared and num_engines == 1:
            return self.config
        default = ENGINE_SHARE[engine.when_shared] if is_shared else engine.gpu_share
        ours, theirs = engine.gpu_memory_utilization or default / num_engines, learner.gpu_memory_utilization
        if is_shared and engine.when_shared == "split":
            theirs = theirs or max(0.0, round(1 - UNASSIGNED - ours * num_engines, 4))
        return self.config.changed(engine={"gpu_memory_utilization": ours}, learner={"gpu_memory_utilization": theirs})

    def problems(self) -> Iterator[str]:
        """Yield each reason why the workers on one device cannot share it, or have too little memory there."""
        engine, devices = self.config.engine, self.shared_devices
        if engine.when_shared == "sleep" and not devices:
            ours, theirs = (", ".join(map(str, them)) or "none" for them in (self.engine_devices, self.learner_devices))
            yield (
                f"engine.when_shared = 'sleep': engines ({ours}) and learner ({theirs}) share no device; name the same "
                "one in engine.devices and learner.devices, or leave out engine.when_shared"
            )
        if engine.when_shared == "sleep" and engine.kind == "vllm" and "cpu" in devices:
            yield (
                "engine.when_shared = 'sleep': vLLM can sleep only on GPUs; set engine.kind = 'transformers', or "
                "engine.when_shared = 'split'"
            )
        for device in dict.fromkeys((*devices, *self.gpus)):
            yield from self._too_small(device)

    def describe(self) -> Iterator[tuple[str, str]]:
        """Yield readable rows (name, description) of the schedule and of each shared device."""
        devices, schedule, when = self.shared_devices, self.config.run.schedule, self.config.engine.when_shared
        yield "schedule", f"{schedule}: {SCHEDULES[schedule]}"
        apart = [engine for engine in self.devices_by_engine if set(engine).isdisjoint(devices)]
        sharing = [engine for engine in self.devices_by_engine if engine not in apart]
        text = f"{when}: on {listed(chain(*sharing))} {SHARING[when]}"
        if apart:
            text += f"; only generation on {listed(chain(*apart))}"
        yield "shared devices", text if devices else "none: engine and learner have their own"
        for device in devices:
            yield f"memory of {listed([device])}", "; ".join(self._describe_memory(device))

    def _describe_memory(self, device: int | str) -> Iterator[str]:
        of_engines, of_learner = self._shares(self.divided_for((device,)), device)
        size = f" of {room / GIB:.1f} GiB" if (room := memory_bytes(device)) else ""
        if device == "cpu":
            yield f"both allocate as needed{size}"
        elif self.config.engine.when_shared == "sleep":
            yield f"engine {of_engines:.0%}{size} while it is awake, learner all free memory while the engine sleeps"
        else:
            yield f"engine {of_engines:.0%}, learner {of_learner:.0%}{size}"
        if (least := self._least(device)) is not None:
            engines, learner = (num_bytes / GIB for num_bytes in least)
            yield f"minimum {engines:.2f} GiB and {learner:.2f} GiB without a micro-batch (computed)"

    def _too_small(self, device: int | str) -> Iterator[str]:
        """Yield the problems that no batch size can avoid: a base that does not fit, or shares above the whole."""
        room, least = memory_bytes(device), self._least(device)
        if device == "cpu":
            if room is not None and least is not None and sum(least) > room:
                yield (
                    f"engine and learner share {room / GIB:.1f} GiB of memory, but need at least "
                    f"{sum(least) / GIB:.1f} (computed); lower engine.kv_cache_gb, engine.max_loras or "
                    "lora.lora_rank, or use a smaller model"
                )
            return
        engines = (engine for engine in self.devices_by_engine if device in engine)
        of_engines, of_learner = self._shares(self.divided_for((device, *chain(*engines))), device)
        takes_turns, name = self.config.engine.when_shared == "sleep", listed([device])
        is_split = device in self.shared_devices and not takes_turns
        key = f"engine.gpu_memory_utilization ({of_engines:g} for all engines there)"
        if is_split and not (of_learner > 0 and round(of_engines + of_learner, 6) <= 1):
            yield (
                f"{key} and learner.gpu_memory_utilization ({of_learner:g}) exceed the memory of {name}, or leave no "
                "part of it to the learner; lower engine.gpu_memory_utilization"
            )
        elif of_engines > 1:
            yield f"{key} exceeds the memory of {name}; lower it"
        elif room is not None and least is not None:
            if takes_turns or not of_learner:
                of_learner = 1 - UNASSIGNED - of_engines
            more_for_learner = "lower engine" if of_engines > 0 and least[1] > 0 else "raise learner"
            sides = (("engine", of_engines, "raise engine"), ("learner", of_learner, more_for_learner))
            for needed, (section, share, remedy) in zip(least, sides, strict=True):
                if needed > room * share:
                    yield (
                        f"the {section}'s share of {name} is {room * share / GIB:.1f} GiB, but it needs at least "
                        f"{needed / GIB:.1f} (computed); {remedy}.gpu_memory_utilization, or use a smaller model or "
                        "more GPUs"
                    )

    def _shares(self, divided: Config, device: int | str) -> tuple[float, float]:
        """Return the shares of a GPU's memory of all engines there together and of the learner; 0 if not limited."""
        of_engines = divided.engine.gpu_share * self.engine_devices.count(device)
        return of_engines, divided.learner.gpu_memory_utilization or 0.0

    def _least(self, device: int | str) -> tuple[int, int] | None:
        """Return the least memory of all engines and of all ranks on a device; None if it cannot be computed."""
        config, shape = self.config, shape_of(self.config.model_name)
        is_offloaded = any("offload" in name for name in config.engine.options)
        if shape is None or is_offloaded or config.engine.kind not in ("auto", "vllm", "transformers"):
            return None
        engine = engine_memory(shape, config.engine, config.lora)
        learner = learner_memory(shape, config, is_on_gpu=device != "cpu")
        return (
            (engine.base + engine.adapters + engine.kv_per_token * config.engine.max_model_len)
            * self.engine_devices.count(device),
            (learner.base + learner.adapter) * self.learner_devices.count(device),
        )

    def decide_checkpointing(self) -> tuple[LearnerConfig, str]:
        """Return section `learner` with `activation_checkpointing` decided, and the reason.

        "auto" is off if a micro-batch fits the learner's memory without it, or half of one, because two micro-batches
        cost less than a repeated forward pass. It is on if the memory is not known.
        """
        learner, shape = self.config.learner, shape_of(self.config.model_name)
        if learner.activation_checkpointing != "auto" or not self.learner_devices:
            return learner, "set in the config"
        is_on = learner.changed(activation_checkpointing=True)
        room = self._learner_room()
        if shape is None or room is None:
            return is_on, "the model's shape or the memory of the learner's device is not known"
        is_off = learner.changed(activation_checkpointing=False)
        tokens, longest = self._largest_micro_batch()
        memory = learner_memory(shape, self.config.changed(learner=is_off), "cpu" not in self.learner_devices, longest)
        if memory.total(tokens) > room:
            tokens = max(longest, tokens // 2)
            is_off = is_off.changed(max_tokens_per_micro_batch=tokens)
        reason = (
            f"without it a micro-batch of {tokens:,} tokens needs {memory.total(tokens) / GIB:.1f} of the learner's "
            f"{room / GIB:.1f} GiB (computed)"
        )
        return is_off if memory.total(tokens) <= room else is_on, reason

    def _largest_micro_batch(self) -> tuple[int, int]:
        """Return the most tokens of a micro-batch, and of a sequence."""
        learner, longest = self.config.learner, self.config.engine.max_model_len
        longest = min(longest, learner.max_train_len or longest)
        rows, policies = learner.mini_batch_size or sys.maxsize, policy_configs(self.config).values()
        # Episodes come as a whole, with more steps than `batch_size`.
        if all(own.buffer.kind == "steps" for own in policies):
            rows = min(rows, max(own.learner.batch_size for own in policies))
        return max(longest, min(learner.max_tokens_per_micro_batch, rows * longest)), longest

    def _learner_room(self) -> float | None:
        """Return the bytes that each rank may take on its device; None if they are not known.

        An engine that sleeps keeps its context and CUDA graphs.
        """
        config, rooms = self.divided_for(self.learner_devices), []
        for device in self.learner_devices:
            if (room := memory_bytes(device)) is None:
                return None
            share = LEARNER_CPU_SHARE if device == "cpu" else config.learner.gpu_memory_utilization or 1.0
            asleep = ENGINE_PASS_BYTES * (config.engine.when_shared == "sleep" and device in self.engine_devices)
            rooms.append((1 - UNCOMPUTED) * share * (room - asleep) / self.learner_devices.count(device))
        return min(rooms)


def place(config: Config, has_engines: bool = True, has_learner: bool = True) -> Placement:
    """Return the devices of engines and learner, with the config's open settings decided.

    Raises ConfigError for devices that this machine does not have.
    """
    config = resolve_defaults(config)
    engine, of_learner = config.engine, config.learner.devices if has_learner else ("cpu",)
    if engine.kind == VLLM_SERVER:
        devices: Devices = engine.urls
        _, learner_devices = resolve_devices(("cpu",), of_learner)
    else:
        devices, learner_devices = resolve_devices(engine.devices, of_learner)
        if engine.devices == "auto" and (left_over := len(devices) % engine.tensor_parallel):
            devices = devices[:-left_over] or devices
    return Placement(
        config=config,
        engine_devices=devices if has_engines else (),
        learner_devices=learner_devices if has_learner else (),
    )


def memory_bytes(device: int | str) -> int | None:
    """Return the memory of a device; for the CPU, the part of the machine's memory that this process may use."""
    if isinstance(device, int):
        return gpu_memory_bytes(device)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():
            limits.append(int(limit))
    return min(limits)


def listed(devices: Iterable[int | str]) -> str:
    """Return a readable list of devices, each once: `GPU 0 and GPU 1`."""
    names = {"cpu": "the CPU"}
    shown = [f"GPU {device}" if isinstance(device, int) else names.get(device, device) for device in devices]
    return " and ".join(dict.fromkeys(shown))


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
        gib = -(-needed // GIB)
        yield (
            f"{SHARED_MEMORY} has {size / 1e6:.0f} MB, but {who_needs} up to {needed / 1e6:.0f} MB there; start the "
            f"container with --shm-size={gib}g (Kubernetes: mount an emptyDir with medium Memory at {SHARED_MEMORY})"
        )
