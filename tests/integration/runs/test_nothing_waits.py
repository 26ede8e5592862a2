"""Generation waits for no learner, the learner for no disk, and an engine for at most one load."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from unstable_lite.config import Config
from unstable_lite.config.tracking import AlarmsConfig
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.orchestrator.run import Run
from unstable_lite.planning.plan import make_plan
from unstable_lite.tracking.run_directory import find_damage


def config_for(directory: Path) -> Config:
    env = {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
    return Config.model_validate(
        {
            "run": {
                "learning_steps": 10**6,
                "num_collection_workers": 8,
                "eval_games": 0,
                "num_eval_workers": 0,
                "checkpoint_every": 1,
                "output_dir": directory,
            },
            "engine": {
                "kind": "scripted",
                "replies": [f"\\boxed{{[{cell}]}}" for cell in range(9)],
                "max_loras": 10**4,  # scripted games are faster than the learner, so slots must not limit them
            },
            # A scripted engine's log-probabilities are invented: no learner would agree with them.
            "learner": {"batch_size": 8, "canary_tolerance": 1e9, "threads": 1},
            "alarms": {name: {"action": "off"} for name in AlarmsConfig.model_fields},
            "buffer": {"buffer_size": 10**6, "max_staleness": 10**6},
            "lora": {"lora_rank": 4},
            "train_envs": [env],
        }
    )


async def until(condition: Callable[[], object], timeout_s: float = 100) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.nightly
async def test_games_continue_during_updates_and_updates_during_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make_plan(config_for(tmp_path)), terminal=TerminalInterface(quiet=True))
    disk_is_ready, sync = threading.Event(), os.fsync

    def sync_when_the_disk_is_ready(descriptor: int) -> None:
        assert disk_is_ready.wait(200)
        sync(descriptor)

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.execute())
        await until(lambda: run.training is not None and run.training.progress.updates > 1)
        training = run.training
        learner = next(process for process in training.parts.workers.processes if process.channel.name == "learner")

        os.kill(learner.pid, signal.SIGSTOP)
        await until(lambda: learner.channel.num_pending)
        updates, games = training.progress.updates, training.parts.tracker.games_finished
        await until(lambda: training.parts.tracker.games_finished > games + 200)
        assert training.progress.updates == updates
        assert learner.channel.num_pending
        os.kill(learner.pid, signal.SIGCONT)

        monkeypatch.setattr(os, "fsync", sync_when_the_disk_is_ready)
        try:
            begun = training.progress.updates
            await until(lambda: training.progress.updates >= begun + 2)
            saving, before = training.saver.in_background, training.saver.newest
            await until(lambda: training.progress.updates >= begun + 5)
            assert training.saver.in_background is saving
            assert not saving.done()
            assert training.saver.newest == before
            arena = training.parts.store.directory
            assert len(list(arena.glob("learner-*"))) <= 3, "the newest version, the next one, and the one in work"
        finally:
            disk_is_ready.set()
        await until(lambda: training.saver.newest != before)
        run.stop()
        summary = await running
    checkpoints = sorted((summary.directory / "checkpoints").glob("ckpt-*"), key=lambda path: int(path.name[5:]))
    assert all(find_damage(path) is None for path in checkpoints)
    assert checkpoints[-1].name == f"ckpt-{summary.updates}"
    assert len(checkpoints) < summary.updates, "some updates had no checkpoint because one was being written"
