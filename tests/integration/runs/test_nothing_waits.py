"""Games, updates, checkpoints and loads of adapters do not wait for each other: real processes, without torch."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import numpy_learner, run_files
from fakes.long_games import LONG
from unstable_lite.config import Config
from unstable_lite.config.tracking import AlarmsConfig
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.files import read_part
from unstable_lite.orchestrator.run import Run
from unstable_lite.orchestrator.train_loop import TrainLoop
from unstable_lite.planning.plan import make_plan
from unstable_lite.tracking.records import train_files
from unstable_lite.tracking.run_directory import find_damage
from unstable_lite.transport.processes import WorkerProcess

pytestmark = pytest.mark.nightly
ENV_ID = "fakes.long_games:LongGames-v0"
VERSIONS = f"collection-{ENV_ID}/Adapter Versions"


@pytest.fixture(autouse=True)
def _no_torch_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_learner.use(monkeypatch)
    monkeypatch.setattr("unstable_lite.orchestrator.supervisor.BACKOFF_S", 0.0)


def config_for(directory: Path, **sections: dict[str, Any]) -> Config:
    """Return a config of endless training on games of which some outlast many updates."""
    env = {"env_id": ENV_ID, "num_players": 2, "num_actors": 2, "prompt_template": "tiny", "observation": "first-last"}
    run = {"learning_steps": 10**6, "num_collection_workers": 32, "num_eval_workers": 0, "checkpoint_every": 1000}
    given: dict[str, Any] = {
        "run": {**run, "output_dir": directory},
        "engine": {"kind": "fakes.long_games:SlowEngine", "replies": ["\\boxed{word}"]},
        "learner": {"batch_size": 16, "threads": 1},
        "algorithm": "fakes.slow_learners:TakesASecond",
        "alarms": {name: {"action": "off"} for name in AlarmsConfig.model_fields},
        "lora": {"lora_rank": 1},
        "train_envs": [env],
    }
    changed = {name: given.get(name, {}) | section for name, section in sections.items()}
    return Config.model_validate(given | changed)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.001)


class Training:
    def __init__(self, config: Config) -> None:
        self._run = Run(make_plan(config), terminal=TerminalInterface(quiet=True))
        self._task = asyncio.create_task(self._run.execute())

    async def begin(self, limits_games: bool) -> TrainLoop:
        """Start. limits_games: whether back-pressure limits the games in flight."""
        await until(lambda: self._run.training is not None or self._task.done())
        if self._task.done():
            await self._task
        loop = self._run.training
        assert loop is not None
        if not limits_games:
            loop.parts.policies[""].buffer.in_flight = None
        return loop

    async def end(self) -> Path:
        self._run.stop()
        summary = await self._task
        loop = self._run.training
        assert not any(adapter.leases for adapter in loop.parts.table.adapters.values())
        return summary.directory


def worker_of(loop: TrainLoop, name: str) -> WorkerProcess:
    return next(process for process in loop.parts.workers.processes if process.channel.name == name)


async def test_games_continue_during_updates_and_updates_during_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {"kind": "scripted", "max_loras": 10**6}  # games are faster than the learner: slots must not limit them
    buffer = {"buffer_size": 10**6, "max_staleness": 10**6}
    training = Training(config_for(tmp_path, engine=fast, buffer=buffer, run={"checkpoint_every": 1}))
    loop = await training.begin(limits_games=True)
    disk_is_ready, sync = threading.Event(), os.fsync

    def sync_when_the_disk_is_ready(descriptor: int) -> None:
        assert disk_is_ready.wait(200)
        sync(descriptor)

    await until(lambda: loop.progress.updates > 1)
    learner = worker_of(loop, "learner")
    os.kill(learner.pid, signal.SIGSTOP)
    await until(lambda: learner.channel.num_pending)
    updates, games = loop.progress.updates, loop.parts.tracker.games_finished
    await until(lambda: loop.parts.tracker.games_finished > games + 200)
    assert loop.progress.updates == updates
    assert learner.channel.num_pending
    os.kill(learner.pid, signal.SIGCONT)

    monkeypatch.setattr(os, "fsync", sync_when_the_disk_is_ready)
    try:
        begun = loop.progress.updates
        await until(lambda: loop.progress.updates >= begun + 2)
        saving, before = loop.saver.in_background, loop.saver.newest
        await until(lambda: loop.progress.updates >= begun + 5)
        assert loop.saver.in_background is saving
        assert not saving.done()
        assert loop.saver.newest == before
        arena = loop.parts.store.directory
        assert len(list(arena.glob("learner-*"))) <= 3, "the newest version, the next one, and the one in work"
    finally:
        disk_is_ready.set()
    await until(lambda: loop.saver.newest != before)
    directory = await training.end()
    checkpoints = sorted((directory / "checkpoints").glob("ckpt-*"), key=lambda path: int(path.name[5:]))
    assert all(find_damage(path) is None for path in checkpoints)
    assert checkpoints[-1].name == f"ckpt-{loop.progress.updates}"
    assert len(checkpoints) < loop.progress.updates, "some had no checkpoint because one was being written"


async def test_games_that_keep_their_adapter_make_the_learner_wait_for_a_slot(tmp_path: Path) -> None:
    config = config_for(tmp_path, league={"adapter_policy": "game"}, engine={"max_loras": 3})
    training = Training(config.changed(algorithm="reinforce"))  # learns at once: long games begin with each adapter
    loop = await training.begin(limits_games=False)
    await until(lambda: loop.parts.adapter_sync.num_waits and loop.parts.tracker.latest.get(VERSIONS))
    assert loop.parts.tracker.latest[VERSIONS] == 1
    directory = await training.end()
    assert not any("adapter_versions" in game for game in run_files.games(directory))


async def test_turns_that_use_the_newest_adapter_need_only_two_slots(tmp_path: Path) -> None:
    training = Training(config_for(tmp_path, league={"adapter_policy": "turn"}, engine={"max_loras": 2}))
    loop = await training.begin(limits_games=False)
    await until(lambda: loop.parts.tracker.latest.get(VERSIONS, 1) > 1)
    assert loop.parts.adapter_sync.num_waits == 0
    await until(lambda: loop.progress.updates > 8)
    updates, version = loop.progress.updates, loop.parts.policies[""].version
    os.kill(worker_of(loop, "engine-0").pid, signal.SIGKILL)  # turns now wait for its replacement
    await until(lambda: loop.progress.updates >= updates + 12)  # enough to train on games with many versions
    directory = await training.end()

    games = [game for game in run_files.games(directory) if "adapter_versions" in game]
    assert all(game["adapter_versions"] == sorted(game["adapter_versions"]) for game in games)
    spans = [game["adapter_versions"][-1] - game["adapter_versions"][0] for game in games if len(game["turns"]) == LONG]
    assert max(spans) > 2, "a game that kept its adapter would have taken a third slot"
    rows = [row for path in train_files(directory).values() for row in read_part(path)]
    assert max(row["staleness"] for row in rows) <= 8 < version
    by_game: dict[int, set[int]] = {}
    for row in rows:
        by_game.setdefault(row["step_info"]["game_idx"], set()).add(row["adapter_version"])
    assert max(map(len, by_game.values())) > 2, "steps of one game were trained on with their own versions"


async def test_engine_that_slept_wakes_with_the_adapters_of_waiting_turns(tmp_path: Path) -> None:
    engine = {"when_shared": "sleep", "devices": ["cpu"], "max_loras": 2}
    shared = {"league": {"adapter_policy": "turn"}, "engine": engine, "learner": {"devices": ["cpu"]}}
    training = Training(config_for(tmp_path, **shared))
    loop = await training.begin(limits_games=True)
    await until(lambda: loop.progress.updates >= 4 and loop.parts.tracker.latest.get(VERSIONS, 1) > 1)
    assert loop.parts.tracker.latest["inference/asleep_s"] > 0
    assert loop.parts.adapter_sync.num_waits == 0
    assert loop.parts.tracker.void_games == 0
    await training.end()
