"""Envs with loops without end: TextArena's own, and one that hangs in the middle of a run."""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import runs
from unstable_lite.errors import EnvError
from unstable_lite.games.environments import Environment, hang_guard

HANGS_SOMETIMES = """
import sys
import textarena.envs.Nim.env as nim

step, calls = nim.NimEnv.step, [0]


def hang_now_and_then(self, action):
    calls[0] += 1
    while calls[0] % 40 == 0:
        pass
    return step(self, action)


nim.NimEnv.step = hang_now_and_then
sys.argv = ["unstable-lite", *sys.argv[1:]]

from unstable_lite.cli import main

main()
"""


class NeverReturns:
    def step(self, action: str) -> None:
        while True:
            pass


class TakesSoLong:
    def step(self, action: str) -> tuple[bool, dict[str, object]]:
        until = time.monotonic() + float(action)
        while time.monotonic() < until:
            pass
        return False, {}


def test_a_loop_without_end_in_textarena_is_broken_off() -> None:
    chance = random.Random(0)
    with hang_guard(0.4), pytest.raises(EnvError, match=r"PublicGoodsGame.*did not return within"):
        for seed in range(100):
            environment = Environment("PublicGoodsGame-v0-train", 3, seed)
            for _ in range(200):
                environment.observe()
                if environment.step(chance.choice(["garbage", "[5]", "[-1]", "[20]"])):
                    break


def test_a_loop_without_end_is_broken_off_in_any_thread() -> None:
    def play() -> None:
        with hang_guard(0.2), pytest.raises(EnvError, match=r"Nim.*did not return within run.env_timeout_s = 0.2"):
            environment = Environment("Nim-v0-train", 2, 0)
            environment._env = NeverReturns()
            environment.step("[0 1]")

    with ThreadPoolExecutor() as pool:
        pool.submit(play).result(60)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_what_breaks_a_call_off_falls_into_that_call_and_nowhere_else(in_a_thread: bool) -> None:
    """Calls end at about the moment at which they would be broken off."""
    chance = random.Random(0)

    def play() -> set[bool]:
        ended = set()
        environment = Environment("Nim-v0-train", 2, 0)
        environment._env = TakesSoLong()
        with hang_guard(0.008):
            for _ in range(150):
                try:
                    environment.step(str(chance.uniform(0.008, 0.02)))
                    ended.add(True)
                except EnvError:
                    ended.add(False)
                sum(range(1000))  # what is on its way falls here, if anywhere
        return ended

    if in_a_thread:
        with ThreadPoolExecutor() as pool:
            assert pool.submit(play).result(60) == {True, False}
    else:
        assert play() == {True, False}


def test_slow_play_of_quick_calls_is_not_taken_for_a_hang() -> None:
    environment = Environment("Nim-v0-train", 2, 0)
    with hang_guard(0.1):
        until = time.monotonic() + 0.6
        while time.monotonic() < until:  # nearly every look of the guard falls into a call
            for _ in range(1000):
                environment.observe()


def test_a_run_goes_on_without_the_games_that_hang(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS_SOMETIMES)
    small = runs.write_small(tmp_path)
    overrides = ("run.env_timeout_s=0.3", "run.eval_games=0", "run.num_eval_workers=0")
    process = runs.subprocess.run(
        [sys.executable, str(script), "run", str(small), *overrides], capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stdout + process.stderr
    log = (runs.run_directory(tmp_path) / "logs" / "orchestrator.log").read_text()
    assert "a call did not return within run.env_timeout_s = 0.3" in log
    assert "hang_now_and_then" in log
