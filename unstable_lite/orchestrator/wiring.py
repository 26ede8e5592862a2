"""The parts of a run: make them and connect them. The only module that knows every part's constructor.

A script may replace some: scheduler, registry, buffer and terminal by objects; tracker and collector, which need the
run directory and the workers, by classes or functions that take the keyword arguments of `Tracker` and `Collector`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unstable_lite import plugins
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.engines.base import ENGINE_STALL_S
from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import ConfigError
from unstable_lite.files import read_records
from unstable_lite.games.env_pool import opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import thinking_budget
from unstable_lite.games.run_prompts import recorded_prompts
from unstable_lite.games.templates import Template, templates_for
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import add_other_opponents
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.learner import UPDATE_TIMEOUT_S
from unstable_lite.learner.client import restore_all
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.orchestrator.canary_checks import CanaryChecks, canary_prompts
from unstable_lite.orchestrator.checkpoint import Checkpoint
from unstable_lite.orchestrator.checkpoint_pool import CheckpointPool, TrainedPolicy, keep_frozen
from unstable_lite.orchestrator.evaluations import ExactEvaluations
from unstable_lite.orchestrator.event_loop import LoopWatchdog, stall_of
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.orchestrator.lineages import Lineages
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.orchestrator.workers import Colocation, started_workers
from unstable_lite.planning.defaults import adapters_in_memory, policy_configs, pool_sizes
from unstable_lite.planning.plan import Plan
from unstable_lite.planning.staleness import in_flight
from unstable_lite.reward_transformations import GROUP_BASELINES, build_reward_transformations
from unstable_lite.rng import derive_seed
from unstable_lite.rollout.back_pressure import Room
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.rollout.collector import Collector, LockStep, leased_newest
from unstable_lite.tracking.records import JsonlSink
from unstable_lite.tracking.result_rows import ResultRow, result_rows
from unstable_lite.tracking.run_directory import to_toml
from unstable_lite.tracking.tensorboard import TensorBoardSink
from unstable_lite.tracking.tracker import RichSink, Sink, Tracker
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.processes import WorkerProcess

T = TypeVar("T")

STATE = ("state_dict", "load_state_dict")
INTERFACES: dict[str, tuple[str, ...]] = {
    "scheduler": ("registry", "next_train_group", "next_eval_job", "update", *STATE),
    "scheduler.registry": (
        "current", "get", "get_current_ckpt", "get_all_models", "checkpoints", "fixed", "others", "lag", "add_policy",
        "add_fixed", "eval_opponent", "frozen_adapters", "set_anchor", "set_active", "bring_back", "update_ratings",
        "match_quality", "match_counts", "match_results", "touched", "touched_pairs", *STATE,
    ),
    "buffer": (
        "batches", "begin_game", "add_game", "get_batch", "has_batch", "has_steps_for", "is_full", "wait_for_room",
        "wake", "size", "contents", "refill", "counts", "added", "filtered", "dropped_stale", "dropped_lately",
        "left_lately", *STATE,
    ),
    "terminal": ("start", "stop", "say", "doing", "show_update"),
    "tracker": (
        "begin_game", "add_record", "add_evaluation", "end_evaluations", "evaluations", "add_train_data", "alarm",
        "alarms", "log", "log_update", "windows", "latest", "games_finished", "totals", "ended_early",
        "state_dict", "resume", "close",
    ),
    "collector": (
        "run", "play_round", "evaluate", "evaluating", "tell_new_checkpoint", "games_in_flight", "seats", "runner",
        *STATE,
    ),
}  # fmt: skip
"""Names that a run uses of each part that can be replaced. It also sets `buffer.in_flight` and `tracker.registry`."""
FACTORIES: dict[str, type] = {"tracker": Tracker, "collector": Collector}


class RunParts:
    """Every part of a run; most exist only within `wired`."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        terminal: TerminalInterface,
        stop: asyncio.Event,
        resume_from: Checkpoint | None,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.terminal = terminal
        self.stop = stop
        """Event that asks the run to finish the current update, save, and end."""
        self.resume_from = resume_from

    def alarm(self, text: str) -> None:
        """Report an alarm of the current update."""
        self.tracker.alarm(sum(policy.updates for policy in self.policies.values()), text)

    def results(self) -> list[ResultRow]:
        """Return the result rows so far, opponents in the order of the config."""
        return result_rows(self.tracker.evaluations, self.plan.config.eval_cells)

    @contextlib.asynccontextmanager
    async def wired(
        self,
        scheduler: GameScheduler | None,
        buffer: StepBuffer | EpisodeBuffer | None,
        make_tracker: Callable[..., Tracker],
        make_collector: Callable[..., Collector],
    ) -> AsyncIterator[None]:
        """Make the parts and bring the workers up; on exit no process, file or shared memory of the run is left open.

        `scheduler`, `buffer`: made from the config if not given.
        """
        plan, directory, say, alarm = self.plan, self.directory, self.terminal.say, self.alarm
        config, logs = plan.config, directory / "logs"
        self.scheduler = scheduler or make_scheduler(config)
        self.registry = self.scheduler.registry
        add_other_opponents(config, self.registry)
        self.frozen = await asyncio.to_thread(keep_frozen, plan, self.registry, directory, say)
        self.policies = self._policies(buffer)
        async with contextlib.AsyncExitStack() as stack:
            self.tracker = self._tracker(make_tracker)
            stack.callback(self.tracker.close)
            if self.resume_from is not None:
                resume_tracker(self.tracker, self.resume_from, directory)
            # Closed after the workers: a learner that still writes needs its directory.
            stores = stack.enter_context(contextlib.ExitStack())
            watchdog = LoopWatchdog(stall_of(config.run.env_timeout_s), logs / "orchestrator.log", alarm)
            self.watchdog = stack.enter_context(watchdog)
            with self.terminal.doing(lambda: "starting the workers"):
                self.environments = await stack.enter_async_context(opened_env_pool(logs, config.run.env_timeout_s))
                self.workers = await stack.enter_async_context(
                    started_workers(plan, logs, say, is_restart=self.resume_from is not None)
                )
            needed = self.workers.adapter_bytes * adapters_in_memory(config, len(self.frozen))
            self.store = AdapterStore(directory.name, fallback=directory, bytes_needed=needed, alarm=alarm)
            stores.callback(self.store.close)
            if self.store.remark is not None:
                say(self.store.remark)
            self.table = AdapterTable(config.engine.max_loras)
            templates = templates_for(config, recorded_prompts(config, self.workers.prompts, directory, is_own=True))
            lock_step = LockStep(self.workers.engines.generate) if config.run.schedule == "sync" else None
            seats = await stack.enter_async_context(self._seats(templates, lock_step))
            self._connect(templates, lock_step, seats, make_collector)
            yield

    def _policies(self, buffer: StepBuffer | EpisodeBuffer | None) -> dict[str, TrainedPolicy]:
        whole, policies, num_frozen, room = self.plan.config, dict[str, TrainedPolicy](), len(self.frozen), Room([])
        for number, (name, config) in enumerate(policy_configs(whole, num_frozen).items()):
            registry, own = self.registry, buffer or make_buffer(config, name, whole.shares[name])
            own.in_flight = in_flight(config, self.plan.game_lengths, num_frozen)
            if name:
                registry, own.room = registry.of(name), room
                room.buffers.append(own)
            policies[name] = TrainedPolicy(name=name, number=number, config=config, registry=registry, buffer=own)
        return policies

    def _seats(self, templates: Mapping[str, Template], lock_step: LockStep | None) -> PlayerFactory:
        config = self.plan.config
        return PlayerFactory(
            lock_step.generate if lock_step else self.workers.engines.generate,
            templates,
            config.opponents,
            self.terminal.say,
            derive_seed(config.run.seed, "sampling") if lock_step else None,
            partial(leased_newest, self.registry, self.table) if config.league.adapter_policy == "turn" else None,
            thinking_budget(config.engine, self.workers.info),
        )

    def _connect(
        self,
        templates: Mapping[str, Template],
        lock_step: LockStep | None,
        seats: PlayerFactory,
        make_collector: Callable[..., Collector],
    ) -> None:
        """Make the parts between games, engines and learner, which are up."""
        config, directory, alarm = self.plan.config, self.directory, self.alarm
        engines, learners = self.workers.engines, [*self.workers.learners.values()]
        prompts, tolerance = canary_prompts(config, templates), config.learner.canary_tolerance
        canaries = CanaryChecks(engines, learners, self.table, prompts, tolerance, alarm)
        self.adapter_sync = AdapterSync(engines, self.store, self.table, canaries)
        buffers = {name: policy.buffer for name, policy in self.policies.items()}
        self.health = TrainingHealth(config, directory, buffers, self.tracker, self.terminal.say, self.stop)
        self.lineages = Lineages(self)
        self.collector = made_part(
            "collector",
            make_collector,
            scheduler=self.scheduler,
            buffer=next(iter(buffers.values())),
            seats=seats,
            table=self.table,
            config=config.run,
            listeners=(self.tracker, self.health, self.lineages),
            lock_step=lock_step,
            environments=self.environments,
            unpaused=self.health.unpaused,
        )
        self.colocation = self._colocation()
        self.supervisors = tuple(map(self._supervisor, self.workers.processes))
        self.exact = ExactEvaluations(self, templates, lock_step)
        sizes, copies = pool_sizes(config, len(self.frozen)), directory / "adapters"
        for name, policy in self.policies.items():
            policy.learner = self.workers.learners[name]
            policy.pool = CheckpointPool(policy, sizes[name], self.table, self.store, self.adapter_sync, copies, alarm)

    def _tracker(self, make: Callable[..., Tracker]) -> Tracker:
        config, directory = self.plan.config, self.directory
        tensorboard = TensorBoardSink(directory / "tensorboard", config.eval_cells)
        if self.resume_from is None:
            tensorboard.lay_out(config)
        rich: list[RichSink] = [tensorboard]
        raw = config.model_dump(mode="json")
        if config.tracker.wandb_project:
            from unstable_lite.tracking.wandb import WandbSink

            rich.append(WandbSink(config.tracker.wandb_project, directory, raw))
        texts = {"run/config": to_toml(raw), "run/versions": json.dumps(versions(), indent=2)}
        for sink in rich:
            sink.log_texts(self.resume_from.state["updates"] if self.resume_from else 0, texts)
        sinks: list[Sink] = [JsonlSink(directory / "metrics.jsonl"), *rich]
        say = self.terminal.say
        tracker = made_part("tracker", make, run_directory=directory, sinks=sinks, config=config.tracker, say=say)
        tracker.registry = self.registry
        return tracker

    def _colocation(self) -> Colocation:
        sleepers, others = list[EngineClient](), list[EngineClient]()
        for engine, devices in zip(self.workers.engines.engines, self.plan.devices_by_engine, strict=True):
            shares = not set(devices).isdisjoint(self.plan.shared_devices)
            sleeps = shares and self.plan.config.engine.when_shared == "sleep"
            (sleepers if sleeps else others).append(engine)
        return Colocation(sleepers, self.adapter_sync.restore, others, learning=self.collector.runner.clock_stopped)

    def _supervisor(self, process: WorkerProcess) -> Supervisor:
        config, engines = self.plan.config, self.workers.engines
        engine = next((one for one in engines.engines if one.channel.name == process.channel.name), None)
        sharing = self.colocation if engine in self.colocation.engines else None
        return Supervisor(
            process,
            config.run,
            config.engine.start_timeout_s,
            ENGINE_STALL_S if engine else UPDATE_TIMEOUT_S,
            restore=partial((sharing or self.adapter_sync).restore, engine)
            if engine
            else partial(restore_all, [*self.workers.learners.values()]),
            alarm=self.alarm,
            starting=(lambda: sharing.device) if sharing else contextlib.nullcontext,
            is_dispensable=lambda: engine is not None and any(other is not engine for other in engines.up),
        )


