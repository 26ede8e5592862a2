"""Engine and learner on one device: who gets how much of its memory, and whether that can be enough.

Computed from the model's shape where that is known, before anything is loaded; see `memory.py`. Loads no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.engines.choose import gpu_memory_bytes
from unstable_lite.engines.servers import KIND as VLLM_SERVER
from unstable_lite.learners import LEARNERS
from unstable_lite.memory import GIB, LearnerMemory, engine_memory, learner_memory, shape_of

ENGINE_SHARE = {"share": 0.5, "sleep": 0.7}
"""Of a GPU's memory, where `engine.gpu_memory_utilization` does not say."""
NOBODYS = 0.05
"""Part of a shared GPU that is given to nobody: CUDA's contexts, and what allocators cannot use."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

Devices = Sequence[int | str]


def resolve_mode(config: Config, engine_devices: Devices, learner_devices: Devices) -> str:
    """What `run.mode = "auto"` means with these devices."""
    if config.run.mode != "auto":
        return config.run.mode
    return "share" if shared(engine_devices, learner_devices) else "async"


def shared(engine_devices: Devices, learner_devices: Devices) -> list[int | str]:
    """The devices that are both engine's and learner's."""
    return [device for device in dict.fromkeys(engine_devices) if device in learner_devices]


def divide(config: Config, engine_devices: Devices, learner_devices: Devices) -> Config:
    """Return the config with the `gpu_memory_utilization` of each section whose workers share a GPU.

    The learner's may come to 0.
    """
    engine, learner, takes_turns = config.engine, config.learner, config.run.mode == "sleep"
    gpus = [device for device in shared(engine_devices, learner_devices) if isinstance(device, int)]
    num_engines = max((list(engine_devices).count(gpu) for gpu in engine_devices if isinstance(gpu, int)), default=1)
    if not gpus:
        if num_engines == 1 or engine.gpu_memory_utilization:
            return config
        part = {"gpu_memory_utilization": engine.gpu_share / num_engines}
        return config.model_copy(update={"engine": engine.model_copy(update=part)})
    ours = engine.gpu_memory_utilization or ENGINE_SHARE["sleep" if takes_turns else "share"] / num_engines
    rest = max(0.0, round(1 - NOBODYS - ours * num_engines, 4))
    theirs = learner.gpu_memory_utilization or (None if takes_turns else rest)
    return config.model_copy(
        update={
            "engine": engine.model_copy(update={"gpu_memory_utilization": ours}),
            "learner": learner.model_copy(update={"gpu_memory_utilization": theirs}),
        }
    )


def sharing_problems(config: Config, kind: str, engine_devices: Devices, learner_devices: Devices) -> Iterable[str]:
    """Why engine and learner cannot share their devices so. `kind`: of the engine, as decided."""
    mode, devices = config.run.mode, shared(engine_devices, learner_devices)
    gpus = [device for device in devices if isinstance(device, int)]
    if mode in ("share", "sleep") and not devices:
        yield (
            f"run.mode = {mode!r}: no device is both engine's ({_listed(engine_devices)}) and learner's "
            f"({_listed(learner_devices)}); name one in engine.devices and learner.devices, or leave both 'auto'"
        )
    if mode == "async" and gpus:
        yield (
            f"run.mode = 'async': GPU {_listed(gpus)} is both engine's and learner's; set run.mode = 'share' (its "
            "memory is divided), 'sleep' (they take turns), or 'auto', which here is 'share'"
        )
    if mode == "sleep" and kind == "vllm" and "cpu" in devices:
        yield (
            "run.mode = 'sleep': vLLM sleeps on GPUs only; engine.kind = 'transformers' can here, and 'share' "
            "needs no sleep"
        )
    divided = divide(config, engine_devices, learner_devices)
    for device in devices:
        yield from _too_small(divided, device, engine_devices, learner_devices)


def describe_sharing(config: Config, engine_devices: Devices, learner_devices: Devices) -> Iterator[tuple[str, str]]:
    """(what, how) of the mode and of each shared device, for a person."""
    mode, devices = resolve_mode(config, engine_devices, learner_devices), shared(engine_devices, learner_devices)
    how = {
        "async": "games are played while the learner learns, on devices of their own",
        "share": "games are played while the learner learns, on the same device",
        "sleep": "engines sleep and games wait while the learner learns; each engine is tried when it wakes",
        "sync": "a round of games to its end, then an update",
    }
    yield "mode", f"{mode}: {how[mode]}"
    config = divide(config, engine_devices, learner_devices)
    for device in devices:
        yield f"memory of {_name(device)}", "; ".join(_parts(config, device, engine_devices, learner_devices))


def _parts(config: Config, device: int | str, engine_devices: Devices, learner_devices: Devices) -> Iterator[str]:
    engine_share, learner_share = _engines_share(config, device, engine_devices), config.learner.gpu_memory_utilization
    size = f" of {room / GIB:.1f} GiB" if (room := memory_bytes(device)) else ""
    if device == "cpu":
        yield f"both take what they need{size}"
    elif config.run.mode == "sleep":
        yield f"engine {engine_share:.0%}{size} while it is awake, learner all that it finds while the engine sleeps"
    else:
        yield f"engine {engine_share:.0%}, learner {learner_share:.0%}{size}"
    needs, learner = _needs(config, device, engine_devices), _learner(config, learner_devices)
    if needs is not None and learner is not None:
        least = _resident(learner) * list(learner_devices).count(device)
        yield f"at the least {needs / GIB:.2f} GiB and {least / GIB:.2f} GiB with no micro-batch (computed)"


def _too_small(config: Config, device: int | str, engine_devices: Devices, learner_devices: Devices) -> Iterator[str]:
    """Only what cannot be enough in any case: a base that does not fit, parts that are more than the whole."""
    takes_turns, engine_share = config.run.mode == "sleep", _engines_share(config, device, engine_devices)
    learner_share = config.learner.gpu_memory_utilization or 0.0
    is_too_much = engine_share > 1 or (not takes_turns and (engine_share + learner_share > 1 or not learner_share))
    if device != "cpu" and is_too_much:
        yield (
            f"engine.gpu_memory_utilization ({engine_share:g} by all engines there) and "
            f"learner.gpu_memory_utilization ({learner_share:g}) are more than there is of {_name(device)}, or leave "
            "the learner nothing; lower the engine's"
        )
        return
    room, needs = memory_bytes(device), _needs(config, device, engine_devices)
    learner = _learner(config, learner_devices)
    if room is None or needs is None or learner is None:
        return
    ranks = list(learner_devices).count(device)
    least = _resident(learner) * ranks
    if device == "cpu":
        if needs + least > room:
            yield (
                f"engine and learner share {room / GIB:.1f} GiB of memory, and need {needs / GIB:.1f} and "
                f"{least / GIB:.1f} GiB at the least (computed); lower engine.kv_cache_gb, engine.max_loras or "
                "lora.lora_rank, or take a smaller model"
            )
        return
    learner_room = room * (1 - NOBODYS - engine_share if takes_turns else learner_share)
    for section, needed, has in (("engine", needs, room * engine_share), ("learner", least, learner_room)):
        if needed > has:
            yield (
                f"run.mode = {config.run.mode!r}: the {section}'s part of {_name(device)} is {has / GIB:.1f} GiB, and "
                f"it needs {needed / GIB:.1f} at the least (computed); change engine.gpu_memory_utilization "
                f"({engine_share:g}), take a smaller model, or two GPUs"
            )


def memory_bytes(device: int | str) -> int | None:
    """All that a device has; of the CPU, what this process may use of the machine's."""
    if isinstance(device, int):
        return gpu_memory_bytes(device)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():
            limits.append(int(limit))
    return min(limits)


