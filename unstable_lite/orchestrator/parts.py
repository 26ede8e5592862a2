"""The parts of a run, wired and ready; see wiring.py, which makes them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.games.env_pool import EnvPool
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.orchestrator.checkpoint import Checkpoint
from unstable_lite.orchestrator.checkpoint_pool import CheckpointPool
from unstable_lite.orchestrator.colocation import Colocation
from unstable_lite.orchestrator.health import TrainingHealth
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.orchestrator.watchdog import LoopWatchdog
from unstable_lite.orchestrator.workers import Workers
from unstable_lite.planning.plan import Plan
from unstable_lite.rollout.collector import Collector
from unstable_lite.rollout.episode_buffer import EpisodeBuffer
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.tracking.tracker import Tracker


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
    buffer: StepBuffer | EpisodeBuffer
    collector: Collector
    adapter_sync: AdapterSync
    colocation: Colocation
    pool: CheckpointPool
    tracker: Tracker
    health: TrainingHealth
    terminal: TerminalInterface
    watchdog: LoopWatchdog
    resume_from: Checkpoint | None
    stop: asyncio.Event
    """Event that asks the run to finish the current update, save, and end."""

    @property
    def registry(self) -> ModelRegistry:
        """Every model of the league."""
        return self.scheduler.registry
