"""Devices and memory of engine and learner: their shares, whether these can be enough, and if checkpointing is needed.

Computed from the model's shape, if that is known, before anything is loaded; see `memory.py`. Does not load torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.config.training import LearnerConfig
from unstable_lite.engines.devices import gpu_memory_bytes, resolve_devices
from unstable_lite.engines.vllm_server.config_checks import KIND as VLLM_SERVER
from unstable_lite.planning.algorithm_defaults import algorithm_of
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

Devices = Sequence[int | str]


def shared(engine_devices: Devices, learner_devices: Devices) -> list[int | str]:
    """Return the devices that both an engine and the learner use."""
    return [device for device in dict.fromkeys(engine_devices) if device in learner_devices]


def by_engine(config: Config, engine_devices: Devices) -> list[tuple[int | str, ...]]:
    """Return the devices of each engine: one, or `engine.tensor_parallel` GPUs."""
    size = config.engine.tensor_parallel
    return [tuple(engine_devices[start : start + size]) for start in range(0, len(engine_devices), size)]


def divide(config: Config, engine_devices: Devices, learner_devices: Devices) -> Config:
    """Return the config with `gpu_memory_utilization` set in each section whose workers share a GPU with others.

    The learner's share may be 0.
    """
    engine, learner = config.engine, config.learner
    is_shared = any(isinstance(device, int) for device in shared(engine_devices, learner_devices))
    num_engines = max((list(engine_devices).count(gpu) for gpu in engine_devices if isinstance(gpu, int)), default=1)
    if not is_shared and num_engines == 1:
        return config
    default = ENGINE_SHARE[engine.when_shared] if is_shared else engine.gpu_share
    ours, theirs = engine.gpu_memory_utilization or default / num_engines, learner.gpu_memory_utilization
    if is_shared and engine.when_shared == "split":
        theirs = theirs or max(0.0, round(1 - UNASSIGNED - ours * num_engines, 4))
    return config.model_copy(
        update={
            "engine": engine.model_copy(update={"gpu_memory_utilization": ours}),
            "learner": learner.model_copy(update={"gpu_memory_utilization": theirs}),
        }
    )


def divide_for(config: Config, worker_devices: Devices, engine_devices: Devices, learner_devices: Devices) -> Config:
    """Return the config of the worker on `worker_devices`: an engine apart from the learner has its GPU to itself."""
    is_apart = set(worker_devices).isdisjoint(learner_devices)
    own = [device for device in engine_devices if device in worker_devices] if is_apart else engine_devices
    return divide(config, own, () if is_apart else learner_devices)


def placement_problems(config: Config, engine_devices: Devices, learner_devices: Devices) -> Iterable[str]:
    """Yield each reason why the workers on one device cannot share it, or have too little memory there."""
    takes_turns, devices = config.engine.when_shared == "sleep", shared(engine_devices, learner_devices)
    if takes_turns and not devices:
        yield (
            f"engine.when_shared = 'sleep': the engines ({_listed(engine_devices)}) and the learner "
            f"({_listed(learner_devices)}) share no device; name the same one in engine.devices and learner.devices, "
            "or leave out engine.when_shared"
        )
    if takes_turns and config.engine.kind == "vllm" and "cpu" in devices:
        yield (
            "engine.when_shared = 'sleep': vLLM can sleep only on GPUs; set engine.kind = 'transformers', which can "
            "sleep here, or engine.when_shared = 'split', which needs no sleep"
        )
    gpus = [device for device in (*engine_devices, *learner_devices) if isinstance(device, int)]
    for device in dict.fromkeys((*devices, *gpus)):
        divided = divide_for(config, _of_same_engine(config, device, engine_devices), engine_devices, learner_devices)
        yield from _too_small(divided, device, engine_devices, learner_devices)


def describe_sharing(config: Config, engine_devices: Devices, learner_devices: Devices) -> Iterator[tuple[str, str]]:
    """Yield readable rows (name, description) of the schedule and of each shared device."""
    devices, schedule, when = shared(engine_devices, learner_devices), config.run.schedule, config.engine.when_shared
    schedules = {"async": "games are played while the learner learns", "sync": "a round of games, then an update"}
    yield "schedule", f"{schedule}: {schedules[schedule]}"
    uses = {
        "split": "engine and learner compute at the same time",
        "sleep": "engines sleep and games wait while the learner learns; each engine is checked when it wakes",
    }
    engines = by_engine(config, engine_devices)
    alone = [engine for engine in engines if set(engine).isdisjoint(devices)]
    if devices and alone:
        sharing = _all_of(engine for engine in engines if engine not in alone)
        always = "generates" if len(alone) == 1 else "generate"
        uses = {
            "split": f"on {sharing} engine and learner compute at the same time; {_all_of(alone)} only {always}",
            "sleep": (
                f"{sharing} take turns: the engines there sleep while the learner learns, and each is checked when it "
                f"wakes; {_all_of(alone)} always {always}"
            ),
        }
        if schedule == "sync" and when == "sleep":
            uses["sleep"] += " while a round is played, and waits while the learner learns (run.schedule = 'sync')"
    yield "shared devices", f"{when}: {uses[when]}" if devices else "none: engine and learner have their own"
    config = divide(config, engine_devices, learner_devices)
    for device in devices:
        yield f"memory of {_name(device)}", "; ".join(_parts(config, device, engine_devices, learner_devices))


def _parts(config: Config, device: int | str, engine_devices: Devices, learner_devices: Devices) -> Iterator[str]:
    engine_share, learner_share = _shares(config, device, engine_devices)
    size = f" of {room / GIB:.1f} GiB" if (room := memory_bytes(device)) else ""
    if device == "cpu":
        yield f"both allocate as needed{size}"
    elif config.engine.when_shared == "sleep":
        yield f"engine {engine_share:.0%}{size} while it is awake, learner all free memory while the engine sleeps"
    else:
        yield f"engine {engine_share:.0%}, learner {learner_share:.0%}{size}"
    if (least := _least(config, device, engine_devices, learner_devices)) is not None:
        of_engine, of_learner = least
        yield f"minimum {of_engine / GIB:.2f} GiB and {of_learner / GIB:.2f} GiB without a micro-batch (computed)"


def _too_small(config: Config, device: int | str, engine_devices: Devices, learner_devices: Devices) -> Iterator[str]:
    """Yield the problems that no batch size can avoid: a base that does not fit, or shares above the whole."""
    takes_turns = config.engine.when_shared == "sleep"
    engine_share, learner_share = _shares(config, device, engine_devices)
    is_split = device in shared(engine_devices, learner_devices) and not takes_turns
    is_divisible = not is_split or (learner_share > 0 and round(engine_share + learner_share, 6) <= 1)
    if device != "cpu" and not (engine_share <= 1 and is_divisible):
        learner = f" and learner.gpu_memory_utilization ({learner_share:g})" * is_split
        yield (
            f"engine.gpu_memory_utilization ({engine_share:g} for all engines there){learner} "
            f"exceed{'' if is_split else 's'} the memory of "
            f"{_name(device)}{' or leave the learner nothing' * is_split}; lower engine.gpu_memory_utilization"
        )
        return
    room, least = memory_bytes(device), _least(config, device, engine_devices, learner_devices)
    if room is None or least is None:
        return
    of_engine, of_learner = least
    if device == "cpu":
        if of_engine + of_learner > room:
            yield (
                f"engine and learner share {room / GIB:.1f} GiB of memory, but need at least {of_engine / GIB:.1f} and "
                f"{of_learner / GIB:.1f} GiB (computed); lower engine.kv_cache_gb, engine.max_loras or "
                "lora.lora_rank, or use a smaller model"
            )
        return
    beside_engines = 1 - UNASSIGNED - engine_share
    learner_room = room * (beside_engines if takes_turns or not learner_share else learner_share)
    remedies = {"engine": "raise engine.gpu_memory_utilization", "learner": "raise learner.gpu_memory_utilization"}
    if engine_share and of_learner:  # both are on this GPU
        remedies["learner"] = "lower engine.gpu_memory_utilization"
    for section, needed, has in (("engine", of_engine, room * engine_share), ("learner", of_learner, learner_room)):
        if needed > has:
            yield (
                f"the {section}'s share of {_name(device)} is {has / GIB:.1f} GiB, but it needs at least "
                f"{needed / GIB:.1f} (computed); {remedies[section]}, or use a smaller model or more GPUs"
            )


def decide_checkpointing(config: Config, engine_devices: Devices, learner_devices: Devices) -> tuple[Config, str]:
    """Return the config with `learner.activation_checkpointing` decided, and the reason.

    "auto" is off if a micro-batch fits the learner's memory without it, or half of one, because two micro-batches cost
    less than a repeated forward pass. It is on if the memory is not known, and for a sharded base, because running out
    of memory then ends the run.
    """
    learner, shape = config.learner, shape_of(config.model_name)
    if learner.activation_checkpointing != "auto" or not learner_devices:
        return config, "set in the config"
    changes: dict[str, bool | int] = {"activation_checkpointing": True}
    room = _learner_room(divide(config, engine_devices, learner_devices), engine_devices, learner_devices)
    if learner.shard_base:
        reason = "the base is sharded"
    elif shape is None or room is None:
        reason = "the model's shape or the memory of the learner's device is not known"
    else:
        without = learner.model_copy(update={"activation_checkpointing": False})
        is_on_gpu, has_critic = "cpu" not in learner_devices, algorithm_of(config).has_critic
        memory = learner_memory(shape, without, config.lora, has_critic, is_on_gpu=is_on_gpu)
        whole, longest = _largest_micro_batch(config)
        half = max(longest, whole // 2)
        tokens = whole if memory.total(whole) <= room else half
        fits = memory.total(tokens) <= room
        if fits:
            changes["activation_checkpointing"] = False
        if fits and tokens < whole:
            changes["max_tokens_per_micro_batch"] = tokens
        reason = (
            f"without it a micro-batch of {tokens:,} tokens needs {memory.total(tokens) / GIB:.1f} of the learner's "
            f"{room / GIB:.1f} GiB (computed)"
        )
    return config.model_copy(update={"learner": learner.model_copy(update=changes)}), reason


def _largest_micro_batch(config: Config) -> tuple[int, int]:
    """Return the most tokens of a micro-batch, and of a sequence."""
    learner, longest = config.learner, config.engine.max_model_len
    longest = min(longest, learner.max_train_len or longest)
    rows = learner.mini_batch_size or sys.maxsize
    if config.buffer.kind == "steps":  # episodes come as a whole, with more steps than `batch_size`
        rows = min(rows, learner.batch_size)
    return max(longest, min(learner.max_tokens_per_micro_batch, rows * longest)), longest


def _learner_room(config: Config, engine_devices: Devices, learner_devices: Devices) -> float | None:
    """Return the bytes that each rank may take on its device; None if they are not known.

    An engine that sleeps keeps its context and CUDA graphs.
    """
    rooms = []
    for device in learner_devices:
        if (room := memory_bytes(device)) is None:
            return None
        share = LEARNER_CPU_SHARE if device == "cpu" else config.learner.gpu_memory_utilization or 1.0
        asleep = ENGINE_PASS_BYTES * (config.engine.when_shared == "sleep" and device in engine_devices)
        rooms.append((1 - UNCOMPUTED) * share * (room - asleep) / list(learner_devices).count(device))
    return min(rooms)


def memory_bytes(device: int | str) -> int | None:
    """Return the memory of a device; for the CPU, the part of the machine's memory that this process may use."""
    if isinstance(device, int):
        return gpu_memory_bytes(device)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, CGROUP_LIMITS):
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():
            limits.append(int(limit))
    return min(limits)


