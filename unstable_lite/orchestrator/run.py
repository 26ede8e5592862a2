"""A run and its handle: start it, wait for it, stop it. `build()` and the command line meet here.

Loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from unstable_lite import plugins
from unstable_lite.adapters.store import reap_stale_arenas, try_lock
from unstable_lite.config.reading import parse_config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import ConfigError, UnstableError, described, users_frame
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.checkpoint import rewind_to_checkpoint
from unstable_lite.orchestrator.event_loop import first_reason, handled_signals, log_file, run_in_loop
from unstable_lite.orchestrator.progress import shown_live
from unstable_lite.orchestrator.train_loop import TrainLoop
from unstable_lite.orchestrator.wiring import RunParts, check_parts
from unstable_lite.planning.plan import Plan, make_plan
from unstable_lite.printable import visible
from unstable_lite.rollout.back_pressure import CountsByLength
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.rollout.collector import Collector
from unstable_lite.tracking.displayed_metrics import Totals
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.result_rows import ResultRow
from unstable_lite.tracking.run_directory import create_run_directory
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.transport.rpc import reap_stale_sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Totals):
    """Result of a run that has ended."""

    directory: Path
    updates: int
    skipped_updates: int
    dropped_stale_steps: int
    """Number of steps that became too stale to be trained on."""
    training_seconds: float
    """Time of this start or resume from the first training game to the last update, without the evaluations around."""
    evaluations: tuple[Evaluation, ...]
    alarms: tuple[str, ...]
    checkpoint: Path | None
    """The newest checkpoint."""
    is_resumed: bool = False
    """Whether `training_seconds` counts from a resume; the other numbers are those of the whole run."""
    planned_updates: int = 0
    """Updates that the config asks for; a run that was stopped has made fewer."""
    collapsed: tuple[str, ...] = ()
    """Comparisons that ended worse than they were: of evaluations, and of training games."""
    stopped_by: str | None = None
    """The alarm that ended the run, if one did."""
    played_steps: int = 0
    """Number of collected steps of games that ended."""
    most_dropped: str | None = None
    """Env and class of game length of which the largest share was dropped, if any was."""
    ended_early: tuple[str, ...] = ()
    """Numbers of games by the reason of their end, env and opponent."""
    results: tuple[ResultRow, ...] = ()
    """Row of each env and opponent with games, in the order of the config."""


class Run:
    """One run. Its parts are made from the config unless they are given."""

    def __init__(
        self,
        plan: Plan,
        *,
        scheduler: GameScheduler | None = None,
        buffer: StepBuffer | EpisodeBuffer | None = None,
        tracker: Callable[..., Tracker] = Tracker,
        collector: Callable[..., Collector] = Collector,
        terminal: TerminalInterface | None = None,
        resume: Path | None = None,
    ) -> None:
        """Check the parts that are given: objects of these classes, of subclasses, or with the same interface.

        tracker, collector: called with the keyword arguments of `Tracker` and `Collector` once the run has them.
        resume: directory of a run to resume from its newest intact checkpoint. Raises ConfigError for a part that lacks
        a part of its interface.
        """
        check_parts(
            plan.config,
            {"tracker": tracker, "collector": collector},
            {"scheduler": scheduler, "buffer": buffer, "terminal": terminal},
        )
        self.plan = plan
        self._given = scheduler, buffer, tracker, collector
        self._terminal = terminal or TerminalInterface()
        self._resume = resume
        self.directory: Path | None = None
        """Run directory; None before it exists."""
        self._outcome: futures.Future[Summary] | None = None
        """Summary of the run, or the error that ended it; None before the start."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._whole_run: asyncio.Task[Any] | None = None
        self.training: TrainLoop | None = None
        """The loop and every part of the run, once its workers are up."""
        self._is_waited_for = False
        """Whether `wait` returned or raised the outcome."""
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
        plugins.check_not_imported()
        if self._outcome is not None:
            raise ConfigError("this run was started before: build another one, or use `run --resume DIRECTORY`")
        if block and asyncio._get_running_loop() is not None:
            raise ConfigError(
                "start() cannot block within an event loop (a notebook has one): start(block=False), then wait()"
            )
        given = {
            "learning_steps": learning_steps,
            "num_collection_workers": num_collection_workers,
            "num_eval_workers": num_eval_workers,
        }
        raw = self.plan.config.model_dump()
        raw["run"] |= {name: value for name, value in given.items() if value is not None}
        config, problems = parse_config(raw)
        if problems or config is None:
            raise ConfigError(*problems)
        self.plan = make_plan(config, self.plan.copies)
        self._outcome = futures.Future()
        if block:
            self._run_into(self._outcome)
            return self._outcome.result()
        threading.Thread(target=self._run_into, args=(self._outcome,), name="unstable-lite-run").start()
        # For a script that ends without `wait`: after this hook Python starts no more work in the run's threads.
        threading._register_atexit(self._wait_at_exit, self._outcome)  # type: ignore[attr-defined]
        return None

    def wait(self) -> Summary:
        """Wait for a run that was started with `block=False`, and raise the error that ended it, if one did.

        Ctrl-C during `wait` stops the run: once, after the current update; twice, at once.
        Raises ConfigError if the run was not started.
        """
        if self._outcome is None:
            raise ConfigError("wait() is for a run that was started: call start(block=False) first")
        self._wait_for(self._outcome)
        self._is_waited_for = True
        return self._outcome.result()

    @property
    def is_over(self) -> bool:
        """Return whether the run was started and has ended, by itself or with an error."""
        return self._outcome is not None and self._outcome.done()

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
        with handled_signals(self._interrupt):  # from the first moment on
            try:
                return await self._execute()
            except BaseExceptionGroup as group:
                reason = first_reason(group)
                if isinstance(reason, Exception) and not isinstance(reason, UnstableError) and users_frame(reason):
                    raise UnstableError(f"your code ended the run: {described(reason)}") from reason
                raise reason from group
            finally:
                self._terminal.stop()

    async def _execute(self) -> Summary:
        checkpoint, say = None, self._terminal.say
        directory = create_run_directory(self.plan.config) if self._resume is None else self._resume.resolve()
        self.directory = directory
        say(f"run directory {directory}")
        if (lock := try_lock(directory)) is None:
            raise UnstableError(f"{directory}: another process is running this run")
        try:
            if self._resume is not None:
                checkpoint = rewind_to_checkpoint(directory, self.plan.config, say)
            for path in (*reap_stale_arenas(), *reap_stale_arenas(directory), *reap_stale_sockets()):
                say(f"removed {path}, left behind by a run that was killed")
            parts = RunParts(self.plan, directory, self._terminal, self._stop, checkpoint)
            with log_file(directory / "logs" / "orchestrator.log"):
                async with parts.wired(*self._given):
                    self.training = TrainLoop(parts)
                    async with shown_live(parts) as live:
                        await self.training.run()
            return self._summary(self.training, live)
        finally:
            os.close(lock)

    def _summary(self, training: TrainLoop, live: Mapping[str, Any]) -> Summary:
        parts, buffers = training.parts, [policy.buffer for policy in training.parts.policies.values()]
        return Summary(
            directory=parts.directory,
            updates=training.progress.updates,
            skipped_updates=training.progress.skipped,
            dropped_stale_steps=sum(buffer.dropped_stale for buffer in buffers),
            **{field.name: live[field.name] for field in fields(Totals)},
            is_resumed=self._resume is not None,
            training_seconds=training.progress.training_seconds,
            evaluations=tuple(sorted(parts.tracker.evaluations, key=lambda evaluation: evaluation.step)),
            alarms=tuple(parts.tracker.alarms),
            checkpoint=training.saver.newest,
            planned_updates=parts.plan.config.run.learning_steps,
            collapsed=tuple(parts.health.collapsed()),
            stopped_by=parts.health.stopped_by,
            played_steps=sum(counts["played"] for buffer in buffers for counts in buffer.counts.values()),
            most_dropped=CountsByLength.of(row for one in buffers for row in one.counts.state_dict()).most_dropped(),
            ended_early=tuple(parts.tracker.ended_early()),
            results=tuple(parts.results()),
        )

    def _run_into(self, outcome: futures.Future[Summary]) -> None:
        try:
            outcome.set_result(run_in_loop(self.execute()))
        except BaseException as error:  # raised in the thread that asks for the outcome
            outcome.set_exception(error)

    def _wait_for(self, outcome: futures.Future[Summary]) -> None:
        while not outcome.done():
            try:
                # Not `join`: Python up to 3.12 takes a thread for ended if that was interrupted.
                futures.wait([outcome], timeout=1)  # a signal that came to another thread does not end a wait
            except KeyboardInterrupt:
                self._call_in_loop(self._interrupt)

    def _wait_at_exit(self, outcome: futures.Future[Summary]) -> None:
        if not outcome.done():
            self._terminal.say("the script has ended; the run continues (Ctrl-C: finish the update, save, end)")
        self._wait_for(outcome)
        if (error := outcome.exception()) is not None and not self._is_waited_for:
            print(f"error: the run has ended: {visible(str(error))}", file=sys.stderr)  # noqa: T201

    def _interrupt(self) -> None:
        """Stop the run after the current update, or, at the second interruption, at once."""
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
