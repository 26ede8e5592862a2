"""The parts of a run: make them and connect them. The only module that knows every part's constructor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.files import read_records
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_pool import EnvPool, opened_env_pool
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.thinking_budget import thinking_budget
from unstable_lite.games.templates import Template, format_prompt, templates_for
from unstable_lite.league.branch_points import BranchPoints
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import add_other_opponents
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.orchestrator.canary_checks import CanaryChecks
from unstable_lite.orchestrator.checkpoint import Checkpoint
from unstable_lite.orchestrator.checkpoint_pool import CheckpointPool
from unstable_lite.orchestrator.colocation import Colocation
from unstable_lite.orchestrator.custom_parts import made_part
from unstable_lite.orchestrator.exact_evaluations import ExactEvaluations
from unstable_lite.orchestrator.frozen_players import FrozenPlayer, keep_frozen
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.orchestrator.watchdog import LoopWatchdog
from unstable_lite.orchestrator.workers import Workers, started_workers
from unstable_lite.planning.adapter_slots import active_checkpoints, adapters_in_memory
from unstable_lite.planning.plan import Plan
from unstable_lite.planning.staleness import in_flight
from unstable_lite.reward_transformations import GROUP_BASELINES, build_reward_transformations
from unstable_lite.rng import derive_seed
from unstable_lite.rollout.collector import Collector
from unstable_lite.rollout.episode_buffer import EpisodeBuffer
from unstable_lite.rollout.lockstep import LockStep
from unstable_lite.rollout.newest_adapter import leased_newest
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.tracking.jsonl import JsonlSink
from unstable_lite.tracking.run_directory import to_toml
from unstable_lite.tracking.tensorboard import TensorBoardSink
from unstable_lite.tracking.tracker import RichSink, Sink, Tracker
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.processes import WorkerProcess

CANARY_PROMPTS = 8
"""Number of prompts of the canary, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Every part of a run."""

    plan: Plan
    directory: Path
    workers: Workers
    supervisors: tuple[Supervisor, ...]
    environments: EnvPool
    store: AdapterStore
    table: AdapterTable
    scheduler: GameScheduler
    registry: ModelRegistry
    frozen: tuple[FrozenPlayer, ...]
    """Frozen players whose adapters are loaded at the start."""
    buffer: StepBuffer | EpisodeBuffer
    collector: Collector
    adapter_sync: AdapterSync
    colocation: Colocation
    exact: ExactEvaluations
    pool: CheckpointPool
    tracker: Tracker
    health: TrainingHealth
    terminal: TerminalInterface
    watchdog: LoopWatchdog
    resume_from: Checkpoint | None
    alarm: Callable[[str], None]
    """Reports an alarm of the current update."""
    stop: asyncio.Event
    """Event that asks the run to finish the current update, save, and end."""


@contextlib.asynccontextmanager
async def wired_parts(
    plan: Plan,
    directory: Path,
    *,
    terminal: TerminalInterface,
    stop: asyncio.Event,
    checkpoint: Checkpoint | None = None,
    scheduler: GameScheduler | None = None,
    buffer: StepBuffer | EpisodeBuffer | None = None,
    make_tracker: Callable[..., Tracker] = Tracker,
    make_collector: Callable[..., Collector] = Collector,
) -> AsyncIterator[RunParts]:
    """Yield the parts of a run with its workers up; on exit no process, file or shared memory of it is left open.

    `checkpoint`: of the run that resumes. `scheduler`, `buffer`: made from the config if not given.
    """
    config, say, log_path = plan.config, terminal.say, directory / "logs" / "orchestrator.log"
    scheduler, buffer = scheduler or _scheduler(config), buffer or make_buffer(config)
    registry = scheduler.registry
    add_other_opponents(config, registry)
    frozen = await asyncio.to_thread(keep_frozen, plan, registry, directory, say)
    buffer.in_flight = in_flight(config, plan.game_lengths, len(frozen))
    async with contextlib.AsyncExitStack() as stack:
        tracker = stack.enter_context(contextlib.closing(_tracker(make_tracker, config, directory, checkpoint, say)))
        tracker.registry = registry

        def alarm(text: str) -> None:
            tracker.alarm(registry.get(registry.get_current_ckpt()).iteration or 0, text)

        # Closed after the workers: a learner that still writes needs its directory.
        stores = stack.enter_context(contextlib.ExitStack())
        watchdog = stack.enter_context(LoopWatchdog(config.run.loop_stall_s, log_path, alarm))
        with terminal.doing(lambda: "starting the workers"):
            environments = await stack.enter_async_context(opened_env_pool(log_path.parent, config.run.env_timeout_s))
            workers = await stack.enter_async_context(
                started_workers(plan, log_path.parent, say, is_restart=checkpoint is not None)
            )
        needed = workers.adapter_bytes * adapters_in_memory(config, len(frozen))
        store = AdapterStore(directory.name, fallback=directory, bytes_needed=needed, alarm=alarm)
        stores.callback(store.close)
        if store.remark is not None:
            say(store.remark)
        is_in_turns = config.run.schedule == "sync"
        lock_step = LockStep(workers.engines.generate) if is_in_turns else None
        generate = lock_step.generate if lock_step is not None else workers.engines.generate
        sampling_seed = derive_seed(config.run.seed, "sampling") if is_in_turns else None
        templates, thinking = templates_for(config, workers.prompts), thinking_budget(config.engine, workers.info)
        table = AdapterTable(config.engine.max_loras)
        newest = partial(leased_newest, registry, table) if config.league.adapter_policy == "turn" else None
        seats = await stack.enter_async_context(
            PlayerFactory(generate, templates, config.opponents, say, sampling_seed, newest, thinking)
        )
        prompts, tolerance = _canary_prompts(config, templates), config.learner.canary_tolerance
        canaries = CanaryChecks(workers.engines, workers.learner, table, prompts, tolerance, alarm)
        adapter_sync = AdapterSync(workers.engines, store, table, canaries)
        health = TrainingHealth(config, directory, buffer, tracker, say, stop)
        collector = made_part(
            "collector",
            make_collector,
            scheduler=scheduler,
            buffer=buffer,
            seats=seats,
            table=table,
            config=config.run,
            listeners=(tracker, health),
            lock_step=lock_step,
            environments=environments,
            unpaused=health.unpaused,
        )
        colocation = _colocation(plan, workers, adapter_sync, collector)
        pool = CheckpointPool(
            config.league,
            active_checkpoints(config, len(frozen)),
            registry,
            table,
            store,
            adapter_sync,
            directory / "adapters",
            alarm,
        )
        yield RunParts(
            plan=plan,
            directory=directory,
            workers=workers,
            supervisors=_supervisors(config, workers, adapter_sync, colocation, alarm),
            environments=environments,
            store=store,
            table=table,
            scheduler=scheduler,
            registry=registry,
            frozen=frozen,
            buffer=buffer,
            collector=collector,
            adapter_sync=adapter_sync,
            colocation=colocation,
            exact=ExactEvaluations(config, templates, workers.learner, colocation, alarm),
            pool=pool,
            tracker=tracker,
            health=health,
            terminal=terminal,
            watchdog=watchdog,
            resume_from=checkpoint,
            alarm=alarm,
            stop=stop,
        )


def make_buffer(config: Config) -> StepBuffer | EpisodeBuffer:
    """Return the buffer that a resolved config asks for."""
    final, step, sampling = build_reward_transformations(config.rewards)
    common: dict[str, Any] = {
        "final_reward_transformation": final,
        "step_reward_transformation": step,
        "sampling_reward_transformation": sampling,
        "max_staleness": config.buffer.max_staleness,
        "rng": _stream(config, "buffer"),
        "batch_delay": config.buffer.batch_delay_buffer,
        "filter_opponent_invalid": config.run.filter_opponent_invalid,
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


def _scheduler(config: Config) -> GameScheduler:
    registry = ModelRegistry(beta=config.league.trueskill_beta)
    model_sampler = build_model_sampler(config, registry, _stream(config, "opponents"))
    run, shares_by = config.run, config.league.shares_by
    branches = BranchPoints(config.branching, run.group_size, run.seed) if config.branching.share else None
    return GameScheduler(
        model_sampler, build_env_sampler(config), run.seed, run.group_size, shares_by, config.plays_duplicates, branches
    )


def _stream(config: Config, purpose: str) -> random.Random:
    """Return a private random stream for one of the orchestrator's own choices."""
    return random.Random(derive_seed(config.run.seed, purpose))


