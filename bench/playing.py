"""The whole orchestrator playing without a learner: batches are taken from the buffer and thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import AdapterTable, Origin
from unstable_lite.config import Config
from unstable_lite.engines.client import EnginePool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.reward_transformations import build_reward_transformations
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.rollout.collector import Collector
from unstable_lite.tracking.records import JsonlSink
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord, GameSpec

MANY = 1000
"""Number of turns whose tokens are counted."""


@dataclass(slots=True, kw_only=True)
class Playing:
    pool: EnginePool
    turns: int = 0
    """Turns of finished games."""
    games: int = 0
    void: int = 0
    tokens_of_first_turns: list[int] = field(default_factory=list)

    def begin_game(self, spec: GameSpec) -> None:
        pass

    def add_record(self, record: GameRecord) -> None:
        self.turns += len(record.turns)
        self.games += 1
        self.void += record.end == "void"
        if len(self.tokens_of_first_turns) < MANY:
            self.tokens_of_first_turns += [
                len(turn.generation.completion_ids) for turn in record.turns if turn.generation
            ]

    @property
    def tokens_a_turn(self) -> float:
        """Mean over the first finished games. Turns follow from it and the engine's tokens, which come steadily."""
        return sum(self.tokens_of_first_turns) / len(self.tokens_of_first_turns)


@contextlib.asynccontextmanager
async def playing(config: Config, pool: EnginePool, num_games: int, adapters: int = 0) -> AsyncIterator[Playing]:
    """Keep `num_games` games in flight until the end of the block.

    adapters: number of checkpoints in the league, besides the base.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        store = AdapterStore(f"bench-{directory.name}", directory, bytes_needed=0)
        table = AdapterTable(max(adapters, 1))
        tracker = Tracker(directory, [JsonlSink(directory / "metrics.jsonl")], config.tracker)
        registry = ModelRegistry()
        for version in range(1, adapters + 1):
            # An adapter without weights, which scripted engines load, is a checkpoint.
            store.path(version).mkdir()
            (store.path(version) / "adapter_config.json").write_text("{}")
            table.add(version, Origin("update", str(version)), digest="")
            table.load(version)
            await pool.load_adapter(version, store.path(version))
            table.check(version)
            table.offer(version)
            registry.add_policy(f"ckpt-{version}", adapter_version=version, iteration=version)
        opponents = build_model_sampler(config, registry, random.Random(config.run.seed))
        scheduler = GameScheduler(opponents, build_env_sampler(config), config.run.seed)
        transforms = build_reward_transformations(config.rewards)
        buffer = StepBuffer(config.buffer_size, *transforms, config.buffer.max_staleness, config.run.seed)
        played = Playing(pool=pool)

        async def take_batches() -> None:
            while True:
                await buffer.get_batch(config.learner.batch_size, registry.current.adapter_version or 0)

        async def report() -> None:
            while True:
                await asyncio.sleep(1.0)
                tracker.log_update(0, {})

        players = PlayerFactory(pool.generate)
        collector = Collector(scheduler, buffer, players, table, config.run, (played, tracker))
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(collector.run(num_games, 0)),
                    tasks.create_task(take_batches()),
                    tasks.create_task(report()),
                ]
                yield played
                for task in background:
                    task.cancel()
        finally:
            tracker.close()
            store.close()