def _engines_share(config: Config, device: int | str, engine_devices: Devices) -> float:
    """Of a GPU, by all engines there."""
    return config.engine.gpu_share * list(engine_devices).count(device)


def _needs(config: Config, device: int | str, engine_devices: Devices) -> int | None:
    """Of all engines on `device`, at the least; None where the model's shape is not known."""
    shape = shape_of(config.model_name)
    if shape is None or config.engine.kind in ("scripted", VLLM_SERVER):
        return None
    memory = engine_memory(shape, config.engine, config.lora)
    one = memory.base + memory.adapters + memory.kv_per_token * config.engine.max_model_len
    return one * list(engine_devices).count(device)


def _learner(config: Config, devices: Devices) -> LearnerMemory | None:
    shape, algorithm = shape_of(config.model_name), LEARNERS.get(config.algorithm)
    if shape is None:
        return None
    has_critic = algorithm is not None and algorithm.has_critic
    is_bfloat16 = config.learner.dtype != "float32"
    num_ranks = len(devices) + config.learner.remote_ranks
    return learner_memory(shape, config.learner, config.lora, is_bfloat16, has_critic, num_ranks)


def _resident(learner: LearnerMemory) -> int:
    """What a rank holds between updates."""
    return learner.base + learner.adapter


def _name(device: int | str) -> str:
    return "the CPU" if device == "cpu" else f"GPU {device}"


def _listed(devices: Devices) -> str:
    return ", ".join(map(str, devices)) or "none"
