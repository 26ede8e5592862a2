"""A run and its handle: wire every part, run, and leave nothing behind. `build()` and the command line meet here.

Loads neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import logging.handlers
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from unstable_lite.buffers import EpisodeBuffer, StepBuffer, most_dropped
from unstable_lite.checkpoints import (
    Checkpoint,
    create_run_directory,
    lasting_changes,
    newest_checkpoint,
    read_checkpoint,
    to_toml,
    versions,
)
from unstable_lite.collector import Collector
from unstable_lite.config import Config, parse_config
from unstable_lite.engines.lock_step import LockStep
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.games.environments import Environment, is_isolated
from unstable_lite.games.isolation import Environments, opened_environments
from unstable_lite.games.seats import Seats
from unstable_lite.games.templates import Template, format_prompt, templates_for
from unstable_lite.guard import Guard
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import anchors, build_env_sampler, build_model_sampler
from unstable_lite.live import shown_live
from unstable_lite.loop_watch import LoopWatch
from unstable_lite.opponent_pool import OpponentPool
from unstable_lite.pace import in_flight
from unstable_lite.plan import Plan, adapters_in_memory, make_plan
from unstable_lite.publisher import Publisher
from unstable_lite.reward_transformations import GROUP_BASELINES, build_reward_transformations
from unstable_lite.rng import derive_seed
from unstable_lite.supervision import Attendant, Supervisor
from unstable_lite.trackers.jsonl import JsonlSink
from unstable_lite.trackers.records import read_records
from unstable_lite.trackers.rewind import rewind
from unstable_lite.trackers.tensorboard import TensorBoardSink
from unstable_lite.trackers.terminal import TerminalInterface
from unstable_lite.trackers.tracker import Evaluation, RichSink, Sink, Tracker
from unstable_lite.training import Training, is_evaluated
from unstable_lite.transport.adapters import AdapterArena, reap_stale_arenas, try_lock
from unstable_lite.turns import Turns
from unstable_lite.types import GameRecord, GameSpec
from unstable_lite.visible_text import VisibleFormatter, visible
from unstable_lite.workers import Workers, started_workers

T = TypeVar("T")


LOG_BYTES, LOG_BACKUPS = 10_000_000, 5
CANARY_PROMPTS = 8
"""Of orchestrator.log (reference: `tracker.py`)."""
COLLECT_AFTER = 100_000
"""New objects, beyond those that went; thousands of games that begin and end in waves are tens of thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is left of a run when it is over."""

    directory: Path
    updates: int
    skipped_updates: int
    games: int
    void_games: int
    dropped_stale_steps: int
    """Number of steps that became too stale to be trained on."""
    seconds: float
    training_seconds: float
    """From the first training game to the last update, without start-up and the evaluations around it."""
    evaluations: tuple[Evaluation, ...]
    alarms: tuple[str, ...]
    checkpoint: Path | None
    """The newest one."""
    collapsed: tuple[str, ...] = ()
    """Where the last policy is worse than an earlier one, and which."""
    stopped_by: str | None = None
    """The alarm that ended the run, if one did."""
    played_steps: int = 0
    """Number of collected steps of games that ended."""
    most_dropped: str | None = None
    """Env and class of game length of which the largest share was dropped, if any was."""


class Run:
    """One run. The league's parts and the buffer may be given; what is not given is made from the config."""

    def __init__(
        self,
        plan: Plan,
        *,
        scheduler: GameScheduler | None = None,
        buffer: StepBuffer | EpisodeBuffer | None = None,
        terminal: TerminalInterface | None = None,
        resume: Path | None = None,
    ) -> None:
        """`resume`: the directory of a run to go on with, from its newest whole checkpoint."""
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
        """Of a run in a thread of its own."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._whole_run: asyncio.Task[Any] | None = None
        self._is_started = False
        self._is_told_of = False
        """What ended it in its own thread was raised by `wait`."""
        self._stop = asyncio.Event()
        self._is_up = False
        """The workers are there: what is interrupted from now on may be worth saving."""

    def start(
        self,
        learning_steps: int | None = None,
        num_collection_workers: int | None = None,
        num_eval_workers: int | None = None,
        block: bool = True,
    ) -> Summary | None:
        """Run to the end and return the summary; with `block=False` return at once (see `wait`, `stop`).

        What ends a run that does not block is raised by `wait` alone: a script without it ends with exit code 0.
        Numbers that are given replace those of the config. Raises ConfigError for what cannot run, for a run that was
        started before, whose parts hold what became of them then, with `block=True` within an event loop, and from a
        file that is imported for a class in it, where each import would start one more run.
        """
        if _is_called_by_import():
            raise ConfigError(
                "this file is imported for what a config names in it, and starts a run: put what it does as a script "
                'under `if __name__ == "__main__":`'
            )
        if self._is_started:
            raise ConfigError("this run was started before: build another one, or go on with `run --resume DIRECTORY`")
        if block and asyncio._get_running_loop() is not None:
            raise ConfigError(
                "start() cannot block within an event loop, which a notebook has, too: start(block=False), then wait()"
            )
        given = {
            "learning_steps": learning_steps,
            "num_collection_workers": num_collection_workers,
            "num_eval_workers": num_eval_workers,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        raw = self.plan.config.model_dump()
        config, problems = parse_config({**raw, "run": {**raw["run"], **changes}})
        if problems or config is None:
            raise ConfigError(*problems)
        self.plan = make_plan(config)
        self._is_started = True
        if block:
            self._summary = run_in_loop(self.execute())
            return self._summary
        self._is_over = threading.Event()
        threading.Thread(target=self._run_in_thread, args=(self._is_over,), name="unstable-lite-run").start()
        # Where a script ends without `wait`: later than this, Python gives the run's own threads nothing more to do.
        threading._register_atexit(self._wait_at_exit)  # type: ignore[attr-defined]
        return None

    def wait(self) -> Summary:
        """Wait for a run that was started with `block=False`; raises what ended it, if anything did.

        Ctrl-C meanwhile is as without it: once, and the run ends well; twice, and it ends now. Raises ConfigError where
        there is nothing to wait for.
        """
        if self._is_over is None and self._summary is None:
            raise ConfigError("wait() is for a run that was started: call start(block=False) first")
        self._wait_for_end()
        self._is_told_of = True
        if self._error is not None:
            raise self._error
        assert self._summary is not None
        return self._summary

    def stop(self) -> None:
        """Finish the update at hand, save, and end; from any thread, and at any time."""
        self._tell_loop(self._stop.set)

    def _tell_loop(self, what: Callable[[], None]) -> None:
        """From any thread; before there is a loop, to end as soon as there is."""
        if self._loop is None:
            self._stop.set()  # nobody waits for it yet
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(what)

    async def execute(self) -> Summary:
        """Start the workers, train, evaluate, save. Leaves no process and no shared memory, however it ends."""
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
        started, config, checkpoint = time.monotonic(), self.plan.config, None
        if self._resume is not None:
            checkpoint = self._go_back(directory)
        for path in (*reap_stale_arenas(), *reap_stale_arenas(directory)):
            self._terminal.say(f"removed {path}, left behind by a run that was killed")
        sinks = _sinks(config, directory, checkpoint.state["updates"] if checkpoint is not None else None)
        tracker = Tracker(directory, sinks, config.tracker, self._terminal.say)
        if checkpoint is not None:
            evaluations = list(read_records(directory / "eval.jsonl"))
            with checkpoint.understood():
                tracker.resume(checkpoint.state["tracker"], evaluations)
        arena: AdapterArena | None = None
        starting = contextlib.ExitStack()
        starting.enter_context(self._terminal.doing(lambda: "starting the workers"))
        try:
            with (
                log_file(directory / "logs" / "orchestrator.log"),
                self._stopped_by_signals(),
                LoopWatch(config.run.loop_stall_s, directory / "logs" / "orchestrator.log") as loop_watch,
            ):
                async with (
                    opened_environments(directory / "logs", config.run.env_timeout_s) as environments,
                    started_workers(
                        self.plan, directory / "logs", self._terminal.say, goes_on=checkpoint is not None
                    ) as workers,
                ):
                    self._is_up = True
                    starting.close()
                    needed = workers.adapter_bytes * adapters_in_memory(config)
                    arena = AdapterArena(directory.name, fallback=directory, bytes_needed=needed)
                    templates, say = templates_for(config, workers.prompts), self._terminal.say
                    lock_step, sampling_seed = None, None
                    if config.run.mode == "sync":
                        lock_step = LockStep(workers.engines.generate)
                        sampling_seed = derive_seed(config.run.seed, "sampling")
                    generate = lock_step.generate if lock_step is not None else workers.engines.generate
                    async with Seats(generate, templates, config.opponents, say, sampling_seed) as seats:
                        canary_prompts = _canary_prompts(config, templates)
                        training = self._wire(
                            directory,
                            workers,
                            arena,
                            tracker,
                            seats,
                            lock_step,
                            canary_prompts,
                            checkpoint,
                            loop_watch,
                            environments,
                        )
                        async with shown_live(training):
                            await training.run()
        except BaseExceptionGroup as group:
            raise first_reason(group) from group
        finally:
            self._terminal.stop()
            if arena is not None:
                arena.close()  # after the workers: a learner that is still writing would bring it back
            tracker.close()
        return Summary(
            directory=directory,
            updates=training.updates,
            skipped_updates=training.skipped,
            games=tracker.games_finished,
            void_games=tracker.void_games,
            dropped_stale_steps=training.buffer.dropped_stale,
            seconds=time.monotonic() - started,
            training_seconds=training.seconds,
            evaluations=tuple(sorted(tracker.evaluations, key=lambda evaluation: evaluation.step)),
            alarms=tuple(tracker.alarms),
            checkpoint=training.checkpoint,
            collapsed=tuple(training.guard.collapsed()),
            stopped_by=training.guard.stopped_by,
            played_steps=sum(counts.played for counts in training.buffer.counts.values()),
            most_dropped=most_dropped(training.buffer.counts),
        )

    def _go_back(self, directory: Path) -> Checkpoint:
        """The newest whole checkpoint; what the run told after it is taken back.

        Raises UnstableError; ConfigError for a config that no checkpoint of the run is of.
        """
        if problems := [*lasting_changes(directory, self.plan.config)]:
            raise ConfigError(*problems)
        checkpoint = read_checkpoint(newest_checkpoint(directory / "checkpoints", self._terminal.say))
        with checkpoint.understood():
            updates, state = int(checkpoint.state["updates"]), checkpoint.state["tracker"]
            scheduler = checkpoint.state["scheduler"]
            num_games, in_flight = sum(scheduler["games"].values()), set(scheduler["in_flight"])
            unfinished = {model for model, *_ in state["tallies"]} | {checkpoint.state["registry"]["current"]}
            evaluated = {(env_id, opponent) for env_id, opponent in checkpoint.state["evaluated"]}
        config = self.plan.config
        known = {
            (line["env_id"], line["opponent"])
            for line in read_records(directory / "eval.jsonl")
            if line["label"] != "concurrent" and line["step"] == updates
        }
        is_left = bool(config.run.eval_games) and not known.issuperset((e.env_id, e.opponent) for e in config.eval_envs)
        if updates > config.run.learning_steps or (updates == config.run.learning_steps and not is_left):
            raise UnstableError(
                f"{directory} has made its {updates} updates; give run.learning_steps=N for more of them"
            )
        # In mode `sync` what the checkpoint does not know of is made again, for ratings and games follow from it.
        is_made_again = config.run.mode == "sync" and is_evaluated(config.run, updates)

        def is_told_again(line: dict[str, Any]) -> bool:
            what = line["env_id"], line["opponent"]
            if line["label"] == "concurrent":
                return line["model"] in unfinished
            return is_made_again and line["step"] == updates and what not in evaluated

        try:
            rewind(directory, updates, num_games, in_flight, is_told_again)
        except OSError as error:
            raise UnstableError(
                f"{directory}: what was told after update {updates} cannot be taken back: "
                f"{error.strerror}; make room, and see that it can be written to"
            ) from error
        self._terminal.say(f"going on after update {updates}, from {checkpoint.directory.name}")
        return checkpoint

    def _wire(
        self,
        directory: Path,
        workers: Workers,
        arena: AdapterArena,
        tracker: Tracker,
        seats: Seats,
        lock_step: LockStep | None,
        canary_prompts: Sequence[str],
        checkpoint: Checkpoint | None,
        loop_watch: LoopWatch,
        environments: Environments,
    ) -> Training:
        config = self.plan.config
        if arena.remark is not None:
            self._terminal.say(arena.remark)
        scheduler = self._scheduler or _scheduler(config)
        buffer = self._buffer or make_buffer(config)
        buffer.in_flight = in_flight(config, self.plan.game_lengths)
        tracker.registry = scheduler.registry
        for env in config.eval_envs:
            if env.num_players > 1:
                scheduler.registry.eval_opponent(env.fixed_opponent)
        for env_id, name in anchors(config).items():
            scheduler.registry.set_anchor(env_id, scheduler.registry.add_fixed(name, active=False).uid)

        def alarm(text: str) -> None:
            tracker.alarm(scheduler.registry.get(scheduler.registry.get_current_ckpt()).iteration or 0, text)

        publisher = Publisher(
            workers.engines,
            workers.learner,
            arena,
            canary_prompts=canary_prompts,
            max_loras=config.engine.max_loras,
            tolerance=config.learner.canary_tolerance,
            alarm=alarm,
        )

        def count(record: GameRecord) -> None:
            tracker.add_record(record)
            guard.add_record(record)

        def begin(spec: GameSpec) -> None:
            tracker.begin_game(spec)
            guard.begin_game(spec)

        collector = Collector(scheduler, buffer, seats, arena, config.run, count, lock_step, environments, begin)
        engines = zip(workers.engines.engines, self.plan.engine_devices, strict=False)  # others are elsewhere
        sleepers = [engine for engine, device in engines if device in self.plan.shared_devices]
        turns = Turns(
            sleepers if config.run.mode == "sleep" else [], publisher.restore, learning=collector.clock_stopped
        )
        say = self._terminal.say
        guard = Guard(config, directory, buffer, tracker, say, collector.going, self._stop)

        loop_watch.alarm = alarm
        return Training(
            plan=self.plan,
            directory=directory,
            workers=workers,
            supervisors=[
                *_supervisors(config, workers, publisher, turns, alarm),
                *_attendants(workers, publisher, alarm, self._terminal.say),
            ],
            arena=arena,
            registry=scheduler.registry,
            scheduler=scheduler,
            buffer=buffer,
            collector=collector,
            publisher=publisher,
            turns=turns,
            pool=OpponentPool(
                config.league,
                self.plan.active_checkpoints,
                scheduler.registry,
                arena,
                publisher,
                directory / "adapters",
                alarm,
            ),
            tracker=tracker,
            guard=guard,
            terminal=self._terminal,
            loop_watch=loop_watch,
            resume_from=checkpoint,
            stop=self._stop,
        )

    def _run_in_thread(self, is_over: threading.Event) -> None:
        try:
            self._summary = run_in_loop(self.execute())
        except BaseException as error:  # raised again by wait(), in the thread that asks
            self._error = error
        finally:
            is_over.set()

    def _wait_for_end(self) -> None:
        while self._is_over is not None and not self._is_over.is_set():
            try:
                self._is_over.wait()  # Python up to 3.12 takes a thread for ended whose `join` was interrupted
            except KeyboardInterrupt:
                self._tell_loop(self._interrupt)

    def _wait_at_exit(self) -> None:
        if self._is_over is not None and not self._is_over.is_set():
            self._terminal.say("the script has ended; the run goes on (Ctrl-C: finish the update, save, end)")
        self._wait_for_end()
        if self._error is not None and not self._is_told_of:
            print(f"error: the run has ended: {visible(str(self._error))}", file=sys.stderr)  # noqa: T201

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """Ctrl-C once: finish the update at hand, save, end well. Twice: end now. So where the terminal is closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
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
        elif not self._is_up:
            self._terminal.say("interrupted while the workers start: ending them; there is nothing to save")
            self._whole_run.cancel()
        else:
            self._terminal.say("interrupted: finishing the update at hand, then saving (Ctrl-C again: end now)")
            self._stop.set()


