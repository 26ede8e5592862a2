"""The run itself, on one page: evaluate; play and learn at the same time; evaluate again.

Everything that plays, learns, counts or saves is given to it, ready; it says in which order.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unstable_lite.buffers import EpisodeBuffer, StepBuffer
from unstable_lite.checkpoints import Checkpoint, replace_config, save_checkpoint
from unstable_lite.collector import Collector
from unstable_lite.config import RunConfig
from unstable_lite.errors import NoRoomError, UnstableError
from unstable_lite.guard import Guard
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.loop_watch import LoopWatch
from unstable_lite.opponent_pool import OpponentPool
from unstable_lite.plan import Plan
from unstable_lite.publisher import Publisher
from unstable_lite.supervision import Attendant, Supervisor
from unstable_lite.trackers.terminal import TerminalInterface
from unstable_lite.trackers.tracker import Tracker, summarise_evaluation
from unstable_lite.transport.adapters import AdapterArena
from unstable_lite.turns import Turns
from unstable_lite.types import Batch, EvalEnvSpec, GameRecord, Histogram, ModelRef
from unstable_lite.workers import Workers

T = TypeVar("T")


@dataclass(kw_only=True)
class Training:
    plan: Plan
    directory: Path
    workers: Workers
    supervisors: list[Supervisor | Attendant]
    arena: AdapterArena
    registry: ModelRegistry
    scheduler: GameScheduler
    buffer: StepBuffer | EpisodeBuffer
    collector: Collector
    publisher: Publisher
    turns: Turns
    pool: OpponentPool
    tracker: Tracker
    guard: Guard
    terminal: TerminalInterface
    loop_watch: LoopWatch
    resume_from: Checkpoint | None
    stop: asyncio.Event
    """Set: finish the update at hand, save, and end."""
    updates: int = 0
    version: int = 0
    """Of the newest adapter: `updates`, or one more where training starts from an adapter."""
    skipped: int = 0
    seconds: float = 0.0
    """From the first training game to the last update."""
    checkpoint: Path | None = None
    """The newest one."""
    _is_save_due: bool = False
    _has_save_failed: bool = False
    """The last try to write a checkpoint."""
    _saving: asyncio.Task[None] | None = None
    """A checkpoint that is written beside the updates, the newest one of those."""
    _saved: int = 0
    """The update that `checkpoint` is of."""
    _skipped_in_a_row: int = 0
    _started: float = field(default_factory=time.monotonic)
    _games_before: int = 0
    _tokens_before: int = 0
    """Played and generated before it."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(supervisor.run()) for supervisor in self.supervisors]
            background.append(tasks.create_task(self.publisher.retire_unreferenced()))
            background.append(tasks.create_task(self.pool.run()))
            background.append(tasks.create_task(self.guard.watch_for_steps()))
            with self.terminal.doing(lambda: "trying the adapter on every engine"):
                await self._start_policy()
            if self.resume_from is None:
                await self._evaluate("before")
            elif self._is_evaluated():
                await self._evaluate(f"update {self.updates}")
            if self.plan.config.run.mode == "sync":
                await self._learn_in_turns()
            else:
                await self._learn(tasks)
            saved, _ = await self._save_newest(is_last=True)
            if self.stop.is_set():
                self.terminal.say(f"{f'{saved.name} is saved' if saved else 'nothing to save'}; ending the workers")
            else:
                await self._evaluate("after")
            for task in background:
                task.cancel()

    async def _learn(self, tasks: asyncio.TaskGroup) -> None:
        """Updates while games are played, until there are enough of them."""
        config = self.plan.config.run
        collecting = tasks.create_task(self.collector.run(config.num_collection_workers, self.plan.num_eval_workers))
        evaluations: list[asyncio.Task[None]] = []
        with self._timed():
            while self.updates < config.learning_steps and not self.stop.is_set():
                if await self._update():
                    if self._is_save_due and (self._saving is None or self._saving.done()):
                        self._saving = tasks.create_task(self._write(self.updates, self._checkpoint()))
                    if self._is_evaluated():
                        evaluations.append(tasks.create_task(self._evaluate(f"update {self.updates}")))
                await self.guard.pause_if_asked(self._save_newest)
        collecting.cancel()
        for evaluation in evaluations:
            await evaluation

    async def _learn_in_turns(self) -> None:
        """Play a round, learn from it, and so on: whatever is waited for, nothing else goes on."""
        config, batch_size = self.plan.config.run, self.plan.config.learner.batch_size
        with self._timed():
            while self.updates < config.learning_steps and not self.stop.is_set():
                await self.pool.settled()
                await self.publisher.retired()
                if not self.buffer.has_batch(batch_size, self.version):
                    await self.collector.play_round(config.num_collection_workers)
                elif await self._update():
                    if self._is_save_due:
                        await self._save()
                    if self._is_evaluated():
                        await self._evaluate(f"update {self.updates}")
                await self.guard.pause_if_asked(self._save_newest)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """The live line is there meanwhile."""
        self._started, self._games_before = time.monotonic(), self.tracker.games_finished
        self._tokens_before = self.workers.engines.generated_tokens
        self.terminal.start(
            self.plan.config.run.learning_steps, self._batch_progress, self.updates, figures=self._one_line
        )
        yield
        self.seconds = time.monotonic() - self._started
        self.terminal.stop_counting()

    def _is_evaluated(self) -> bool:
        """Whether this update is one of those to evaluate after; the last one is in any case."""
        run = self.plan.config.run
        return self.updates < run.learning_steps and is_evaluated(run, self.updates)

    async def _update(self) -> bool:
        """One batch, one optimiser step, one adapter version that every engine holds and games may ask for.

        False where it did not come to that: the batch was skipped, or the run is to stop or to pause.
        """
        config, version = self.plan.config, self.version + 1
        started = time.monotonic()
        waiting: Coroutine[Any, Any, Batch] = self.buffer.get_batch(config.learner.batch_size, self.version)
        batch = await self._unless_stopped(waiting)
        if batch is None:
            return False
        waited_s = time.monotonic() - started
        self.pool.make_room()
        asked = time.monotonic()
        async with self.turns.learner():
            updated = await self._write_version(version, partial(self.workers.learner.update, batch, version))
        if updated.skipped is not None:
            self._count_skipped(updated.skipped)
            return False
        slept_s, published = time.monotonic() - asked, time.monotonic()
        canary = await self.publisher.publish(version, updated.digest)
        self.updates += 1
        self._skipped_in_a_row = 0
        self._offer(f"ckpt-{self.updates}", version)
        figures = {f"learner/{name}": value for name, value in updated.metrics.items()} | canary
        figures["learner/wait_for_batch_s"] = waited_s
        if self.turns.engines:
            figures["inference/asleep_s"] = slept_s
        figures["learner/publish_s"] = time.monotonic() - published
        figures |= await self.guard.measure(batch)
        await self.tracker.add_train_data(self.updates, version - 1, batch, updated.logprobs)
        self._report(figures, updated.histograms)
        is_due = self._is_save_due or self.updates % config.run.checkpoint_every == 0
        self._is_save_due = is_due and self.updates < config.run.learning_steps
        return True

    async def _write_version(self, version: int, write: Callable[[Path, Path], Awaitable[T]]) -> T:
        """What the learner says to the two places that it is to write to; again, if shared memory has become full."""
        arena = self.arena
        try:
            return await write(arena.path(version), arena.learner_state(version))
        except NoRoomError as error:
            if not arena.fall_back():
                raise
            self._alarm(f"{error}. From now on adapters go through {arena.directory}")
            return await write(arena.path(version), arena.learner_state(version))

    def _offer(self, uid: str, version: int) -> None:
        """From here on games may ask for this version."""
        self.version = version
        self.pool.admit(uid, version, self.updates)
        self.collector.tell_new_checkpoint()

    async def _start_policy(self) -> None:
        """Try the base on every engine, and the adapter that training starts from, if there is one."""
        canary = await self.publisher.check_base()
        if self.resume_from is not None:
            canary = await self._resume(self.resume_from)
        elif self.plan.config.lora.initial_lora_path is not None:
            digest = await self._write_version(1, partial(self.workers.learner.publish, 1))
            canary = await self.publisher.publish(1, digest)
            self._offer("initial", 1)
        self.terminal.say(
            f"engine and learner agree about {self.registry.current.uid}: mean |Δ log p| "
            f"{canary['canary/mismatch']:.5f} over {canary['canary/n']:.0f} tokens"
        )

    async def _resume(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Everything as it was when `checkpoint` was written; the games that were in flight then are not."""
        state = checkpoint.state
        with checkpoint.understood():
            self.updates, self.version, self.skipped = state["updates"], state["version"], state["skipped_updates"]
            self.registry.load_state_dict(state["registry"])
            for left_out in self.scheduler.load_state_dict(state["scheduler"]):
                self.terminal.say(left_out)
            self.buffer.load_state_dict(state["buffer"])
            self.publisher.load_state_dict(state["publisher"])
            self.collector.load_state_dict(state["collector"])
            self.collector.seats.load_state_dict(state["seats"])
            self.pool.load_state_dict(state["pool"])
        self.checkpoint, self._saved = checkpoint.directory, self.updates
        self.buffer.refill(checkpoint.waiting)
        learner, version = self.workers.learner, self.version
        await learner.load(checkpoint.directory)
        digest = await self._write_version(version, partial(learner.publish, version))
        canary = await self.publisher.publish(version, digest)
        await self.pool.resume()
        with checkpoint.understood():
            self.guard.load_state_dict(state["guard"])
        replace_config(self.directory, self.plan.config, self.updates)  # it serves: all of the state came to its place
        return canary

    async def _evaluate(self, label: str) -> None:
        """On every env that the newest policy has not been evaluated on: a resume may find it on the way."""
        config = self.plan.config
        if not config.run.eval_games or self.stop.is_set():
            return
        model, step = self.registry.current, self.updates
        known = self._evaluated()
        envs = [env for env in config.eval_envs if (env.env_id, env.opponent) not in known]
        with self.arena.held(model.adapter_version or 0):  # the policy moves on, from one env to the next, too
            for env in envs:
                if not await self._evaluate_on(env, model, step, label):
                    return

    async def _evaluate_on(self, env: EvalEnvSpec, model: ModelRef, step: int, label: str) -> bool:
        """False where it was broken off."""
        run = self.plan.config.run
        records: list[GameRecord] = []
        what = f"evaluation {label}: {env.env_id}"
        playing = self.collector.evaluate(
            env, model, run.eval_games, label, concurrency=run.num_collection_workers, records=records
        )
        with self.terminal.doing(partial(_so_far, what, records, run.eval_games)):
            if await _unless_set(playing, self.stop) is None:
                self.terminal.say(f"broken off: {_so_far(what, records, run.eval_games)}")
                return False
        evaluation = summarise_evaluation(label, step, model, env.env_id, env.opponent, records)
        self.tracker.add_evaluation(evaluation)
        self.terminal.say(f"evaluation {label}: {evaluation.describe()}")
        same = [e for e in self.tracker.evaluations if (e.env_id, e.opponent) == (env.env_id, env.opponent)]
        if same[0] is not evaluation and (change := evaluation.describe_change(same[0])) is not None:
            self.terminal.say(f"evaluation {label}: {change}")
        self.guard.check_evaluation(evaluation)
        return True

    def _evaluated(self) -> list[tuple[str, str]]:
        """Env and opponent of each evaluation of the newest policy that is over."""
        return [(e.env_id, e.opponent) for e in self.tracker.evaluations if e.step == self.updates]

    def _count_skipped(self, reason: str) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        self._alarm(f"skipped a batch: {reason}")
        self.guard.check_skipped(self._skipped_in_a_row, reason)

    def _report(self, figures: dict[str, float], histograms: Sequence[Histogram]) -> None:
        """One line of metrics, and the alarms that follow from them."""
        door = self.workers.door
        for engine in self.workers.engines.engines:
            group = f"inference/{engine.peer.name}"
            figures[f"{group}/queued"] = engine.stats.queued
            figures[f"{group}/running"] = engine.stats.running
            figures[f"{group}/tok_s"] = engine.stats.tokens_per_s
            figures[f"{group}/cached_share"] = engine.stats.cached_share
            figures[f"{group}/oom_retries"] = engine.stats.oom_retries
            if engine.stats.oom_retries > self.tracker.latest.get(f"{group}/oom_retries", 0):
                self._alarm(f"{engine.peer.name} ran out of memory; it now runs fewer requests at once (see its log)")
        rating = self.registry.get(self.registry.current.uid).rating
        figures |= {
            "buffer/size": self.buffer.size(),
            "buffer/dropped_stale": self.buffer.dropped_stale,
            "buffer/dropped_share": self.buffer.dropped_lately / max(self.buffer.left_lately, 1),
            "buffer/left": self.buffer.left_lately,
            **self.buffer.step_metrics(),
            "buffer/filtered_opponent_invalid": self.buffer.filtered,
            "learner/skipped_updates": self.skipped,
            "league/active_checkpoints": len(self.registry.checkpoints()),
            "league/returned_checkpoints": self.pool.num_returned,
            "league/waits_for_adapter_slot": self.publisher.num_waits,
            "run/tokens_per_s": self._tokens_per_s(),
            "run/arena_bytes": self.arena.bytes_used(),
            "transport/dropped_frames": self.workers.router.dropped_frames + (door.dropped_frames if door else 0),
            "transport/refused_connections": door.refused if door else 0,
            **self.collector.seats.figures(),
            **self.loop_watch.figures(),
            "trueskill/current mu": rating.mu,
            "trueskill/current sigma": rating.sigma,
        }
        for env_id, (mu, sigma) in self.registry.get(self.registry.current.uid).ratings.items():
            figures |= {f"trueskill/{env_id} current mu": mu, f"trueskill/{env_id} current sigma": sigma}
        if self.plan.config.group_baseline is not None and isinstance(self.buffer, StepBuffer):
            figures["buffer/steps_in_groups"] = self.buffer.steps_in_groups()
            figures |= {f"buffer/groups_{name}": count for name, count in self.buffer.group_counters().items()}
        if self.buffer.in_flight is not None:
            figures["buffer/steps_in_flight"] = self.buffer.in_flight.steps
            figures["run/games_in_flight"] = len(self.buffer.in_flight)
        if figures["learner/oom_retries"] > self.tracker.latest.get("learner/oom_retries", 0.0):
            self._alarm(
                "the learner ran out of memory and did the update again; from now on a micro-batch has at most "
                f"{figures['learner/max_tokens_per_micro_batch']:.0f} tokens"
            )
        figures |= self.guard.check_update(self.updates, figures)
        self.tracker.log_update(self.updates, figures, histograms)
        self.tracker.end_evaluations(still_playing={self.registry.get_current_ckpt(), *+self.collector.evaluating})
        self.terminal.show_update(self.updates, self.plan.config.run.learning_steps, self._one_line())

    def _one_line(self) -> str:
        """Of this moment, but for what only an update tells."""
        latest, seconds = self.tracker.latest, max(time.monotonic() - self._started, 1e-9)
        group = f"collection-{self.plan.config.train_envs[0].env_id}"
        games = self.tracker.games_finished
        parts = [
            f"games {games} ({(games - self._games_before) / seconds:.1f}/s)",
            f"tokens/s {self._tokens_per_s():.0f}",
        ]
        if f"{group}/reward" in latest:
            parts.append(f"reward {latest[f'{group}/reward']:+.2f} (n={latest[f'{group}/n']:.0f})")
        parts += self._against_fixed()
        if "learner/staleness_mean" in latest:
            parts += [f"staleness {latest['learner/staleness_mean']:.1f}", f"entropy {latest['learner/entropy']:.2f}"]
        return "  ".join(parts) + self.guard.status()

    def _tokens_per_s(self) -> float:
        """Since training began."""
        generated = self.workers.engines.generated_tokens - self._tokens_before
        return generated / max(time.monotonic() - self._started, 1e-9)

    def _against_fixed(self) -> Iterator[str]:
        """Yield the points in each eval env that can be won: of its last evaluation, else of the newest games."""
        eval_envs = self.plan.config.eval_envs
        in_order = sorted(self.tracker.evaluations, key=lambda e: e.step)  # they overlap, and end in any order
        told = {(e.env_id, e.opponent): e for e in in_order if math.isfinite(e.points)}
        for env in eval_envs:
            evaluation = told.get((env.env_id, env.fixed_opponent))
            group = f"evaluation-{env.env_id} ({env.fixed_opponent})"
            if evaluation is not None:
                points, n = evaluation.points, evaluation.n
            elif f"{group}/Points" in self.tracker.latest:
                points, n = self.tracker.latest[f"{group}/Points"], int(self.tracker.latest[f"{group}/n"])
            else:
                continue
            where = f" in {env.env_id}" * (len(eval_envs) > 1)
            yield f"points {points:.0%} against {env.fixed_opponent}{where} (n={n})"

    def _batch_progress(self) -> tuple[int, int]:
        return self.buffer.size(), self.plan.config.learner.batch_size

    def _alarm(self, text: str) -> None:
        self.tracker.alarm(self.updates, text)

    def _checkpoint(self) -> Coroutine[Any, Any, Path]:
        """Everything that has to survive, as it is at this moment; it is written while the result is awaited."""
        state = {
            "updates": self.updates,
            "version": self.version,
            "skipped_updates": self.skipped,
            "evaluated": self._evaluated(),
            "registry": self.registry.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "buffer": self.buffer.state_dict(),
            "publisher": self.publisher.state_dict(),
            "pool": self.pool.state_dict(),
            "tracker": self.tracker.state_dict(),
            "collector": self.collector.state_dict(),
            "seats": self.collector.seats.state_dict(),
            "guard": self.guard.state_dict(),
        }
        self.pool.tell_saving()
        self._is_save_due = False
        contents, learner = self.buffer.contents(), self.workers.learner
        return save_checkpoint(self.directory / "checkpoints", self.updates, state, contents, learner.save)

    async def _write(self, update: int, checkpoint: Coroutine[Any, Any, Path], is_last: bool = False) -> None:
        """The checkpoint of `update`. Where it cannot be written the one before it stays, and the next update tries
        again. Raises UnstableError if there is no next one.
        """
        try:
            path = await checkpoint
        except UnstableError as error:
            newest = f"the newest is {self.checkpoint.name}" if self.checkpoint else "there is none yet"
            if is_last:
                raise UnstableError(
                    f"the last checkpoint, of update {update}, could not be written, and {newest}: {error}\n"
                    f"(with some room it goes on: run --resume {shlex.quote(str(self.directory))})"
                ) from error
            if not self._has_save_failed:
                self._alarm(
                    f"a checkpoint could not be written, and {newest}; each update will try again until one can: "
                    f"{error}"
                )
            self._has_save_failed = self._is_save_due = True
            return
        if self._has_save_failed:
            self._alarm(f"checkpoints are written again: {path.name}")
        self._has_save_failed = False
        self.checkpoint, self._saved = path, update
        await self.pool.tell_saved()

    async def _save(self, is_last: bool = False) -> None:
        """A checkpoint of now, with all that followed from the last update."""
        await self.pool.settled()
        await self._write(self.updates, self._checkpoint(), is_last)

    async def _save_newest(self, is_last: bool = False) -> tuple[Path | None, int]:
        """A checkpoint of the last update, if there is none yet; the newest one, if there is any, and its update."""
        if self._saving is not None:
            await self._saving
        if self.updates != self._saved:
            await self._save(is_last)
        return self.checkpoint, self._saved

    async def _unless_stopped(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """The result, or None if the run is asked to stop or to pause first."""
        return await _unless_set(waiting, self.stop, self.guard.asks_for_pause)


def is_evaluated(config: RunConfig, update: int) -> bool:
    """Whether an evaluation with a quota follows update number `update`."""
    return update == config.learning_steps or (config.eval_every is not None and update % config.eval_every == 0)


async def _unless_set(waiting: Coroutine[Any, Any, T], *events: asyncio.Event) -> T | None:
    """The result, or None if one of `events` is set first; then `waiting` has ended, too."""
    task = asyncio.ensure_future(waiting)
    watching = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, *watching):
            one.cancel()
        await asyncio.wait([task])


def _so_far(what: str, records: Sequence[GameRecord], num_games: int) -> str:
    return f"{what}, {len(records)} of {num_games} games"
