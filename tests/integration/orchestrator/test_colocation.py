"""Turns on a device that engine and learner share. Real engine processes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import RequestError, WorkerDied
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.orchestrator.workers import Colocation, Workers, started_engines
from unstable_lite.planning.plan import make_plan
from unstable_lite.transport.rpc import WorkerState


@dataclass
class Shared:
    workers: Workers
    turns: Colocation
    supervisors: list[Supervisor]

    @property
    def pool(self) -> EnginePool:
        """Pool of two engines, of which the first shares the learner's device."""
        return self.workers.engines

    @property
    def engine(self) -> EngineClient:
        return self.pool.engines[0]

    def kill(self) -> None:
        os.kill(self.workers.processes[0].pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _restarts_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstable_lite.orchestrator.supervisor.BACKOFF_S", 0.0)


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    config = Config.model_validate(
        {
            "run": {"output_dir": tmp_path},
            "engine": {"kind": "scripted", "when_shared": "sleep", "devices": ["cpu", "cpu"]},
            "learner": {"devices": ["cpu"]},
            "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )
    async with started_engines(make_plan(config), tmp_path, lambda text: None) as workers:

        async def restore(engine: EngineClient) -> None:
            assert not engine.is_up  # no game uses it before its check
            workers.engines.mark_ready(engine)

        turns = Colocation(workers.engines.engines[:1], restore)
        supervisors = [
            Supervisor(
                process,
                config.run,
                60.0,
                60.0,
                restore=lambda engine=engine: turns.restore(engine),  # type: ignore[misc]
                alarm=lambda text: None,
                starting=lambda: turns.device,
            )
            for process, engine in zip(workers.processes[:1], turns.engines, strict=True)
        ]
        yield Shared(workers, turns, supervisors)


async def test_requests_to_a_sleeping_engine_wait_and_other_engines_serve(shared: Shared) -> None:
    playing = [asyncio.create_task(shared.pool.generate(f"game {number}", 0)) for number in range(20)]
    async with shared.turns.learner():
        directly = asyncio.create_task(shared.engine.generate("hello", 0))
        loading = asyncio.create_task(shared.engine.load_adapter(1, Path("/nowhere")))
        await asyncio.gather(*playing)
        before = shared.pool.generated_tokens
        for number in range(20):
            await asyncio.wait_for(shared.pool.generate(f"game {number}", 0), 10)
        assert shared.pool.generated_tokens > before
        done, _ = await asyncio.wait({directly, loading}, timeout=0.3)
        assert not done
        assert shared.engine.channel.num_pending == 0
        assert [engine.channel.state for engine in shared.pool.engines] == [WorkerState.ASLEEP, WorkerState.READY]
    assert shared.engine.channel.state is WorkerState.READY
    assert (await directly).adapter_version == 0
    with pytest.raises(RequestError, match="adapter_config"):
        await loading
    async with Colocation([], shared.turns.restore).learner():  # no engine shares the device
        assert (await shared.engine.generate("hello", 0)).adapter_version == 0


async def test_dead_engine_restarts_only_after_the_learner_turn(shared: Shared) -> None:
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(shared.supervisors[0].run())
        async with shared.turns.learner():
            shared.kill()
            while not shared.engine.channel.is_dead:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            assert shared.engine.channel.life == 0
        while not shared.engine.is_up:
            await asyncio.sleep(0.02)
        assert shared.engine.channel.life == 1
        assert (await shared.engine.generate("hello", 0)).adapter_version == 0
        supervised.cancel()


async def test_learner_waits_for_a_restarting_engine(shared: Shared) -> None:
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(shared.supervisors[0].run())
        shared.kill()
        while shared.engine.channel.life == 0:
            await asyncio.sleep(0.02)
        async with shared.turns.learner():
            assert not shared.engine.channel.is_dead and shared.workers.processes[0].channel.ready.done()
        assert (await shared.engine.generate("hello", 0)).adapter_version == 0
        supervised.cancel()


@pytest.mark.parametrize("is_other_up", [True, False])
async def test_clock_stops_only_if_no_engine_is_up(shared: Shared, is_other_up: bool) -> None:
    stopped: list[bool] = []

    @contextlib.contextmanager
    def clock_stopped() -> Iterator[None]:
        stopped.append(True)
        yield

    other = shared.pool.engines[1]
    if not is_other_up:
        os.kill(shared.workers.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await shared.workers.processes[1].watch()
    assert other.is_up is is_other_up
    turns = Colocation(shared.turns.engines, shared.turns.load_adapters, [other], learning=clock_stopped)
    async with turns.learner():
        assert bool(stopped) is not is_other_up