def _tracker(
    make: Callable[..., Tracker],
    config: Config,
    directory: Path,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
) -> Tracker:
    sinks = _sinks(config, directory, checkpoint.state["updates"] if checkpoint is not None else None)
    tracker = made_part("tracker", make, run_directory=directory, sinks=sinks, config=config.tracker, say=say)
    if checkpoint is not None:
        evaluations = list(read_records(directory / "eval.jsonl"))
        with checkpoint.understood():
            tracker.resume(checkpoint.state["tracker"], evaluations)
    return tracker


def _sinks(config: Config, directory: Path, resumed_after: int | None) -> list[Sink]:
    tensorboard = TensorBoardSink(directory / "tensorboard")
    if resumed_after is None:
        tensorboard.lay_out(config)
    rich: list[RichSink] = [tensorboard]
    raw = config.model_dump(mode="json")
    if config.tracker.wandb_project:
        from unstable_lite.tracking.wandb import WandbSink

        rich.append(WandbSink(config.tracker.wandb_project, directory, raw))
    texts = {"run/config": to_toml(raw), "run/versions": json.dumps(versions(), indent=2)}
    for sink in rich:
        sink.log_texts(resumed_after or 0, texts)
    return [JsonlSink(directory / "metrics.jsonl"), *rich]


def _colocation(plan: Plan, workers: Workers, adapter_sync: AdapterSync, collector: Collector) -> Colocation:
    engines = list(zip(workers.engines.engines, plan.devices_by_engine, strict=True))
    sharing = [engine for engine, devices in engines if not set(devices).isdisjoint(plan.shared_devices)]
    sleepers = sharing if plan.config.engine.when_shared == "sleep" else []
    others = [engine for engine, _ in engines if engine not in sleepers]
    return Colocation(sleepers, adapter_sync.restore, others, learning=collector.runner.clock_stopped)


