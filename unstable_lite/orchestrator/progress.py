"""Progress of a run: its counters and current policy, the metrics of each update, the live line, and live.json."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from msgspec.structs import asdict

from unstable_lite.dashboards.terminal import key_value_lines
from unstable_lite.files import replaced
from unstable_lite.orchestrator.checkpoint_pool import TrainedPolicy
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.orchestrator.workers import environment
from unstable_lite.planning.policies import furthest_behind
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.rollout.rejection import MOST_JUDGED
from unstable_lite.tracking.displayed_metrics import METRICS, duration, metrics_of_env, named
from unstable_lite.tracking.intervals import percent
from unstable_lite.tracking.result_rows import ResultRow, row_label
from unstable_lite.tracking.run_directory import LIVE, LIVE_EVERY_S
from unstable_lite.transport.messages import Updated
from unstable_lite.transport.rpc import WorkerChannel
from unstable_lite.types import Batch, uid_of

MOST_SHOWN = 4
"""Most results below the progress."""


class Progress:
    def __init__(self, parts: RunParts) -> None:
        self.training_seconds = 0.0
        """Time from the first training game to the last update."""
        self._parts = parts
        self._started = time.monotonic()
        self._updates_before = self._games_before = self._tokens_before = 0
        """Number of updates, of games played and of tokens generated before training started, or resumed."""

    @property
    def updates(self) -> int:
        """Number of updates of all policies."""
        return sum(policy.updates for policy in self._parts.policies.values())

    @property
    def skipped(self) -> int:
        """Number of batches that made no update."""
        return sum(policy.skipped for policy in self._parts.policies.values())

    @property
    def next_to_learn(self) -> TrainedPolicy:
        """Policy whose number of updates is the furthest behind its share."""
        updates = {name: policy.updates for name, policy in self._parts.policies.items()}
        return self._parts.policies[furthest_behind(updates, self._parts.plan.config.shares)]

    @property
    def is_over(self) -> bool:
        """Whether all updates are made, or the run is asked to stop."""
        return self.updates >= self._parts.plan.config.run.learning_steps or self._parts.stop.is_set()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Measure the time of training, and show the live line."""
        parts, config = self._parts, self._parts.plan.config
        self._started, self._games_before = time.monotonic(), parts.tracker.games_finished
        self._updates_before = self.updates
        self._tokens_before = parts.workers.engines.generated_tokens
        parts.terminal.start(
            config.run.learning_steps,
            lambda: (self.next_to_learn.buffer.size(), self.next_to_learn.config.learner.batch_size),
            self.updates,
            status=self._answers,
        )
        yield
        self.training_seconds = time.monotonic() - self._started
        parts.terminal.stop()

    def count_skipped(self, policy: TrainedPolicy, reason: str) -> None:
        """Count a batch of which the learner made no update."""
        policy.skipped += 1
        policy.skipped_in_a_row += 1
        self._parts.alarm(named(policy.name, f"skipped a batch: {reason}"))
        self._parts.health.check_skipped(policy.skipped_in_a_row, reason, policy.name)

    async def report(self, policy: TrainedPolicy, batch: Batch, updated: Updated, metrics: dict[str, float]) -> None:
        """Write the steps of a policy's update and its line of metrics, and raise the alarms that follow from them.

        `metrics`: those that only the train loop knows, its times and the canary's.
        """
        parts, tracker = self._parts, self._parts.tracker
        policy.skipped_in_a_row = 0
        metrics |= {f"learner/{name}": value for name, value in updated.metrics.items()}
        metrics |= await parts.health.measure(batch)
        await tracker.add_train_data(self.updates, policy.version - 1, batch, updated.logprobs)
        metrics |= self._engine_metrics() | self._buffer_metrics(policy) | self._league_metrics(policy)
        metrics |= {
            "learner/skipped_updates": policy.skipped,
            "run/tokens_per_s": self._tokens_per_s(),
            "run/arena_bytes": parts.store.bytes_used(),
            "transport/dropped_frames": parts.workers.router.dropped_frames,
            **parts.collector.seats.metrics(),
            **parts.watchdog.metrics(),
        }
        retries, size = "learner/oom_retries", "learner/max_tokens_per_micro_batch"
        old = {name: tracker.latest.get(uid_of(policy.name, name)) for name in (retries, size, "buffer/filled")}
        # Not for an attempt to grow again that ended at the size before.
        if metrics[size] < (old[size] or math.inf) and metrics[retries] > (old[retries] or 0.0):
            parts.alarm(
                "the learner ran out of memory and did the update again; a micro-batch now has at most "
                f"{metrics[size]:.0f} tokens"
            )
        metrics |= await parts.exact.metrics(policy)  # after the metrics of the update's own sleep
        metrics |= parts.health.check_update(self.updates, metrics, policy.name)
        if (filled := metrics.get("buffer/filled", 0)) and not old["buffer/filled"]:
            parts.terminal.say(
                f"update {self.updates}: {filled:.0f} steps of its batch have results that are all alike, because "
                f"{MOST_JUDGED} batches of steps brought too few others (rewards.reject_zero_signal, buffer/filled)"
            )
        tracker.log_update(self.updates, metrics, updated.histograms, *filter(None, [policy.name]))
        current = {each.registry.get_current_ckpt() for each in parts.policies.values()}
        tracker.end_evaluations(still_playing={*current, *+parts.collector.evaluating})
        status = "  ".join([*self._reward(), self._pace(), *self._ended_early()]) + parts.health.status()
        parts.terminal.show_update(self.updates, parts.plan.config.run.learning_steps, status)

    def _engine_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for engine in self._parts.workers.engines.engines:
            name, stats = engine.channel.name, asdict(engine.stats)
            stats["tok_s"] = stats.pop("tokens_per_s")
            metrics |= {f"inference/{name}/{key}": value for key, value in stats.items()}
            if stats["oom_retries"] > self._parts.tracker.latest.get(f"inference/{name}/oom_retries", 0):
                self._parts.alarm(f"{name} ran out of memory; it now runs fewer requests at once (see its log)")
        return metrics | self._parts.colocation.metrics()

    def _buffer_metrics(self, policy: TrainedPolicy) -> dict[str, float]:
        buffer = policy.buffer
        metrics: dict[str, float] = {
            "buffer/size": buffer.size(),
            "buffer/dropped_stale": buffer.dropped_stale,
            "buffer/dropped_share": buffer.dropped_lately / max(buffer.left_lately, 1),
            "buffer/left": buffer.left_lately,
            **buffer.counts.metrics(),
            "buffer/filtered_opponent_invalid": buffer.filtered,
        }
        if policy.config.group_baseline is not None and isinstance(buffer, StepBuffer):
            metrics["buffer/steps_in_groups"] = buffer.steps_in_groups
            metrics |= {f"buffer/groups_{name}": count for name, count in buffer.group_counts.items()}
        if policy.name:
            metrics["buffer/ended_lineages"] = buffer.drained
        if (rejection := getattr(buffer, "rejection", None)) is not None:
            metrics |= rejection.metrics()
        if buffer.in_flight is not None:
            metrics["buffer/steps_in_flight"] = buffer.in_flight.steps
            all_games = self._parts.collector.games_in_flight["train"]
            metrics["run/games_in_flight"] = all_games if policy.name else len(buffer.in_flight)
        if self._parts.plan.num_eval_workers and hasattr(self._parts.collector, "eval_share"):
            metrics["run/eval_share"] = self._parts.collector.eval_share
        return metrics

    def _league_metrics(self, policy: TrainedPolicy) -> dict[str, float]:
        parts, current = self._parts, policy.registry.get(policy.registry.current.uid)
        metrics: dict[str, float] = {
            "league/active_checkpoints": len(policy.registry.checkpoints()),
            "league/returned_checkpoints": policy.pool.num_returned,
            "league/waits_for_adapter_slot": parts.adapter_sync.num_waits,
            "trueskill/current mu": current.rating.mu,
            "trueskill/current sigma": current.rating.sigma,
        }
        if policy.name:
            metrics |= {"league/lineage": policy.lineage, "league/kept": len(parts.registry.population)}
        for env_id, (mu, sigma) in current.ratings.items():
            metrics |= {f"trueskill/{env_id} current mu": mu, f"trueskill/{env_id} current sigma": sigma}
        return metrics

    def _answers(self) -> str:
        """Return a line for each of three questions; metrics of an update are those of the last one."""
        rows = self._parts.results()
        answers = ("Did it learn?", "  ".join(self._learned(rows))), ("Can I believe it?", self._believable(rows))
        return key_value_lines([*answers, ("How long yet?", self._pace())])

    def _learned(self, rows: Sequence[ResultRow]) -> Iterator[str]:
        """Yield the newest results, each group with its update, and the reward in training."""
        config, step = self._parts.plan.config, -1
        for row in rows[:MOST_SHOWN]:
            newest, change = row.newest, f" ({row.change_text})" * (row.change is not None)
            when = f"update {newest.step}{' (before training)' * (not newest.step)}: " * (newest.step != step)
            yield f"{when}{row.label} {newest.value_text}{change}"
            step = newest.step
        if len(rows) > MOST_SHOWN:
            yield f"and {len(rows) - MOST_SHOWN} more"
        if not rows:
            yield from self._beside_training() if not config.run.eval_games else ["no evaluation has ended yet"]
        yield from self._reward()

    def _beside_training(self) -> list[str]:
        """Return the points of the newest evaluation games beside training, which have no quota."""
        latest, cells, shown = self._parts.tracker.latest, self._parts.plan.config.eval_cells, list[str]()
        for policy, (env_id, opponent) in list(product(self._parts.plan.config.shares, cells))[:MOST_SHOWN]:
            if (name := uid_of(policy, f"evaluation-{env_id} ({opponent})/Points")) in latest:
                n = f"n={latest[name.replace('/Points', '/n')]:.0f}, beside training"
                shown.append(f"{row_label(env_id, opponent, cells, policy)} {percent(latest[name])} ({n})")
        has_games = self._parts.plan.num_eval_workers and cells
        none = "no evaluation game has ended yet" if has_games else "no evaluation, because run.eval_games is 0"
        return shown or [none]

    def _reward(self) -> Iterator[str]:
        """Yield each policy's mean reward of the newest training games of the first env, if there are any."""
        first, *_ = metrics_of_env(self._parts.plan.config.train_envs[0].env_id)
        for policy in self._parts.plan.config.shares:
            reward = first.of(policy)
            if reward.name in (latest := self._parts.tracker.latest):
                n = latest[reward.name.replace("/reward", "/n")]
                yield named(policy, f"training {reward.shown(latest)} (n={n:.0f})")

    def _believable(self, rows: Sequence[ResultRow]) -> str:
        """Return the numbers of games without a proper end, the staleness, and the alarms."""
        tracker = self._parts.tracker
        items = [f"void games {tracker.void_games}", *self._ended_early()]
        items += [f"{row.label}: {remark}" for row in rows for remark in row.newest.remarks]
        for policy in self._parts.plan.config.shares:
            shown = [METRICS[name].of(policy) for name in ("learner/staleness_mean", "learner/entropy")]
            if shown[0].name in tracker.latest:
                items.append(named(policy, "  ".join(metric.shown(tracker.latest) for metric in shown)))
        return "  ".join(items) + (self._parts.health.status() or "  no alarm")

    def _ended_early(self) -> Iterator[str]:
        if ended := self._parts.tracker.ended_early():
            yield "ended early: " + ", ".join(ended[:3] + ["…"] * (len(ended) > 3))

    def _pace(self) -> str:
        """Return the time that is left, and the rates since training started."""
        seconds, updates = max(time.monotonic() - self._started, 1e-9), self.updates - self._updates_before
        games, missing = self._parts.tracker.games_finished, self._parts.plan.config.run.learning_steps - self.updates
        left = f"{duration(seconds / updates * missing)} left" if updates else "known after an update"
        rate = (games - self._games_before) / seconds
        return f"{left}  games {games:,} ({rate:.1f}/s)  tokens/s {self._tokens_per_s():,.0f}"

    def _tokens_per_s(self) -> float:
        """Return the mean rate since training started."""
        generated = self._parts.workers.engines.generated_tokens - self._tokens_before
        return generated / max(time.monotonic() - self._started, 1e-9)


