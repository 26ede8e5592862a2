"""The choice of an engine for each request: real engine processes, stopped during the choice."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.worker_processes import opened_router, worker_process
from unstable_lite.config import Config
from unstable_lite.engines.client import CHARS_PER_TOKEN, EngineClient, EnginePool
from unstable_lite.errors import WorkerDied
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.rpc import SWEEP_EVERY_S

MAX_NEW = 10
CONFIG = Config.model_validate(
    {
        "engine": {"kind": "scripted", "replies": ["yes"], "max_generation_len": MAX_NEW, "max_model_len": 8192},
        "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
    }
)


@dataclass
class Engines:
    processes: list[WorkerProcess]
    pool: EnginePool

    def signal(self, signum: signal.Signals) -> None:
        for process in self.processes:
            os.kill(process.pid, signum)

    @property
    def pending(self) -> list[int]:
        return [engine.channel.num_pending for engine in self.pool.engines]

    @property
    def outstanding(self) -> list[int]:
        return [engine.outstanding_tokens for engine in self.pool.engines]


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    with opened_router() as router:
        clients = [EngineClient(router, f"engine-{index}", CONFIG.engine) for index in range(3)]
        module, log_path = "unstable_lite.engines.worker", tmp_path / "log"
        processes = [worker_process(client.channel, router.endpoint, CONFIG, module, log_path) for client in clients]
        await asyncio.gather(*(process.start() for process in processes))
        try:
            await asyncio.gather(*(process.ready(60) for process in processes))
            yield Engines(processes, EnginePool(clients))
        finally:
            await asyncio.gather(*(process.stop(grace_s=1) for process in processes))


async def test_request_goes_to_the_engine_with_fewest_outstanding_tokens(engines: Engines) -> None:
    engines.signal(signal.SIGSTOP)
    long, short = "x" * 100 * CHARS_PER_TOKEN, "x" * 5 * CHARS_PER_TOKEN
    asked = []
    seen = []
    for prompt in (long, short, short, short, long, short):
        asked.append(asyncio.create_task(engines.pool.generate(prompt, 0)))
        await asyncio.sleep(0)
        seen.append(engines.outstanding)
    assert seen == [
        [110, 0, 0],  # the first one on a tie
        [110, 15, 0],
        [110, 15, 15],
        [110, 30, 15],
        [110, 30, 125],
        [110, 45, 125],
    ]
    assert engines.pending == [1, 3, 2], "a count of requests would treat long and short ones alike"
    engines.signal(signal.SIGCONT)
    assert {generation.text for generation in await asyncio.gather(*asked)} == {"yes"}
    assert engines.outstanding == [0, 0, 0]

    # A dead engine and a cancelled game release their tokens.
    engines.signal(signal.SIGSTOP)
    asked = [asyncio.create_task(engines.pool.generate("p", 0)) for _ in range(6)]
    await asyncio.sleep(0)
    assert engines.outstanding == [2 * MAX_NEW] * 3
    asked.pop().cancel()
    os.kill(engines.processes[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await engines.processes[0].watch()
    await asyncio.sleep(0.05)
    assert engines.outstanding == [0, 3 * MAX_NEW, 2 * MAX_NEW], "the dead engine's two requests are sent to the others"
    await asyncio.sleep(2 * SWEEP_EVERY_S)
    assert engines.pending == [0, 3, 2]
    for process in engines.processes[1:]:
        os.kill(process.pid, signal.SIGCONT)
    assert len(await asyncio.gather(*asked)) == 5
    assert engines.outstanding == [0, 0, 0]
