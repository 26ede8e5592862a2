"""Envs that loop forever: one of TextArena's, and one that hangs in the middle of a run."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakes import runs
from unstable_lite.errors import EnvError
from unstable_lite.games.environments import Environment
from unstable_lite.games.local_game import hang_guard

HANGS_SOMETIMES = """
import sys
import textarena.envs.Nim.env as nim

step, calls = nim.NimEnv.step, [0]


def hang_sometimes(self, action):
    calls[0] += 1
    while calls[0] % 40 == 0:
        pass
    return step(self, action)


nim.NimEnv.step = hang_sometimes
sys.argv = ["unstable-lite", *sys.argv[1:]]

from fakes import numpy_learner
from unstable_lite.cli.app import main

numpy_learner.use()
main()
"""


class NeverReturns:
    def step(self, action: str) -> None:
        while True:
            pass


class TakesGivenTime:
    def step(self, action: str) -> tuple[bool, dict[str, object]]:
        until = time.monotonic() + float(action)
        while time.monotonic() < until:
            pass
        return False, {}


def test_endless_loop_in_textarena_is_interrupted() -> None:
    chance = random.Random(0)
    with hang_guard(0.4), pytest.raises(EnvError, match="PublicGoodsGame"):
        for seed in range(100):
            environment = Environment("PublicGoodsGame-v0-train", 3, seed)
            for _ in range(200):
                environment.observe()
                if environment.step(chance.choice(["garbage", "[5]", "[-1]", "[20]"])):
                    break


def test_endless_loop_is_interrupted_in_any_thread() -> None:
    def play() -> None:
        with hang_guard(0.2), pytest.raises(EnvError, match=r"Nim.*run\.env_timeout_s = 0\.2"):
            environment = Environment("Nim-v0-train", 2, 0)
            environment._env = NeverReturns()
            environment.step("[0 1]")

    with ThreadPoolExecutor() as pool:
        pool.submit(play).result(60)


@pytest.mark.parametrize("in_a_thread", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_interrupt_hits_only_the_call_that_timed_out(in_a_thread: bool) -> None:
    """Calls end at about the moment at which they would be interrupted."""
    chance = random.Random(0)

    def play() -> set[bool]:
        ended = set()
        environment = Environment("Nim-v0-train", 2, 0)
        environment._env = TakesGivenTime()
        with hang_guard(0.008):
            for _ in range(150):
                try:
                    environment.step(str(chance.uniform(0.008, 0.02)))
                    ended.add(True)
                except EnvError:
                    ended.add(False)
                sum(range(1000))  # a pending interrupt would hit here
        return ended

    if in_a_thread:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(play).result(60) == {True, False}
    else:
        assert play() == {True, False}


def test_many_short_calls_are_not_taken_for_a_hang() -> None:
    environment = Environment("Nim-v0-train", 2, 0)
    with hang_guard(0.1):
        until = time.monotonic() + 0.6
        while time.monotonic() < until:  # nearly every check of the guard falls into a call
            for _ in range(1000):
                environment.observe()


@pytest.mark.nightly
def test_run_continues_without_the_games_that_hang(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS_SOMETIMES)
    small = runs.write_small(tmp_path)
    overrides = (*runs.SCRIPTED, "run.env_timeout_s=0.3", "run.eval_games=0", "run.num_eval_workers=0")
    command, streams = [sys.executable, str(script), "run", str(small), *overrides], {"capture_output": True}
    process = runs.subprocess.run(command, env=runs.environment(), text=True, timeout=240, **streams)
    assert process.returncode == 0, process.stdout + process.stderr
    log = (runs.run_directory(tmp_path) / "logs" / "orchestrator.log").read_text()
    assert "run.env_timeout_s = 0.3" in log
    assert "hang_sometimes" in log
