"""A run and its handle: start it, wait for it, stop it. `build()` and the command line meet here.

Loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from unstable_lite.adapters.store import reap_stale_arenas, try_lock
from unstable_lite.config.reading import parse_config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.event_loop import first_reason, run_in_loop
from unstable_lite.orchestrator.logs import log_file
from unstable_lite.orchestrator.resume import rewind_to_checkpoint
from unstable_lite.orchestrator.status import shown_live
from unstable_lite.orchestrator.summary import Summary, summarise
from unstable_lite.orchestrator.train_loop import TrainLoop
from unstable_lite.orchestrator.wiring import wired_parts
from unstable_lite.planning.plan import Plan, make_plan
from unstable_lite.printable import visible
from unstable_lite.rollout.episode_buffer import EpisodeBuffer
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.tracking.run_directory import create_run_directory


class Run:
    """One run. Scheduler and buffer are made from the config unless they are given."""

    def __init__(
        self,
        plan: Plan,
        *,
        scheduler: GameScheduler | None = None,
        buffer: StepBuffer | EpisodeBuffer | None = None,
        terminal: TerminalInterface | None = None,
        resume: Path | None = None,
    ) -> None:
        """`resume`: directory of a run to resume from its newest intact checkpoint."""
        config = plan.config
        if buffer is not None and isinstance(buffer, EpisodeBuffer) != (config.buffer.kind == "episodes"):
            raise ConfigError(
                f"{config.algorithm} learns from {config.buffer.kind}, not from a {type(buffer).__name__}"
            )
        self.plan = plan
        self._scheduler = scheduler
        self._buffer = buffer
        self._terminal = terminal or TerminalInterface()
        self._resume = resume
        self._summary: Summary | None = None
        self._error: BaseException | None = None
        self._is_over: threading.Event | None = None
        """Set when a run in its own thread has ended; None for a run that blocks."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._whole_run: asyncio.Task[Any] | None = None
        self.training: TrainLoop | None = None
        """The loop and every part of the run, once its workers are up."""
        self._is_started = False
        self._is_error_raised = False
        """Whether `wait` raised the error that ended the run in its own thread."""
        self._stop = asyncio.Event()

    def start(
        self,
        learning_steps: int | None = None,
        num_collection_workers: int | None = None,
        num_eval_workers: int | None = None,
        block: bool = True,
    ) -> Summary | None:
        """Run to the end and return the summary; with `block=False` return at once (see `wait`, `stop`).

        Numbers that are given replace those of the config. Only `wait` raises the error of a run that does not block; a
        script without it exits with code 0. Raises ConfigError for a config that cannot run, for a run that was started
        before, for `block=True` within an event loop, and if the calling file is being imported for a class in it,
        because each import would start one more run.
        """
        if _is_called_by_import():
            raise ConfigError(
                "this file starts a run when it is imported for a class that a config names: put the start of the run "
                'under `if __name__ == "__main__":`'
            )
        if self._is_started:
            raise ConfigError("this run was started before: build another one, or use `run --resume DIRECTORY`")
        if block and asyncio._get_running_loop() is not None:
            raise ConfigError(
                "start() cannot block within an event loop (a notebook has one): start(block=False), then wait()"
            )
        self._change_plan(
            learning_steps=learning_steps,
            num_collection_workers=num_collection_workers,
            num_eval_workers=num_eval_workers,
        )
        self._is_started = True
        if block:
            self._summary = run_in_loop(self.execute())
            return self._summary
        self._is_over = threading.Event()
        threading.Thread(target=self._run_in_thread, args=(self._is_over,), name="unstable-lite-run").start()
        # For a script that ends without `wait`: after this hook Python starts no more work in the run's threads.
        threading._register_atexit(self._wait_at_exit)  # type: ignore[attr-defined]
        return None

    def _change_plan(self, **given: int | None) -> None:
        """Replace keys of section `run` by the numbers that are given."""
        changes = {name: value for name, value in given.items() if value is not None}
        raw = self.plan.config.model_dump()
        config, problems = parse_config({**raw, "run": {**raw["run"], **changes}})
        if problems or config is None:
            raise ConfigError(*problems)
        self.plan = make_plan(config)

    def wait(self) -> Summary:
        """Wait for a run that was started with `block=False`, and raise the error that ended it, if one did.

        Ctrl-C during `wait` stops the run: once, after the current update; twice, at once.
        Raises ConfigError if the run was not started.
        """
        if self._is_over is None and self._summary is None:
            raise ConfigError("wait() is for a run that was started: call start(block=False) first")
        self._wait_for_end()
        self._is_error_raised = True
        if self._error is not None:
            raise self._error
        assert self._summary is not None
        return self._summary

    def stop(self) -> None:
        """Finish the current update, save, and end. May be called from any thread at any time."""
        self._call_in_loop(self._stop.set)

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        """Call `function` in the run's event loop, from any thread; if there is no loop yet, stop the run."""
        if self._loop is None:
            self._stop.set()  # no task waits for it yet
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(function)

    async def execute(self) -> Summary:
        """Start the workers, train, evaluate and save; leave no process and no shared memory, however the run ends."""
        self._loop, self._whole_run = asyncio.get_running_loop(), asyncio.current_task()
        directory = create_run_directory(self.plan.config) if self._resume is None else self._resume.resolve()
        self._terminal.say(f"run directory {directory}")
        lock = try_lock(directory)
        if lock is None:
            raise UnstableError(f"{directory}: another process is running this run")
        try:
            return await self._execute_in(directory)
        finally:
            os.close(lock)

    async def _execute_in(self, directory: Path) -> Summary:
        started, checkpoint, say = time.monotonic(), None, self._terminal.say
        if self._resume is not None:
            checkpoint = rewind_to_checkpoint(directory, self.plan.config, say)
        for path in (*reap_stale_arenas(), *reap_stale_arenas(directory)):
            say(f"removed {path}, left behind by a run that was killed")
        try:
            with log_file(directory / "logs" / "orchestrator.log"), self._stopped_by_signals():
                async with wired_parts(
                    self.plan,
                    directory,
                    terminal=self._terminal,
                    stop=self._stop,
                    checkpoint=checkpoint,
                    scheduler=self._scheduler,
                    buffer=self._buffer,
                ) as parts:
                    self.training = TrainLoop(parts)
                    async with shown_live(parts):
                        await self.training.run()
        except BaseExceptionGroup as group:
            raise first_reason(group) from group
        finally:
            self._terminal.stop()
        return summarise(self.training, time.monotonic() - started)

    def _run_in_thread(self, is_over: threading.Event) -> None:
        try:
            self._summary = run_in_loop(self.execute())
        except BaseException as error:  # wait() raises it in its caller's thread
            self._error = error
        finally:
            is_over.set()

    def _wait_for_end(self) -> None:
        while self._is_over is not None and not self._is_over.is_set():
            try:
                self._is_over.wait()  # Python up to 3.12 takes a thread for ended if its `join` was interrupted
            except KeyboardInterrupt:
                self._call_in_loop(self._interrupt)

    def _wait_at_exit(self) -> None:
        if self._is_over is not None and not self._is_over.is_set():
            self._terminal.say("the script has ended; the run continues (Ctrl-C: finish the update, save, end)")
        self._wait_for_end()
        if self._error is not None and not self._is_error_raised:
            print(f"error: the run has ended: {visible(str(self._error))}", file=sys.stderr)  # noqa: T201

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """Stop the run on Ctrl-C, SIGTERM or a closed terminal: after the current update, or at the second signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signals.append(signal.SIGHUP)
        for signum in signals:
            loop.add_signal_handler(signum, self._interrupt)
        try:
            yield
        finally:
            for signum in signals:
                loop.remove_signal_handler(signum)

    def _interrupt(self) -> None:
        assert self._whole_run is not None
        if self._stop.is_set():
            self._terminal.say("interrupted again: ending now")
            self._whole_run.cancel()
        elif self.training is None:
            self._terminal.say("interrupted while the workers start: ending them; there is nothing to save")
            self._whole_run.cancel()
        else:
            self._terminal.say("interrupted: finishing the current update, then saving (Ctrl-C again: end now)")
            self._stop.set()


def _is_called_by_import() -> bool:
    """Return whether this package, here or in a worker, imports the file that calls `start`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("unstable_lite."):
            return True
        frame = frame.f_back
    return False
