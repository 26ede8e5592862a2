"""A blocked event loop: reported, counted and survived; the process ends if the loop stays blocked."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes import runs
from unstable_lite.orchestrator.event_loop import EXIT_STALLED, LoopWatchdog

BLOCKS = """
import asyncio, re, sys
from pathlib import Path
from unstable_lite.orchestrator.event_loop import LoopWatchdog


def loop_without_end():
    while True:
        pass


def keep_the_lock():
    re.match("(a+)+$", 64 * "a" + "b")


def wait_for_a_line():
    print(flush=True)
    sys.stdin.readline()


async def main():
    with LoopWatchdog(0.05, Path(sys.argv[1])):
        await asyncio.sleep(0.1)
        globals()[sys.argv[2]]()


asyncio.run(main())
"""
LOOPS_WHILE_FILE_EXISTS = """
import time
from pathlib import Path

from unstable_lite.orchestrator import event_loop

event_loop.LOOP_STALL_S = 0.8


class Loops:
    def __call__(self, reward, pid, env_id):
        while Path("loop").exists():
            time.sleep(0.01)
        return reward
"""


def block_for(seconds: float) -> None:
    time.sleep(seconds)


async def test_blocked_loop_is_counted_and_located(tmp_path: Path) -> None:
    alarms: list[str] = []
    with LoopWatchdog(2.0, tmp_path / "log", alarms.append) as watch:
        await asyncio.sleep(0.1)
        block_for(4.0)
        await asyncio.sleep(0.1)
        assert watch.metrics()["run/loop_stalls"] == 1
        assert watch.longest_s >= 3.9
    (alarm,) = alarms
    assert re.search(r"in block_for \(.*test_stalls\.py, line \d+\), called in ", alarm)
    assert "in block_for" in (tmp_path / "log").read_text().partition("most recent call first")[2]


async def test_busy_loop_that_still_turns_is_left_alone(tmp_path: Path) -> None:
    with LoopWatchdog(2.0, tmp_path / "log") as watch:
        for _ in range(30):
            block_for(0.1)
            await asyncio.sleep(0)
        assert watch.stalls == 0
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize(
    ("function", "code"), [("loop_without_end", EXIT_STALLED), ("keep_the_lock", -signal.SIGVTALRM)]
)
def test_loop_blocked_forever_ends_process_and_leaves_stacks(tmp_path: Path, function: str, code: int) -> None:
    script = BLOCKS.replace("0.05", "0.2" if code == EXIT_STALLED else "0.05")  # a busy machine looks at it later
    command = [sys.executable, "-c", script, str(tmp_path / "log"), function]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == code
    assert f"in {function}" in (tmp_path / "log").read_text()
    if code == EXIT_STALLED:
        assert re.search(rf"for \d\.\d s, in {function} ", process.stderr)
        assert "unstable-lite run --resume" in process.stderr


@pytest.mark.nightly
def test_suspended_process_is_not_taken_for_a_blocked_loop(tmp_path: Path) -> None:
    script = BLOCKS.replace("0.05", "0.3")
    command = [sys.executable, "-c", script, str(tmp_path / "log"), "wait_for_a_line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(0.2)  # until its watchdog has seen the blocked loop
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.nightly
def test_run_with_endless_reward_transform_ends_and_can_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looping.py").write_text(LOOPS_WHILE_FILE_EXISTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    process = runs.start_torchless(
        "run",
        runs.write_small(tmp_path),
        *runs.SCRIPTED,
        'rewards.final_reward_transformation=["looping:Loops"]',
        "run.eval_games=0",
        "run.num_eval_workers=0",
        "run.checkpoint_every=1",
        "run.learning_steps=1000",
        "run.env_timeout_s=0.2",
    )
    runs.wait_for(lambda: list(tmp_path.glob("outputs/*/*/checkpoints/latest")))
    workers = runs.children_of(process)
    assert len(workers) == 2
    (tmp_path / "loop").touch()
    code, _, err = runs.finish(process)
    assert code == EXIT_STALLED
    assert re.search(r"in __call__ \(.*looping\.py, line \d+\)", err)
    runs.wait_for(lambda: runs.are_gone(workers), timeout_s=10)
    directory = runs.run_directory(tmp_path)
    assert "in __call__" in (directory / "logs" / "orchestrator.log").read_text()
    (tmp_path / "loop").unlink()
    steps = f"run.learning_steps={runs.num_updates(tmp_path) + 1}"
    runs.output_of(runs.run_torchless("run", "--resume", directory, steps))
