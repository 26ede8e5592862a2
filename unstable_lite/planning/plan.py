"""Plan of a run, made before any process starts: its devices and memory, or every reason why the config cannot run.

Loads neither torch nor transformers; makes and resets each env once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from unstable_lite.adapters.frozen import copies_of
from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, against
from unstable_lite.config.reading import read_config
from unstable_lite.engines.vllm_server.config_checks import KIND as VLLM_SERVER
from unstable_lite.engines.vllm_server.config_checks import delivery
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_catalogue import REMARKS, env_family, is_isolated
from unstable_lite.games.trial_games import trial_lengths
from unstable_lite.league.opponents import frozen_adapters, training_opponents
from unstable_lite.models import resolve_model
from unstable_lite.planning.adapter_slots import active_checkpoints, adapter_slots_needed, adapters_in_memory
from unstable_lite.planning.algorithm_defaults import describe_rewards, resolve_defaults
from unstable_lite.planning.engine_choice import engine_of, engine_warnings
from unstable_lite.planning.exact import describe_exact
from unstable_lite.planning.groups import describe_branching
from unstable_lite.planning.lengths import thinking_warnings
from unstable_lite.planning.machine import machine_problems, machine_warnings
from unstable_lite.planning.memory import shape_of
from unstable_lite.planning.placement import (
    by_engine,
    decide_checkpointing,
    describe_sharing,
    devices_of,
    divide,
    divide_for,
    engine_devices_alone,
    shared,
)
from unstable_lite.planning.questions import describe_questions
from unstable_lite.planning.staleness import describe as describe_pace
from unstable_lite.planning.validation import critic_warnings, find_engine_problems, find_problems, played_otherwise

MIB = 1 << 20

ENGINE_THREADS_ON_GPU = 1
"""Number of CPU threads above which vLLM warns that threads wait for each other in its host code."""
LEARNER_THREADS_ON_GPU = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A config that can run, with the decisions about it."""

    config: Config
    """Config in which `engine.kind`, checkpointing and all settings that depend on the algorithm are decided."""
    engine_reason: str
    checkpointing_reason: str
    engine_devices: tuple[int | str, ...]
    learner_devices: tuple[int | str, ...]
    """Device of each rank on this machine; empty if no learner is started."""
    engine_threads: int
    learner_threads: int
    game_lengths: dict[str, list[int]] = field(default_factory=dict)
    """Turns of some games of random moves, by training env; empty if no random player knows the moves."""
    copies: Path | None = None
    """Directory of the copies of frozen players that the config stands for, if it is the config of a run."""

    @property
    def devices_by_engine(self) -> list[tuple[int | str, ...]]:
        """Devices of each engine: one, or `engine.tensor_parallel` GPUs."""
        return by_engine(self.config, self.engine_devices)

    @property
    def shared_devices(self) -> list[int | str]:
        """Devices that both an engine and the learner use."""
        return shared(self.engine_devices, self.learner_devices)

    @property
    def divided(self) -> Config:
        """Config with the shares of a GPU that engine and learner share."""
        return divide(self.config, self.engine_devices, self.learner_devices)

    def divided_for(self, devices: Sequence[int | str]) -> Config:
        """Return the config that the worker on these devices receives, with its share of a shared GPU."""
        return divide_for(self.config, devices, self.engine_devices, self.learner_devices)

    @property
    def num_ranks(self) -> int:
        """Number of the learner's ranks on all machines."""
        return len(self.learner_devices) + self.config.learner.remote_ranks

    @property
    def num_eval_workers(self) -> int:
        """Number of evaluation games in flight beside training."""
        return self.config.run.num_eval_workers if self.config.eval_envs else 0

    def opponents(self) -> str:
        """Return a readable description of the players at the seats that the current policy does not take."""
        league = self.config.league
        if all(spec.num_actors == spec.num_players for spec in self.config.train_envs):
            ignored = league.opponent_sampling_strategy != "none"
            remark = f" (so opponent_sampling_strategy = {league.opponent_sampling_strategy} is not used)" * ignored
            return f"none: num_actors = num_players, every seat is the current policy's{remark}"
        fixed = {env_id: ", ".join(names) or "none" for env_id, names in training_opponents(self.config).items()}
        if len(set(fixed.values())) == 1:
            return f"{league.opponent_sampling_strategy}, fixed ones: {next(iter(fixed.values()))}"
        by_env = "".join(f"; fixed ones in {env_id}: {names}" for env_id, names in fixed.items())
        return f"{league.opponent_sampling_strategy}{by_env}"

    def describe(self) -> list[tuple[str, str]]:
        """Return readable rows (name, description) of the run's processes, memory, games and batches."""
        sharing = describe_sharing(self.config, self.engine_devices, self.learner_devices)
        return [*self._describe_workers(), *sharing, *self._describe_models(), *self._describe_games()]

    def _describe_workers(self) -> Iterator[tuple[str, str]]:
        config = self.config
        for index, devices in enumerate(self.devices_by_engine):
            places = " and ".join(_device(device, self.engine_threads) for device in devices)
            yield f"engine-{index}", f"{config.engine.kind} on {places}"
        yield "engine choice", self.engine_reason
        for text in engine_warnings(config.engine.kind, self.engine_devices):
            yield "warning", text
        for text in (
            *machine_warnings(config, self.engine_devices, self.learner_devices),
            *thinking_warnings(config),
        ):
            yield "warning", text
        for rank, device in enumerate(self.learner_devices):
            place = _device(device, self.learner_threads)
            yield (f"learner-{rank}", place) if rank else ("learner", f"{config.algorithm} on {place}")
        if self.learner_devices:
            is_on = config.learner.activation_checkpointing
            yield "checkpointing", f"{'on' if is_on else 'off'}: {self.checkpointing_reason}"
        if remote := config.learner.remote_ranks:
            join = f"torchrun … -m unstable_lite.learner.remote_rank {config.learner.rendezvous}"
            yield "remote ranks", f"{remote} more ranks of the learner: {join}"
        if self.num_ranks > 1:
            base = ", and of the frozen base" * config.learner.shard_base
            yield "learner ranks", f"{self.num_ranks}: each has a part of every batch, split by tokens{base}"

    def _describe_models(self) -> Iterator[tuple[str, str]]:
        config = self.config
        is_here = Path(resolve_model(config.model_name)).is_dir()
        unseen = " (from the Hugging Face hub or its cache, which nothing but the run looks at)"
        yield "base model", config.model_name + unseen * (not is_here)
        for difference in played_otherwise(config):
            yield "differs", difference
        yield "opponents", self.opponents()
        if (active := active_checkpoints(config)) > 1:
            least, most = config.league.opponent_lag
            by = f"by {config.league.active_checkpoints_by}, {least} to {most} updates back"
            yield "older checkpoints", f"at most {active - 1} as opponents, {by}"
        if frozen := frozen_adapters(config):
            yield "frozen players", f"{', '.join(frozen)}: in one adapter slot each for the whole run"
        yield "adapter slots", f"{config.engine.max_loras} per worker; at least {adapter_slots_needed(config)} needed"
        shape = shape_of(config.model_name)
        if shape is not None and (size := 4 * shape.lora_parameters(config.lora)):
            total = size * adapters_in_memory(config)
            yield "adapters", f"{size / MIB:.1f} MiB per adapter, up to {total / MIB:.0f} MiB in shared memory"
        memory = f"up to {config.engine.kv_cache_gb:g} GB for the KV cache"
        if config.engine.kind == VLLM_SERVER:
            yield "adapters to the servers", delivery(config.engine)
            memory = "set by the servers"
        elif set(self.engine_devices) != {"cpu"}:
            shares = {devices: self.divided_for(devices).engine.gpu_share for devices in self.devices_by_engine}
            memory = f"{self.divided.engine.gpu_share:.0%} of the GPU"
            if len(set(shares.values())) > 1:
                memory = ", ".join(
                    f"{share:.0%} of {' and '.join(_device(device, 1) for device in devices)}"
                    for devices, share in shares.items()
                )
        yield "engine memory", memory

    def _describe_games(self) -> Iterator[tuple[str, str]]:
        config = self.config
        yield "training games", ", ".join(spec.env_id for spec in config.train_envs)
        if config.eval_envs and config.run.eval_games:
            played = ", ".join(f"{spec.env_id}{against(spec.opponent)}" for spec in config.eval_envs)
            yield "evaluations", f"{played}; {config.run.eval_games} games each"
        games = f"{config.run.num_collection_workers} training, {self.num_eval_workers} evaluation"
        if config.run.schedule == "sync":
            games = f"complete rounds of at most {config.run.num_collection_workers}, each followed by an update"
        yield "games in flight", games
        yield from describe_pace(config, self.game_lengths)
        specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
        isolated = [
            spec.env_id
            for spec in specs
            if is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated, spec.env_kwargs)
        ]
        for family in dict.fromkeys(env_family(spec.env_id) for spec in specs):
            if family in REMARKS:
                yield "warning", f"{family}: {REMARKS[family]}"
        if isolated:
            yield "isolated", f"{', '.join(dict.fromkeys(isolated))}: in processes that can be killed"
        yield from describe_questions(config)
        yield from describe_exact(config, is_on_gpu="cpu" not in self.learner_devices)
        if config.run.group_size > 1:
            yield "groups", f"{config.run.group_size} games from each start, compared by {config.group_baseline}"
        if config.branching.share:
            yield "branching", describe_branching(config.branching)
        whole = ", whole trajectories" * (config.buffer.kind == "episodes")
        yield "buffer", f"{config.buffer_size} steps, batches of {config.learner.batch_size}{whole}"
        yield "rewards", describe_rewards(config.rewards)
        for text in critic_warnings(config):
            yield "warning", text


