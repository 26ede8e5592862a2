"""Processes of a study: the warm start, then each run, several at once if wanted. They end with the study."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.study.reading import TARGET, Arm, Checked, digest, target_of, warm_start_digest, with_targets
from unstable_lite.adapters.frozen import update_of
from unstable_lite.adapters.store import try_lock
from unstable_lite.config import Config
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced
from unstable_lite.orchestrator.checkpoint import has_ended, newest_checkpoint
from unstable_lite.orchestrator.event_loop import end_handlers
from unstable_lite.sft.session import HOW
from unstable_lite.tracking.run_directory import RUNS, to_toml
from unstable_lite.types import BASE

POLL_S = 0.2
PATIENCE_S = 900.0
"""Time that runs have to finish an update, with its exact evaluation, and save it before they are killed."""
TAIL_LINES = 8
PR_SET_PDEATHSIG = 1
"""Number of this request in Linux's prctl."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One run of a study."""

    arm: Arm
    seed: int
    config: Config
    """Effective config of the run, with seed, name and output directory."""
    targets: tuple[Task, ...] = ()
    """Runs whose checkpoints it plays, in the order of these opponents. They are finished before it starts."""

    @property
    def key(self) -> tuple[str, int]:
        return self.arm.name, self.seed

    @property
    def label(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def name(self) -> str:
        return str(self.config.run.name)

    @property
    def output(self) -> Path:
        return self.config.run.output_dir

    @property
    def log(self) -> Path:
        return self.output / "logs" / f"{self.name}.log"


def task_of(checked: Checked, arm: Arm, seed: int, output: Path) -> Task:
    """Return the run of an arm and a seed. Its name has the config's digest, so a changed config is another run."""
    config = checked.configs[arm.name]
    name = f"{arm.slug}-seed-{seed + arm.seed_offset}-{digest(config)[:8]}"
    own = {"seed": seed + arm.seed_offset, "name": name, "output_dir": output}
    changes: dict[str, Any] = {"run": own}
    if checked.study.warm_start:
        start = output / f"warm_start-{warm_start_digest(config)}"
        changes["lora"] = {"initial_lora_path": start}
    names = [name for name in config.league.fixed_opponents if name.startswith(TARGET)]
    targets = tuple(task_of(checked, target_of(name, checked.study), seed, output) for name in names)
    return Task(arm, seed, config.changed(**changes), targets)


def make_warm_start(checked: Checked, task: Task, say: Callable[[str], None]) -> None:
    """Train the adapter from which a run starts, unless it is there. Raises UnstableError if that fails."""
    config, directory = checked.configs[task.arm.name], task.config.lora.initial_lora_path
    if directory is None or (directory / HOW).exists():
        return
    say(f"warm start: {directory}")
    shutil.rmtree(directory, ignore_errors=True)  # of a process that was killed
    made = with_targets(config, lambda _: BASE).changed(sft={"output": directory})  # it plays none of them
    path = _written(made, task.output / "configs" / f"{directory.name}.toml")
    log = task.output / "logs" / f"{directory.name}.log"
    process = _launch(["sft", str(path)], log)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        _stop([process])
        raise
    if code or not (directory / HOW).exists():
        raise UnstableError(f"no warm start: {_last_lines(code, log, 'wrote no adapter')}")


def finished_directory(task: Task) -> Path | None:
    """Return the directory of the run if it has made all its updates and evaluations."""
    found = _resumable(task)
    is_over = found is not None and has_ended(found[0], task.config, update_of(found[1]) or 0)
    return found[0] if found is not None and is_over else None


def run_all(
    tasks: Sequence[Task],
    jobs: int,
    starts: Callable[[Task], None],
    ended: Callable[[Task, str | None], None],
    say: Callable[[str], None],
) -> None:
    """Run all tasks, `jobs` at once. `starts` is called before each, `ended` after it, with the reason if it failed.

    Signals that raise in this process end the runs, which save and can be resumed.
    """
    waiting, running = deque(tasks), dict[Task, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.popleft()
                starts(task)
                running[task] = _start(task, say)
            time.sleep(POLL_S)
            for task, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[task]
                    ended(task, _failure(task, code))
    finally:
        _stop(list(running.values()))


def _resumable(task: Task) -> tuple[Path, Path] | None:
    """Return the newest directory of the run that has an intact checkpoint, and this checkpoint."""
    found = [path.parent for path in task.output.glob(RUNS) if path.parent.name[9:] == task.name]
    for directory in sorted(found, reverse=True):
        with contextlib.suppress(UnstableError):
            return directory, newest_checkpoint(directory / "checkpoints", lambda _: None)
    return None


def _start(task: Task, say: Callable[[str], None]) -> subprocess.Popen[bytes]:
    found = _resumable(task)
    if found is None:
        directories = iter([finished_directory(target) for target in task.targets])
        config = with_targets(task.config, lambda name: f"run:{next(directories)}/{name.rpartition('/')[2]}")
        return _launch(["run", str(_written(config, task.output / "configs" / f"{task.name}.toml"))], task.log)
    say(f"  resuming from {found[1].name} in {found[0]}")
    return _launch(["run", "--resume", str(found[0])], task.log)


def _written(config: Config, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.write_text(to_toml(config.model_dump(mode="json")), encoding="utf-8")
    return path


def _launch(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "unstable_lite", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # a Ctrl-C at the terminal reaches this process alone, which then ends the others
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def _end_with_parent() -> None:
    """Have Linux end this process, as a Ctrl-C would, when the study is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _failure(task: Task, code: int) -> str | None:
    if code == 0 and finished_directory(task) is not None:
        return None
    return _last_lines(code, task.log, "ended before its last update")


def _last_lines(code: int, log: Path, missing: str) -> str:
    """Return why a process failed: its exit code, or else `missing`; and the end of its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    reason = f"exited with code {code}" if code else missing
    return "\n  ".join([f"{reason}; the last lines of {log}:", *lines])


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the runs after their current update; a second signal ends them at once."""
    if not processes:
        return

    def terminate(*_: object) -> None:
        for process in processes:
            process.terminate()

    for signum in end_handlers():
        signal.signal(signum, terminate)
    terminate()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_orphans(tasks: Sequence[Task], say: Callable[[str], None]) -> None:
    """Wait until no process of an earlier study writes to these runs. Such a process ends after its update."""
    for task in tasks:
        for directory in (path.parent for path in task.output.glob(RUNS) if path.parent.name[9:] == task.name):
            is_said = False
            while (lock := try_lock(directory)) is None:
                if not is_said:
                    say(f"{task.label}: waiting for a process that still writes to {directory}")
                is_said = True
                time.sleep(POLL_S)
            os.close(lock)
