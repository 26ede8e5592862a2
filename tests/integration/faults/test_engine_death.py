"""Kill or stall engines while hundreds of games are in flight: real processes, the scripted engine."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes.game_records import Records
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config import Config
from unstable_lite.engines.base import ENGINE_STALL_S
from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import WorkerDied
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import templates_for
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import MirrorModelSampler, UniformRandomEnvSampler
from unstable_lite.orchestrator import supervisor
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.orchestrator.workers import Workers, started_engines
from unstable_lite.planning.plan import make_plan
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.rollout.collector import Collector
from unstable_lite.types import GameRecord

ENV = {"env_id": "TicTacToe-v0-train", "num_players": 2, "prompt_template": "tiny"}


class Fleet:
    """Supervised engines and a collector that plays on them."""

    def __init__(self, config: Config, workers: Workers, tmp_path: Path, stall_s: float = ENGINE_STALL_S) -> None:
        self.workers = workers
        self.alarms: list[str] = []
        self.records = Records()
        registry = ModelRegistry()
        sampler = MirrorModelSampler(registry, random.Random(0))
        self.scheduler = GameScheduler(sampler, UniformRandomEnvSampler(config.train_envs, config.eval_envs), 0)
        seats = PlayerFactory(workers.engines.generate, templates_for(config, workers.prompts))
        self.collector = Collector(
            self.scheduler, StepBuffer(10_000), seats, AdapterTable(4), config.run, [self.records]
        )
        self.supervisors = [
            Supervisor(
                process,
                config.run,
                config.engine.start_timeout_s,
                stall_s,
                restore=lambda engine=engine: self._restore(engine),  # type: ignore[misc]
                alarm=self.alarms.append,
            )
            for process, engine in zip(workers.processes, workers.engines.engines, strict=True)
        ]

    async def _restore(self, engine: EngineClient) -> None:
        self.workers.engines.mark_ready(engine)

    async def evaluate(self, num_games: int, concurrency: int = 300) -> list[GameRecord]:
        spec, model = self.scheduler._env_sampler.eval_env_specs[0], self.scheduler.registry.current
        return await self.collector.evaluate(spec, model, num_games, "test", concurrency=concurrency)


@pytest.fixture
async def fleet(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.0)
    options: dict[str, Any] = getattr(request, "param", {})
    async with started_fleet(tmp_path, **options) as made:
        yield made


@contextlib.asynccontextmanager
async def started_fleet(tmp_path: Path, **options: Any) -> AsyncIterator[Fleet]:
    config = Config.model_validate(
        {
            "run": {"max_restarts": 20, "output_dir": tmp_path, **options.get("run", {})},
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
        made = Fleet(config, workers, tmp_path, options.get("stall_s", ENGINE_STALL_S))
        yield made


@pytest.mark.parametrize(
    "fleet", [{"engines": 1}, pytest.param({"engines": 2}, marks=pytest.mark.nightly)], indirect=True
)
async def test_random_kills_lose_and_duplicate_no_game(fleet: Fleet) -> None:
    chance, quotas = random.Random(1), 0
    killed: set[int] = set()
    most = 5 * len(fleet.supervisors)

    def num_reported() -> int:
        return sum(" of 20" in text for text in fleet.alarms)

    async def kill() -> None:
        while len(killed) < most:
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            process = chance.choice(fleet.workers.processes)
            is_there = not process.channel.is_dead and psutil.pid_exists(process.pid) and process.pid not in killed
            if process.channel.num_pending and is_there:
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
        while num_reported() < most:  # the last killed engine may have had no request left to answer
            await asyncio.sleep(0.05)
        for task in supervised:
            task.cancel()
    assert fleet.workers.engines.resent > 0
    indices = [record.spec.game_idx for record in fleet.records]
    assert sorted(indices) == list(range(400 * quotas))
    assert num_reported() == len(killed) == most


@pytest.mark.parametrize("fleet", [{"stall_s": 4.0}], indirect=True)
async def test_silent_engine_is_killed_and_its_games_continue(fleet: Fleet) -> None:
    (process,) = fleet.workers.processes
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(fleet.supervisors[0].run())
        os.kill(process.pid, signal.SIGSTOP)
        assert len(await fleet.evaluate(50)) == 50
        supervised.cancel()
    assert "engine-0" in fleet.alarms[0]
    assert fleet.supervisors[0].restarts == 1


@pytest.mark.nightly
@pytest.mark.parametrize("fleet", [{"stall_s": 0.5}], indirect=True)
async def test_engine_is_not_blamed_for_a_blocked_orchestrator(fleet: Fleet) -> None:
    (engine,) = fleet.workers.engines.engines
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(fleet.supervisors[0].run())
        for _ in range(3):
            asked = asyncio.ensure_future(engine.generate("p", 0))
            await asyncio.sleep(0)
            assert engine.channel.num_pending == 1
            time.sleep(1.2)
            await asked
        supervised.cancel()
    assert fleet.alarms == []
    assert fleet.supervisors[0].restarts == 0


@pytest.mark.parametrize(
    ("fleet", "restarts", "reason"),
    [
        (
            {"engine": {"kind": "fakes.stuck_engines:Raises"}},
            1,
            r"AttributeError: .*\(stuck_engines.py, line \d+, in step",
        ),
        (
            {"engine": {"kind": "fakes.stuck_engines:RunsOutOfMemory"}, "run": {"max_restarts": 2}},
            2,
            r"MemoryError(.|\n)*\(3 deaths within .*run\.max_restarts = 2",
        ),
    ],
    indirect=["fleet"],
)
async def test_own_code_that_fails_again_ends_the_run_and_memory_does_not(
    fleet: Fleet, restarts: int, reason: str
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fleet.supervisors[0].run())
            await fleet.evaluate(5)
    death = caught.value.subgroup(WorkerDied)
    assert re.search(f"engine-0: {reason}", str(death.exceptions[0])), death.exceptions
    assert fleet.supervisors[0].restarts == len(fleet.alarms) == restarts


@pytest.mark.nightly
@pytest.mark.parametrize("fleet", [{"engine": {"kind": "fakes.stuck_engines:Slow"}}], indirect=True)
async def test_slow_step_is_logged_by_worker(fleet: Fleet) -> None:
    await fleet.workers.engines.generate("p", 0)
    assert "a step took 5.1 s" in fleet.workers.processes[0].log_path.read_text()


@pytest.mark.parametrize("fleet", [{"engine": {"kind": "fakes.stuck_engines:Loops"}, "stall_s": 1.0}], indirect=True)
async def test_stuck_worker_logs_its_stacks(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    (process,) = fleet.workers.processes
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(fleet.supervisors[0].run())
        playing = tasks.create_task(fleet.evaluate(5))
        while not fleet.supervisors[0].restarts:
            await asyncio.sleep(0.05)
        playing.cancel()
        supervised.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)  # the restarted one loops too
    assert "in endless_loop" in process.log_path.read_text()
    assert "engine-0 was killed by SIGKILL" in caplog.text
    assert "memory ran out" not in caplog.text, "the supervisor killed it"