def resume_tracker(tracker: Tracker, checkpoint: Checkpoint, directory: Path) -> None:
    """Restore a tracker's state, and the evaluations that the run recorded."""
    evaluations = list(read_records(directory / "eval.jsonl"))
    with checkpoint.understood():
        tracker.resume(checkpoint.state["tracker"], evaluations)


def make_buffer(config: Config, policy: str = "", share: float = 1.0) -> StepBuffer | EpisodeBuffer:
    """Return the buffer that the resolved config of a policy asks for, which makes a share of the updates."""
    final, step, sampling = build_reward_transformations(config.rewards)
    common: dict[str, Any] = {
        "final_reward_transformation": final,
        "step_reward_transformation": step,
        "sampling_reward_transformation": sampling,
        "max_staleness": config.buffer.max_staleness,
        "rng": _stream(config, "buffer"),
        "batch_delay": config.buffer.batch_delay_buffer,
        "filter_opponent_invalid": config.run.filter_opponent_invalid,
        "reject_zero_signal": config.rewards.reject_zero_signal,
        "policy": policy,
        "share": share,
    }
    if config.buffer.kind == "episodes":
        return EpisodeBuffer(config.buffer_size, **common)
    return StepBuffer(
        config.buffer_size,
        **common,
        group_size=config.run.group_size,
        group_baseline=GROUP_BASELINES.get(config.group_baseline or ""),
        is_duplicate=config.plays_duplicates,
    )


