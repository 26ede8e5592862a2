"""Engines that are killed, or stuck, with hundreds of games in flight. Real processes; the scripted engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from unstable_lite.buffers import StepBuffer
from unstable_lite.collector import Collector
from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import WorkerDied
from unstable_lite.games.seats import Seats
from unstable_lite.games.templates import templates_for
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import MirrorModelSampler, UniformRandomEnvSampler
from unstable_lite.plan import make_plan
from unstable_lite.supervision import Supervisor
from unstable_lite.transport.adapters import AdapterArena
from unstable_lite.types import GameRecord
from unstable_lite.workers import EngineWorkers, started_engines

ENV = {"env_id": "TicTacToe-v0-train", "num_players": 2, "prompt_template": "tiny"}


class Fleet:
    """Engines under supervision, and a collector that plays on them."""

    def __init__(self, config: Config, workers: EngineWorkers, tmp_path: Path) -> None:
        self.workers = workers
        self.alarms: list[str] = []
        self.records: list[GameRecord] = []
        self.arena = AdapterArena("fleet", tmp_path, bytes_needed=1 << 60)
        self.arena.retain(0)
        registry = ModelRegistry()
        sampler = MirrorModelSampler(registry, random.Random(0))
        self.scheduler = GameScheduler(sampler, UniformRandomEnvSampler(config.train_envs, config.eval_envs), 0)
        seats = Seats(workers.engines.generate, templates_for(config, workers.prompts))
        self.collector = Collector(
            self.scheduler, StepBuffer(10_000), seats, self.arena, config.run, self.records.append
        )
        self.supervisors = [
            Supervisor(
                process,
                config.run,
                config.engine.start_timeout_s,
                config.engine.stall_timeout_s,
                restore=lambda engine=engine: self._restore(engine),  # type: ignore[misc]
                alarm=self.alarms.append,
            )
            for process, engine in zip(workers.processes, workers.engines.engines, strict=True)
        ]

    async def _restore(self, engine: EngineClient) -> None:
        self.workers.engines.take_back(engine)

    async def evaluate(self, num_games: int) -> list[GameRecord]:
        spec, model = self.scheduler._env_sampler.eval_env_specs[0], self.scheduler.registry.current
        return await self.collector.evaluate(spec, model, num_games, "test", concurrency=300)


@pytest.fixture
async def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    options: dict[str, Any] = getattr(request, "param", {})
    config = Config.model_validate(
        {
            "run": {"max_restarts": 20, "restart_backoff_s": 0.0, "output_dir": tmp_path, **options.get("run", {})},
            "engine": {
                "kind": "scripted",
                "devices": ["cpu"] * options.get("engines", 1),
                "replies": [f"\\boxed{{[{cell}]}}" for cell in range(9)],
                **options.get("engine", {}),
            },
            "train_envs": [{**ENV, "num_actors": 2}],
            "eval_envs": [{**ENV, "fixed_opponent": "scripted:random"}],
        }
    )
    async with started_engines(make_plan(config), tmp_path, lambda text: None) as workers:
        made = Fleet(config, workers, tmp_path)
        yield made
        made.arena.close()


@pytest.mark.parametrize("fleet", [{"engines": 1}, {"engines": 2}], indirect=True)
async def test_ten_kills_at_random_moments_lose_no_game_and_double_none(fleet: Fleet) -> None:
    chance, quotas = random.Random(1), 0
    killed: set[int] = set()

    def num_told() -> int:
        return sum("is started again" in text for text in fleet.alarms)

    async def kill() -> None:
        while len(killed) < 10:
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            process = chance.choice(fleet.workers.processes)
            is_there = not process.peer.is_dead and psutil.pid_exists(process.pid) and process.pid not in killed
            if process.peer.num_pending and is_there:
                os.kill(process.pid, signal.SIGKILL)
                killed.add(process.pid)

    async with asyncio.TaskGroup() as tasks:
        supervised = [tasks.create_task(supervisor.run()) for supervisor in fleet.supervisors]
        killing = tasks.create_task(kill())
        while not killing.done():
            records = await fleet.evaluate(400)
            quotas += 1
            assert len(records) == 400
            assert all(record.end in ("natural", "invalid") for record in records)
        while num_told() < 10:  # the last one may have answered all that it owed
            await asyncio.sleep(0.05)
        for task in supervised:
            task.cancel()
    assert fleet.workers.engines.resent > 0
    indices = [record.spec.game_idx for record in fleet.records]
    assert sorted(indices) == list(range(400 * quotas))
    assert num_told() == len(killed) == 10


@pytest.mark.parametrize("fleet", [{"engine": {"stall_timeout_s": 1.0}}], indirect=True)
async def test_an_engine_that_says_nothing_any_more_is_killed_and_its_games_go_on(fleet: Fleet) -> None:
    (process,) = fleet.workers.processes
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(fleet.supervisors[0].run())
        os.kill(process.pid, signal.SIGSTOP)
        assert len(await fleet.evaluate(50)) == 50
        supervised.cancel()
    assert "is waited for and has said nothing" in fleet.alarms[0]
    assert fleet.supervisors[0].restarts == 1


@pytest.mark.parametrize("fleet", [{"engine": {"stall_timeout_s": 0.5}}], indirect=True)
async def test_an_engine_is_not_blamed_for_the_silence_of_an_orchestrator_that_stood_still(fleet: Fleet) -> None:
    (engine,) = fleet.workers.engines.engines
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(fleet.supervisors[0].run())
        for _ in range(3):
            asked = asyncio.ensure_future(engine.generate("p", 0))
            await asyncio.sleep(0)
            assert engine.peer.num_pending == 1
            time.sleep(1.2)
            await asked
        supervised.cancel()
    assert fleet.alarms == []
    assert fleet.supervisors[0].restarts == 0


@pytest.mark.parametrize("fleet", [{"run": {"max_restarts": 2}}], indirect=True)
async def test_past_the_budget_of_restarts_the_end_is_clear(fleet: Fleet) -> None:
    (process,) = fleet.workers.processes

    async def kill_for_ever() -> None:
        while True:
            await asyncio.sleep(0.05)
            if not process.peer.is_dead and psutil.pid_exists(process.pid):
                os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.supervisors[0].run())
            tasks.create_task(kill_for_ever())
            await fleet.evaluate(10**6)
    death = caught.value.subgroup(WorkerDied)
    assert death is not None
    assert "engine-0 was killed by SIGKILL" in str(death.exceptions[0])
    assert "3 deaths within the hour; run.max_restarts = 2" in str(death.exceptions[0])


@pytest.mark.parametrize("fleet", [{"engine": {"kind": "stuck_engines:Slow"}}], indirect=True)
async def test_a_slow_step_is_told_in_the_workers_log(fleet: Fleet) -> None:
    await fleet.workers.engines.generate("p", 0)
    assert "a step took 5.1 s" in fleet.workers.processes[0].log_path.read_text()


@pytest.mark.parametrize("fleet", [{"engine": {"kind": "stuck_engines:Loops", "stall_timeout_s": 2.0}}], indirect=True)
async def test_a_stuck_worker_leaves_its_stacks_in_its_log(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    (process,) = fleet.workers.processes
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(fleet.supervisors[0].run())
        playing = tasks.create_task(fleet.evaluate(5))
        while not fleet.supervisors[0].restarts:
            await asyncio.sleep(0.05)
        playing.cancel()
        supervised.cancel()
    assert "in a_loop_without_end" in process.log_path.read_text()
    assert "engine-0 was killed by SIGKILL" in caplog.text
    assert "memory ran out" not in caplog.text, "it was us"