def _is_called_by_import() -> bool:
    """Whether this package, here or in a worker, imports the file that calls `start`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("unstable_lite."):
            return True
        frame = frame.f_back
    return False


def run_in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where it exists, with few garbage collections."""
    loop_factory: Any = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as loop_factory
    with _few_collections(), asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(coroutine)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Nearly all that games leave behind goes by reference counts. To look for the rest every 700 objects, and through
    everything that was ever imported, was a third of the cost of a turn (bench/LOG.md)."""
    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


def _supervisors(
    config: Config, workers: Workers, publisher: Publisher, turns: Turns, alarm: Callable[[str], None]
) -> list[Supervisor]:
    restore: dict[str, Callable[[], Awaitable[None]]] = {"learner": workers.learner.restore}
    restore |= {engine.peer.name: partial(publisher.restore, engine) for engine in workers.engines.engines}
    restore |= {engine.peer.name: partial(turns.restore, engine) for engine in turns.engines}
    starting = {engine.peer.name: turns.starting for engine in turns.engines}
    engine, learner = config.engine, config.learner
    timeouts = {"learner": (learner.start_timeout_s, learner.update_timeout_s)}
    return [
        Supervisor(
            process,
            config.run,
            *timeouts.get(process.peer.name, (engine.start_timeout_s, engine.stall_timeout_s)),
            restore=restore[process.peer.name],
            alarm=alarm,
            starting=starting.get(process.peer.name, contextlib.nullcontext),
        )
        for process in workers.processes
    ]


def _attendants(
    workers: Workers, publisher: Publisher, alarm: Callable[[str], None], say: Callable[[str], None]
) -> list[Attendant]:
    first = len(workers.engines.engines) - len(workers.remote)
    return [
        Attendant(worker, partial(publisher.restore, engine), alarm, say)
        for worker, engine in zip(workers.remote, workers.engines.engines[first:], strict=True)
    ]


def _scheduler(config: Config) -> GameScheduler:
    registry = ModelRegistry(beta=config.league.trueskill_beta)
    model_sampler = build_model_sampler(config.league, registry, _stream(config, "opponents"))
    run, shares_by = config.run, config.league.shares_by
    return GameScheduler(model_sampler, build_env_sampler(config), run.seed, run.group_size, shares_by)


def make_buffer(config: Config) -> StepBuffer | EpisodeBuffer:
    """Return the buffer that a resolved config asks for."""
    final, step, sampling = build_reward_transformations(config.rewards)
    common: dict[str, Any] = {
        "final_reward_transformation": final,
        "step_reward_transformation": step,
        "sampling_reward_transformation": sampling,
        "max_staleness": config.buffer.max_staleness,
        "rng": _stream(config, "buffer"),
        "batch_delay": config.buffer.batch_delay_buffer,
        "filter_opponent_invalid": config.run.filter_opponent_invalid,
    }
    if config.buffer.kind == "episodes":
        return EpisodeBuffer(config.buffer_size, **common)
    return StepBuffer(
        config.buffer_size,
        **common,
        group_size=config.run.group_size,
        group_baseline=GROUP_BASELINES[config.group_baseline] if config.group_baseline else None,
    )


def _stream(config: Config, purpose: str) -> random.Random:
    """A private stream for one of the orchestrator's own choices."""
    return random.Random(derive_seed(config.run.seed, purpose))