def _shares(config: Config, device: int | str, engine_devices: Devices) -> tuple[float, float]:
    """Return the shares of a GPU's memory of all engines on it together and of the learner; 0 if it has no limit."""
    engine_share = config.engine.gpu_share * list(engine_devices).count(device)
    return engine_share, config.learner.gpu_memory_utilization or 0.0


def _least(
    config: Config, device: int | str, engine_devices: Devices, learner_devices: Devices
) -> tuple[int, int] | None:
    """Return the least memory of all engines and of all ranks on a device; None if it cannot be computed."""
    shape = shape_of(config.model_name)
    is_offloaded = any("offload" in name for name in config.engine.options)
    if shape is None or is_offloaded or config.engine.kind not in ("auto", "vllm", "transformers"):
        return None
    engine = engine_memory(shape, config.engine, config.lora)
    one_engine = engine.base + engine.adapters + engine.kv_per_token * config.engine.max_model_len
    num_ranks = len(learner_devices) + config.learner.remote_ranks
    has_critic, is_on_gpu = algorithm_of(config).has_critic, device != "cpu"
    learner = learner_memory(shape, config.learner, config.lora, has_critic, num_ranks, is_on_gpu)
    return (
        one_engine * list(engine_devices).count(device),
        (learner.base + learner.adapter) * list(learner_devices).count(device),
    )