def _supervisors(
    config: Config, workers: Workers, adapter_sync: AdapterSync, colocation: Colocation, alarm: Callable[[str], None]
) -> tuple[Supervisor, ...]:
    engines = {engine.channel.name: engine for engine in workers.engines.engines}

    def supervisor(process: WorkerProcess) -> Supervisor:
        engine = engines.get(process.channel.name)
        if engine is None:
            start_s, stall_s = config.learner.start_timeout_s, config.learner.update_timeout_s
            return Supervisor(process, config.run, start_s, stall_s, workers.learner.restore, alarm)
        is_sleeper = engine in colocation.engines
        return Supervisor(
            process,
            config.run,
            config.engine.start_timeout_s,
            config.engine.stall_timeout_s,
            restore=partial((colocation if is_sleeper else adapter_sync).restore, engine),
            alarm=alarm,
            starting=colocation.starting if is_sleeper else contextlib.nullcontext,
            is_dispensable=lambda: any(other is not engine for other in workers.engines.up),
        )

    return tuple(map(supervisor, workers.processes))


def _canary_prompts(config: Config, templates: Mapping[str, Template]) -> list[str]:
    """Return the first prompts of up to CANARY_PROMPTS different games, of all envs in turn.

    An env whose reset is slow, or that needs its own process, gives one prompt.
    """
    prompts: dict[str, None] = {}
    for seed in range(CANARY_PROMPTS):
        for spec in config.train_envs:
            if len(prompts) == CANARY_PROMPTS:
                break
            if seed and is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated, spec.env_kwargs):
                continue
            _, observation = environment_of(spec, seed).observe()
            prompts[format_prompt(spec.prompt_template, observation, spec.num_players, templates)] = None
    return list(prompts)