@contextlib.contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the duration of a `with` block to `metrics`, in seconds."""
    started = time.monotonic()
    yield
    metrics[name] = time.monotonic() - started


@contextlib.asynccontextmanager
async def shown_live(parts: RunParts) -> AsyncIterator[Mapping[str, Any]]:
    """Write the state to live.json of the run directory while the body runs, for dashboards in other processes.

    Replaced atomically every LIVE_EVERY_S seconds, so that readers ask the run nothing. The last state stays, marked as
    ended, and as failed if the body raised. Yields the newest state, which is empty at first.
    """
    state: dict[str, Any] = {}

    def write(**ending: bool) -> None:
        state.update(_picture(parts) | ending)
        # A full disk is reported by writers that matter more.
        with contextlib.suppress(OSError), replaced(parts.directory / LIVE) as partial:
            partial.write_text(json.dumps(state), encoding="utf-8")

    async def keep_writing() -> None:
        while True:
            write(has_ended=False, has_failed=False)
            await asyncio.sleep(LIVE_EVERY_S)

    writing = asyncio.create_task(keep_writing())
    try:
        yield state
    finally:
        writing.cancel()
        write(has_ended=True, has_failed=sys.exception() is not None)


def _picture(parts: RunParts) -> dict[str, Any]:
    stats = {engine.channel.name: asdict(engine.stats) for engine in parts.workers.engines.engines}
    workers = [
        {
            "name": name,
            "pid": pid,
            "device": device,
            "gpu": environment((device,), 1)["CUDA_VISIBLE_DEVICES"],
            "state": channel.state.value,
            "waited_for": channel.num_pending,
            "stats": stats.get(name),
        }
        for name, channel, pid, device in _places(parts)
    ]
    return {
        "time": time.time(),
        "pid": os.getpid(),
        "learning_steps": parts.plan.config.run.learning_steps,
        **dataclasses.asdict(parts.tracker.totals),
        "workers": workers,
    }


def _places(parts: RunParts) -> Iterator[tuple[str, WorkerChannel, int | None, int | str]]:
    """Yield name, channel, process id and device of each worker and of each rank of the learner.

    Of an engine's GPUs it is the first. A rank on another machine has no process id.
    """
    plan, workers = parts.plan, parts.workers
    devices = [*(devices[:1] for devices in plan.devices_by_engine), plan.learner_devices]
    for process, own in zip(workers.processes, devices, strict=True):
        for rank, device in zip(process.ranks, own, strict=True):
            yield rank.channel.name, process.channel, rank.pid, device
    learner = next(iter(workers.learners.values()))
    for rank_index in range(len(plan.learner_devices), plan.num_ranks):
        yield f"learner-{rank_index}", learner.channel, None, "elsewhere"