def make_scheduler(config: Config) -> GameScheduler:
    """Return the scheduler that a resolved config asks for, with a registry of its own."""
    of_policies = policy_configs(config)
    registry = ModelRegistry(policy=next(iter(of_policies)))
    model_sampler, *others = (
        build_model_sampler(of_policy, registry.of(name), _stream(of_policy, "opponents"))
        for name, of_policy in of_policies.items()
    )
    run, shares_by = config.run, config.league.shares_by
    env_sampler, rotates = build_env_sampler(config), config.plays_duplicates
    return GameScheduler(model_sampler, env_sampler, run.seed, run.group_size, shares_by, rotates, others)


def _stream(config: Config, purpose: str) -> random.Random:
    """Return a private random stream for one of the orchestrator's own choices."""
    return random.Random(derive_seed(config.run.seed, purpose))


def check_parts(config: Config, factories: dict[str, Callable[..., Any]], parts: dict[str, Any]) -> None:
    """Raise ConfigError with every reason why a run cannot use these parts; parts that are None are not given.

    factories: `tracker` and `collector`.
    """
    problems = [problem for name, made in factories.items() for problem in _factory_problems(name, made)]
    given = {name: part for name, part in parts.items() if part is not None}
    if hasattr(parts["scheduler"], "registry"):
        given["scheduler.registry"] = parts["scheduler"].registry
    for name, part in given.items():
        if isinstance(part, type):
            problems.append(f"{name}: {part.__name__} is a class; give an object of it")
        else:
            problems += plugins.interface_problems(name, part, INTERFACES[name])
        if config.policies and name in ("scheduler", "buffer"):
            problems.append(f"{name}: a run with [policies] makes one for each policy itself; leave it out")
    log_update = getattr(factories["tracker"], "log_update", None)
    if config.policies and log_update and "policy" not in inspect.signature(log_update).parameters:
        problems.append("tracker: in a run with [policies], log_update needs a parameter `policy`")
    batches = getattr(parts["buffer"], "batches", config.buffer.kind)
    if batches != config.buffer.kind:
        name = type(parts["buffer"]).__name__
        problems.append(f"buffer: {config.algorithm} learns from {config.buffer.kind}, not from a {name} of {batches}")
    if problems:
        raise ConfigError(*problems)


def _factory_problems(name: str, factory: Any) -> Iterator[str]:
    standard = FACTORIES[name]
    if not callable(factory):
        yield (
            f"{name}: an object of type {type(factory).__name__} cannot be called; give a class or a function, because "
            f"the run makes the {name} itself, once it has the arguments"
        )
        return
    try:  # with objects instead of the values, which are not known yet
        plugins.check_keywords(
            name, _name(factory), factory, dict.fromkeys(inspect.signature(standard).parameters, object())
        )
    except ConfigError as error:
        yield from error.problems
    if isinstance(factory, type):
        methods = [method for method in INTERFACES[name] if hasattr(standard, method)]
        yield from plugins.interface_problems(name, factory, methods)


def made_part(name: str, factory: Callable[..., T], **arguments: Any) -> T:
    """Return the tracker or collector. Raises ConfigError if it lacks a part of the interface."""
    part = plugins.call(name, _name(factory), factory, arguments)
    if problems := plugins.interface_problems(name, part, INTERFACES[name]):
        raise ConfigError(*problems)
    return part


def _name(factory: Any) -> str:
    return getattr(factory, "__name__", None) or type(factory).__name__