def _sinks(config: Config, directory: Path, resumed_after: int | None) -> list[Sink]:
    tensorboard = TensorBoardSink(directory / "tensorboard")
    if resumed_after is None:
        tensorboard.lay_out(config)
    rich: list[RichSink] = [tensorboard]
    raw = config.model_dump(mode="json")
    if config.tracker.wandb_project:
        from unstable_lite.trackers.wandb import WandbSink

        rich.append(WandbSink(config.tracker.wandb_project, directory, raw))
    texts = {"run/config": to_toml(raw), "run/versions": json.dumps(versions(), indent=2)}
    for sink in rich:
        sink.log_texts(resumed_after or 0, texts)
    return [JsonlSink(directory / "metrics.jsonl"), *rich]


def _canary_prompts(config: Config, templates: Mapping[str, Template]) -> list[str]:
    """Return what first players are shown in up to CANARY_PROMPTS different games, of all envs in turn.

    An env whose reset is slow, or which needs a process of its own, gives one prompt.
    """
    prompts: dict[str, None] = {}
    for seed in range(CANARY_PROMPTS):
        for spec in config.train_envs:
            if len(prompts) == CANARY_PROMPTS:
                break
            if seed and is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated):
                continue
            _, observation = Environment(spec.env_id, spec.num_players, seed, spec.observation).observe()
            prompts[format_prompt(spec.prompt_template, observation, spec.num_players, templates)] = None
    return list(prompts)


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Ctrl-C, or a request to end: workers end first, then this process does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, task.cancel)
    try:
        yield
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)


class _LogFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk a line is lost, and no run."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Everything that this package logs, in one file."""
    handler = _LogFile(path, maxBytes=LOG_BYTES, backupCount=LOG_BACKUPS, encoding="utf-8")
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("unstable_lite")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        with contextlib.suppress(OSError):  # what it could not write it tries once more
            handler.close()


def first_reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended the run: the first of our own errors in the group, else its first error."""
    reason: BaseException = group.subgroup(UnstableError) or group
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    return reason