def _name(device: int | str) -> str:
    return "the CPU" if device == "cpu" else f"GPU {device}"


def _of_same_engine(config: Config, device: int | str, engine_devices: Devices) -> tuple[int | str, ...]:
    """Return the devices of the engines on a device, and the device."""
    engines = [engine for engine in by_engine(config, engine_devices) if device in engine]
    return (device, *chain.from_iterable(engines))


def _all_of(engines: Iterable[Devices]) -> str:
    """Return a readable list of the devices of these engines."""
    *others, last = map(_name, dict.fromkeys(chain.from_iterable(engines)))
    return f"{', '.join(others)} and {last}" if others else last


def _listed(devices: Devices) -> str:
    return ", ".join(map(str, devices)) or "none"


def devices_of(config: Config) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    """Return the devices of engines and learner; for a server's engine, the server's URL. Raises ConfigError."""
    engine, learner = config.engine, config.learner
    if engine.kind == VLLM_SERVER:
        return engine.urls, resolve_devices(("cpu",), learner.devices)[1]
    devices, learner_devices = resolve_devices(engine.devices, learner.devices)
    if engine.devices == "auto" and (left_over := len(devices) % engine.tensor_parallel):
        devices = devices[:-left_over] or devices
    return devices, learner_devices


def engine_devices_alone(config: Config) -> tuple[int | str, ...]:
    """Return the devices of engines without a learner. Raises ConfigError."""
    return devices_of(config.model_copy(update={"learner": LearnerConfig(devices=("cpu",))}))[0]