def load_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan a config; that of a run stands for the run's own copies of frozen players.

    Raises ConfigError with every problem at once, of form and of meaning.
    """
    copies = copies_of(path)
    return _plan_run(checked_config(path, overrides, partial(find_problems, copies=copies)), copies)


def checked_config(
    path: Path, overrides: Sequence[str] = (), find: Callable[[Config], Sequence[str]] = lambda _: ()
) -> Config:
    """Read a config. `find`: returns its problems of meaning. Raises ConfigError with every problem at once."""
    config, problems = read_config(path, tuple(overrides))
    if config is not None:
        problems += [f"{path}: {problem}" for problem in find(config)]
    if problems or config is None:
        raise ConfigError(*problems)
    return config


def make_plan(config: Config, copies: Path | None = None) -> Plan:
    """Plan a run. `copies`: directory of the copies of frozen players that the config stands for, see `Plan.copies`.

    Raises ConfigError with every problem of meaning.
    """
    if problems := find_problems(config, copies):
        raise ConfigError(*problems)
    return _plan_run(config, copies)


def make_engine_plan(config: Config) -> Plan:
    """Plan engines that have all devices to themselves. Raises ConfigError with every problem of engines and envs."""
    if problems := find_engine_problems(config):
        raise ConfigError(*problems)
    devices = engine_devices_alone(config)
    if problems := list(machine_problems(config, devices, ())):
        raise ConfigError(*problems)
    return plan_workers(config, devices, ())


def _plan_run(config: Config, copies: Path | None) -> Plan:
    plan = plan_workers(config, *devices_of(config))
    return replace(plan, copies=copies, game_lengths={spec.env_id: trial_lengths(spec) for spec in config.train_envs})


def plan_workers(config: Config, engine_devices: tuple[int | str, ...], learner_devices: tuple[int | str, ...]) -> Plan:
    """Decide engine and threads for a config without problems. Raises ConfigError if the engine cannot serve."""
    config, why_checkpointed = decide_checkpointing(resolve_defaults(config), engine_devices, learner_devices)
    kind, reason = engine_of(config, engine_devices)
    workers_on_cpu = [*engine_devices, *learner_devices].count("cpu")
    share = max(1, len(os.sched_getaffinity(0)) // max(1, workers_on_cpu))
    return Plan(
        config=config.model_copy(update={"engine": config.engine.model_copy(update={"kind": kind})}),
        engine_reason=reason,
        checkpointing_reason=why_checkpointed,
        engine_devices=engine_devices,
        learner_devices=learner_devices,
        engine_threads=config.engine.threads or (share if "cpu" in engine_devices else ENGINE_THREADS_ON_GPU),
        learner_threads=config.learner.threads or (share if "cpu" in learner_devices else LEARNER_THREADS_ON_GPU),
    )


def _device(device: int | str, threads: int) -> str:
    if isinstance(device, str) and device != "cpu":
        return device
    return f"the CPU, {threads} thread{'s' if threads > 1 else ''}" if device == "cpu" else f"GPU {device}"
