"""Progress of a run: its counters and current policy, the metrics of each update, and the live line."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from msgspec.structs import asdict

from unstable_lite.config.games import against
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.transport.messages import Updated
from unstable_lite.types import Batch


class Progress:
    def __init__(self, parts: RunParts) -> None:
        self.updates = 0
        self.version = 0
        """Version of the newest adapter: `updates`, plus one if training started from an adapter."""
        self.skipped = 0
        """Number of batches that made no update."""
        self.training_seconds = 0.0
        """Time from the first training game to the last update."""
        self._parts = parts
        self._skipped_in_a_row = 0
        self._started = time.monotonic()
        self._games_before = 0
        """Number of games played before training started, or resumed."""
        self._tokens_before = 0
        """Number of tokens generated before it."""

    @property
    def is_over(self) -> bool:
        """Whether all updates are made, or the run is asked to stop."""
        return self.updates >= self._parts.plan.config.run.learning_steps or self._parts.stop.is_set()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Measure the time of training, and show the live line."""
        parts = self._parts
        self._started, self._games_before = time.monotonic(), parts.tracker.games_finished
        self._tokens_before = parts.workers.engines.generated_tokens
        batch_size = parts.plan.config.learner.batch_size
        parts.terminal.start(
            parts.plan.config.run.learning_steps,
            lambda: (parts.buffer.size(), batch_size),
            self.updates,
            status=self._live_line,
        )
        yield
        self.training_seconds = time.monotonic() - self._started
        parts.terminal.stop_counting()

    def promote(self, uid: str, version: int) -> None:
        """Make a synced version the current policy, which games ask for from now on."""
        self.version = version
        self._parts.pool.admit(uid, version, self.updates)
        self._parts.collector.tell_new_checkpoint()

    def count_skipped(self, reason: str) -> None:
        """Count a batch of which the learner made no update."""
        self.skipped += 1
        self._skipped_in_a_row += 1
        self._parts.alarm(f"skipped a batch: {reason}")
        self._parts.health.check_skipped(self._skipped_in_a_row, reason)

    async def report(self, batch: Batch, updated: Updated, metrics: dict[str, float]) -> None:
        """Write the update's steps and its line of metrics, and raise the alarms that follow from them.

        `metrics`: those that only the train loop knows, its times and the canary's.
        """
        parts = self._parts
        self._skipped_in_a_row = 0
        metrics |= {f"learner/{name}": value for name, value in updated.metrics.items()}
        metrics |= await parts.health.measure(batch)
        await parts.tracker.add_train_data(self.updates, self.version - 1, batch, updated.logprobs)
        metrics |= self._engine_metrics() | self._buffer_metrics() | self._league_metrics() | self._run_metrics()
        latest, size = parts.tracker.latest, metrics["learner/max_tokens_per_micro_batch"]
        # Not for an attempt to grow again that ended at the size before.
        if metrics["learner/oom_retries"] > latest.get("learner/oom_retries", 0.0) and size < latest.get(
            "learner/max_tokens_per_micro_batch", math.inf
        ):
            self._parts.alarm(
                "the learner ran out of memory and did the update again; a micro-batch now has at most "
                f"{size:.0f} tokens"
            )
        metrics |= await parts.exact.metrics(self.updates)  # after the metrics of the update's own sleep
        metrics |= parts.health.check_update(self.updates, metrics)
        parts.tracker.log_update(self.updates, metrics, updated.histograms)
        still_playing = {parts.registry.get_current_ckpt(), *+parts.collector.evaluating}
        parts.tracker.end_evaluations(still_playing=still_playing)
        parts.terminal.show_update(self.updates, parts.plan.config.run.learning_steps, self._live_line())

    def _engine_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for engine in self._parts.workers.engines.engines:
            name, stats = engine.channel.name, asdict(engine.stats)
            stats["tok_s"] = stats.pop("tokens_per_s")
            metrics |= {f"inference/{name}/{key}": value for key, value in stats.items()}
            if stats["oom_retries"] > self._parts.tracker.latest.get(f"inference/{name}/oom_retries", 0):
                self._parts.alarm(f"{name} ran out of memory; it now runs fewer requests at once (see its log)")
        return metrics | self._parts.colocation.metrics()

    def _buffer_metrics(self) -> dict[str, float]:
        buffer = self._parts.buffer
        metrics: dict[str, float] = {
            "buffer/size": buffer.size(),
            "buffer/dropped_stale": buffer.dropped_stale,
            "buffer/dropped_share": buffer.dropped_lately / max(buffer.left_lately, 1),
            "buffer/left": buffer.left_lately,
            **buffer.counts.metrics(),
            "buffer/filtered_opponent_invalid": buffer.filtered,
        }
        if self._parts.plan.config.group_baseline is not None and isinstance(buffer, StepBuffer):
            metrics["buffer/steps_in_groups"] = buffer.steps_in_groups
            metrics |= {f"buffer/groups_{name}": count for name, count in buffer.group_counts.items()}
        if buffer.in_flight is not None:
            metrics["buffer/steps_in_flight"] = buffer.in_flight.steps
            metrics["run/games_in_flight"] = len(buffer.in_flight)
        return metrics

    def _league_metrics(self) -> dict[str, float]:
        parts, current = self._parts, self._parts.registry.get(self._parts.registry.current.uid)
        metrics: dict[str, float] = {
            "league/active_checkpoints": len(parts.registry.checkpoints()),
            "league/returned_checkpoints": parts.pool.num_returned,
            "league/waits_for_adapter_slot": parts.adapter_sync.num_waits,
            "trueskill/current mu": current.rating.mu,
            "trueskill/current sigma": current.rating.sigma,
        }
        for env_id, (mu, sigma) in current.ratings.items():
            metrics |= {f"trueskill/{env_id} current mu": mu, f"trueskill/{env_id} current sigma": sigma}
        return metrics

    def _run_metrics(self) -> dict[str, float]:
        parts = self._parts
        return {
            "learner/skipped_updates": self.skipped,
            "run/tokens_per_s": self._tokens_per_s(),
            "run/arena_bytes": parts.store.bytes_used(),
            "transport/dropped_frames": parts.workers.router.dropped_frames,
            **parts.collector.seats.metrics(),
            **parts.watchdog.metrics(),
        }

    def _live_line(self) -> str:
        """Return the state of this moment; metrics of an update are those of the last one."""
        tracker, seconds = self._parts.tracker, max(time.monotonic() - self._started, 1e-9)
        latest, games = tracker.latest, tracker.games_finished
        group = f"collection-{self._parts.plan.config.train_envs[0].env_id}"
        items = [
            f"games {games} ({(games - self._games_before) / seconds:.1f}/s)",
            f"tokens/s {self._tokens_per_s():.0f}",
        ]
        if f"{group}/reward" in latest:
            items.append(f"reward {latest[f'{group}/reward']:+.2f} (n={latest[f'{group}/n']:.0f})")
        items += self._points()
        if "learner/staleness_mean" in latest:
            items += [f"staleness {latest['learner/staleness_mean']:.1f}", f"entropy {latest['learner/entropy']:.2f}"]
        return "  ".join(items) + self._parts.health.status()

    def _tokens_per_s(self) -> float:
        """Return the mean rate since training started."""
        generated = self._parts.workers.engines.generated_tokens - self._tokens_before
        return generated / max(time.monotonic() - self._started, 1e-9)

    def _points(self) -> Iterator[str]:
        """Yield the points in each eval env that can be won: of its last evaluation, else of the newest games."""
        eval_envs, tracker = self._parts.plan.config.eval_envs, self._parts.tracker
        in_order = sorted(tracker.evaluations, key=lambda e: e.step)  # they overlap, and end in any order
        newest = {(e.env_id, e.opponent): e for e in in_order if math.isfinite(e.points)}
        for env in eval_envs:
            evaluation = newest.get((env.env_id, env.opponent))
            group = f"evaluation-{env.env_id} ({env.opponent})"
            if evaluation is not None:
                points, n = evaluation.points, evaluation.n
            elif f"{group}/Points" in tracker.latest:
                points, n = tracker.latest[f"{group}/Points"], int(tracker.latest[f"{group}/n"])
            else:
                continue
            in_env = f" in {env.env_id}" * (len(eval_envs) > 1)
            yield f"points {points:.0%}{against(env.opponent)}{in_env} (n={n})"


@contextlib.contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the duration of a `with` block to `metrics`, in seconds."""
    started = time.monotonic()
    yield
    metrics[name] = time.monotonic() - started
