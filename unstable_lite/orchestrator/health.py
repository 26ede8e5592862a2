"""Watch a run's learning, and perform the actions of alarms: warn, pause, stop.

Owns the file PAUSED; reads the tracker's windows over games. alarms.py defines the alarms; the train loop decides when
it is safe to pause or to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from unstable_lite.adapters.frozen import by_update
from unstable_lite.config import Config
from unstable_lite.config.games import is_policy
from unstable_lite.files import replaced
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.orchestrator.alarms import SAY_EVERY, Alarms, Contest, Reading, contest_of, readings_of, score_of
from unstable_lite.rollout.back_pressure import FATES
from unstable_lite.rollout.buffer import Buffer
from unstable_lite.rollout.collector import GameListener
from unstable_lite.tracking.displayed_metrics import named
from unstable_lite.tracking.evaluations import POINTS, Evaluation, Tally
from unstable_lite.tracking.records import steps_of
from unstable_lite.tracking.run_directory import PAUSED
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.tracking.windows import ENDED, VALID, repetition
from unstable_lite.types import CONTEXT_FULL, REASONS, Batch, GameRecord

log = logging.getLogger(__name__)

OUTCOMES = {points: outcome for outcome, points in POINTS.items()}
LOOK_S = 0.5
"""Time between two checks whether the file PAUSED still exists."""
MIN_GAMES = 100
"""Number of games of a kind below which their share is not judged."""


@dataclass(slots=True)
class _Wait:
    """Wait of the learner for a step of some training games, those of one env or all."""

    since: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    """Number of steps that reached the learner before the wait."""
    ended: Counter[str] = field(default_factory=Counter)
    """Number of these games that ended during the wait, by how they ended."""

    def seconds(self, num_steps: int, is_over: bool = False) -> float:
        """Return its length. It starts again if more steps reached the learner, if `is_over`, or if no game ended."""
        now = time.monotonic()
        if num_steps > self.num_steps or is_over or not self.ended:
            self.since, self.num_steps = now, max(num_steps, self.num_steps)
            self.ended.clear()
        return now - self.since


class TrainingHealth(GameListener):
    def __init__(
        self,
        config: Config,
        directory: Path,
        buffers: Mapping[str, Buffer],
        tracker: Tracker,
        say: Callable[[str], None],
        stop: asyncio.Event,
    ) -> None:
        """`buffers`: that of each policy by its name. `stop`: if set, the run saves and ends."""
        self.stopped_by: str | None = None
        """The alarm that ends the run, if one does."""
        self.asks_for_pause = asyncio.Event()
        self.unpaused = asyncio.Event()
        """Event that lets games start while it is set."""
        self.unpaused.set()
        self._config, self._directory = config, directory
        self._buffers, self._tracker = buffers, tracker
        self._say = say
        self._stop = stop
        self._alarms = Alarms(config.alarms)
        self._contests: dict[str, Contest] = defaultdict(Contest)
        """Comparisons by subject: policy, env and opponent."""
        self._num_evaluations = 0
        """Number of evaluations that were compared."""
        self._first_entropy: dict[str, float] = {}
        """Entropy of each policy in its first update of the run, in nats a token."""
        self._least_exploitable: dict[str, float] = {}
        """Lowest exact exploitability by policy and env."""
        self._update = 0
        self._began: dict[str, int] = {}
        """Update of the run after which each policy began again."""
        self._reasons: list[str] = []
        """Alarms that ask for a pause."""
        self._waits: dict[tuple[str, str], _Wait] = defaultdict(_Wait)
        """Waits of each policy: for a step of any env ("") that enters its buffer, while no batch waits in it, and for
        a step of each env to be trained on."""
        self._filtered: Counter[str] = Counter()
        """Number of players left out by `run.filter_opponent_invalid` before the wait, by policy."""
        (directory / PAUSED).unlink(missing_ok=True)

    def add_record(self, record: GameRecord) -> None:
        """Count a finished game, before the buffer receives it."""
        if record.spec.kind == "train":
            trained = {agent.model.policy for agent in record.spec.agent_specs if agent.collect_data} | {""}
            for policy, env_id in product(trained.intersection(self._buffers), ("", record.spec.env_id)):
                self._waits[policy, env_id].ended["void" if record.end == "void" else "whole"] += 1

    async def measure(self, batch: Batch) -> dict[str, float]:
        """Return the repetition metrics of a batch; in a thread, because it may have millions of tokens."""
        metrics = await asyncio.to_thread(repetition, steps_of(batch))
        return {f"batch/{name}": value for name, value in metrics.items()}

    def check_update(self, update: int, metrics: Mapping[str, float], policy: str = "") -> dict[str, float]:
        """Judge an update by its metrics and the games so far; return how often each alarm began.

        update: its number in the run. policy: the one that was updated, of which the metrics are, without its name.
        """
        self._update = update
        self.check_skipped(0, policy=policy)
        self._judge([*readings_of(metrics), *self._entropy_rise(metrics, policy)], policy)
        self.check_exploitability(metrics, policy)
        self._judge([*self._readings_of_games(policy), *self._early_ends(), *self._env_starvation(policy)])
        return {f"alarms/{name}": count for name, count in self._alarms.counts().items()}

    def check_exploitability(self, metrics: Mapping[str, float], policy: str = "") -> None:
        """Compare each exact exploitability with the lowest one before it; of estimates, the near ends of intervals."""
        for name, value in metrics.items():
            kind, _, env_id = name.partition("/")
            if kind == "exploitability":
                tree = flatten(env_id)
                low, high = (metrics.get(f"{kind}_{end}/{env_id}", value) for end in ("low", "high"))
                key = named(policy, env_id)
                lowest = self._least_exploitable[key] = min(high, self._least_exploitable.get(key, high))
                rise, n = (low - lowest) / abs(tree.lowest_utility), len(tree.states)
                detail = f"{low:.4f} after {lowest:.4f}"
                self._judge([Reading(alarm="exploitability", value=rise, n=n, subject=env_id, detail=detail)], policy)

    def check_skipped(self, in_a_row: int, reason: str = "", policy: str = "") -> None:
        """Judge the number of a policy's batches that were skipped since its last update."""
        detail = f"{in_a_row} batches in a row were skipped, the last because of {reason}" if in_a_row else "an update"
        self._judge([Reading(alarm="skipped", value=in_a_row, n=in_a_row, detail=detail)], policy)

    def check_evaluation(self, evaluation: Evaluation) -> None:
        """Compare an evaluation with the best earlier one of its policy, env and opponent; judge the ends of games."""
        self._judge([*self._compared(evaluation), *self._early_ends()])

    def forget(self, policy: str, first_version: int) -> None:
        """Forget the results of a policy before the adapter with which it begins again, and its alarms."""
        windows = self._tracker.windows.of(policy)
        windows.judged.clear()
        windows.first_version = first_version
        self._began[policy] = self._update
        seated = [env for env in self._config.train_envs if policy in (env.seats or ())]
        shared = {named(other, env.env_id) for env in seated for other in env.seats or ()}

        def is_over(subject: str) -> bool:
            return subject == policy or subject.startswith(f"{policy}: ")

        for memory in (self._contests, self._first_entropy, self._least_exploitable):
            for subject in [*filter(is_over, memory)]:
                del memory[subject]
        for subject in shared:
            self._least_exploitable.pop(subject, None)
        self._alarms.forget(lambda name, subject: is_over(subject) or (name == "exploitability" and subject in shared))

    async def run(self) -> None:
        """Check until cancelled that the steps that games play reach the learner."""
        while True:
            await asyncio.sleep(self._config.alarms.starved.threshold / SAY_EVERY)
            self._judge(map(self._starvation, self._buffers))

    async def pause_if_asked(self, save: Callable[[], Awaitable[tuple[Path | None, int]]]) -> None:
        """Save, start no game, and wait until PAUSED is deleted or the run is stopped, if an alarm asks for a pause.

        `save`: returns the newest checkpoint and its update, which is an earlier one if saving failed.
        """
        is_over = self._stop.is_set() or self._update >= self._config.run.learning_steps
        if is_over or not self.asks_for_pause.is_set():
            return
        self.unpaused.clear()
        checkpoint, update = await save()
        saved = f"Everything is saved in {checkpoint}." if checkpoint else "No checkpoint exists yet."
        if update < self._update:
            newest = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
            saved = f"Update {self._update} could NOT be saved (an alarm says why); {newest}."
        path = self._directory / PAUSED
        reasons, self._reasons = self._reasons, []
        try:
            with replaced(path) as partial:
                partial.write_text("\n".join([*reasons, saved, "Delete this file to continue the run.", ""]), "utf-8")
            self._say(f"paused after update {self._update}. {saved} To continue: rm {path}  (Ctrl-C: end)")
            while path.exists() and not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), LOOK_S)
        except OSError as error:
            reason = f"{path}: {error.strerror}; free some space, and make it writable"
            self._tracker.alarm(self._update, f"the run cannot pause and continues. {saved} {reason}")
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self.asks_for_pause.clear()
            for wait in self._waits.values():
                wait.since = time.monotonic()
            self.unpaused.set()
        self._say("ending" if self._stop.is_set() else "continuing")

    def status(self) -> str:
        """Return the number of alarms, and those that are on, for the live line."""
        if not self._tracker.alarms:
            return ""
        on = ", ".join(self._alarms.on())
        return f"  alarms {len(self._tracker.alarms)}" + f", on: {on}" * bool(on)

    def collapsed(self) -> list[str]:
        """Return each comparison that ended worse than it was: of evaluations, and of training games."""
        claims = {
            "collapse": "collapsed: the last policy is worse than the best one",
            # Their window may hold games of a dip that the last policy has left.
            "decline": "declined: the newest training games, of several policies, are worse than earlier ones",
        }
        return [
            f"{claim}: {subject}: {score_of(contest.newest)}, but {score_of(contest.best)}. "
            + self._where(subject, contest.best)
            for subject, contest in self._contests.items()
            for name, claim in claims.items()
            if self._alarms.is_on(name, subject) and contest.newest and contest.best
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "alarms": self._alarms.state_dict(),
            "contests": msgspec.to_builtins(self._contests),
            "num_evaluations": self._num_evaluations,
            "first_entropy": self._first_entropy.get("") if "" in self._buffers else self._first_entropy,
            "least_exploitable": self._least_exploitable,
            "update": self._update,
            **({"began": self._began} if self._began else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; evaluations that ended after it was saved have been reported."""
        self._alarms.load_state_dict(state["alarms"])
        self._contests |= {subject: contest_of(contest) for subject, contest in state["contests"].items()}
        self._num_evaluations, self._update = state["num_evaluations"], state["update"]
        self._began = dict(state.get("began", {}))
        entropy, self._least_exploitable = state["first_entropy"], dict(state["least_exploitable"])
        self._first_entropy = entropy if isinstance(entropy, dict) else {} if entropy is None else {"": entropy}
        for evaluation in self._tracker.evaluations[self._num_evaluations :]:
            self._alarms.judge(self._update, self._compared(evaluation))

    def _compared(self, evaluation: Evaluation) -> list[Reading]:
        self._num_evaluations += 1
        subject = named(evaluation.policy, f"evaluation of {evaluation.env_id} against {evaluation.opponent}")
        is_of_lineage = evaluation.step >= self._began.get(evaluation.policy, 0)
        is_judged = is_of_lineage and evaluation.n > 1 and not is_policy(evaluation.opponent)  # which learns, too
        return self._contests[subject].add("collapse", subject, evaluation) if is_judged else []

    def _judge(self, readings: Iterable[Reading], policy: str = "") -> None:
        """Judge readings, and perform the actions of alarms. `policy`: the one that they are about, if only one is."""
        readings = (replace(one, policy=policy or one.policy) for one in readings)
        for change in self._alarms.judge(self._update, readings):
            when = f"after update {self._update}: {change.text}"
            if change.phase == "ends":
                log.info("%s", when)
                self._say(change.text)
                continue
            log.warning("%s", when)
            self._tracker.alarm(self._update, change.text, is_repeat=change.phase == "stays")
            if change.action == "pause":
                self._reasons.append(when)
                self.asks_for_pause.set()
            elif change.action == "stop":
                self.stopped_by = self.stopped_by or change.text
                self._stop.set()

    def _entropy_rise(self, metrics: Mapping[str, float], policy: str) -> list[Reading]:
        """Compare the policy's entropy with the first update's: some models start at 0.5 nats a token, others at 3."""
        entropy, n = metrics.get("learner/entropy"), int(metrics.get("learner/num_tokens", 0))
        if entropy is None or not n:
            return []
        if math.isfinite(entropy):
            self._first_entropy.setdefault(policy, entropy)
        rise = entropy - self._first_entropy[policy] if policy in self._first_entropy else 0.0
        return [Reading(alarm="high_entropy", value=rise, n=n)]

    def _readings_of_games(self, policy: str) -> Iterator[Reading]:
        for (what, games), window in self._tracker.windows.of(policy).judged.items():
            if what == ENDED or (n := len(window)) < MIN_GAMES:
                continue
            tally = Tally()
            for value in window:
                tally.add(OUTCOMES[value], value, own_invalid=False)
            result = tally.evaluation(what, f"up to update {self._update}", self._update, "", "")
            if what == VALID:
                yield Reading(alarm="invalid_moves", value=1 - result.points, n=n, subject=games, policy=policy)
            subject = named(policy, f"training games of {games}" if what == VALID else games)
            yield from self._contests[subject].add("decline", subject, result)

    def _early_ends(self) -> Iterator[Reading]:
        """Yield the share of each env's newest games that ended for each reason of now or of an alarm that is on."""
        most = self._config.engine.max_generation_len
        for (what, env_id), window in self._tracker.windows.judged.items():
            if what != ENDED or (n := len(window)) < MIN_GAMES:
                continue
            # An answer shorter than the longest one allowed was cut off by a full context.
            counts = Counter(reason or CONTEXT_FULL * (cut is not None and cut < most) for reason, cut in window)
            for reason in REASONS:
                subject, count = f"{reason} in {env_id}", counts[reason]
                if count or self._alarms.is_on("ended_early", subject):
                    yield Reading(alarm="ended_early", value=count / n, n=n, subject=subject)

    def _starvation(self, policy: str) -> Reading:
        """Return for how long a policy's games have ended without a step for the learner."""
        wait, buffer = self._waits[policy, ""], self._buffers[policy]
        batch_size = self._config.of_policy(policy).learner.batch_size
        is_over = buffer.has_steps_for(batch_size) or not self.unpaused.is_set()
        seconds = wait.seconds(buffer.added - buffer.dropped_stale, is_over)
        if not (ended := wait.ended.total()):
            self._filtered[policy] = buffer.filtered
            return Reading(alarm="starved", value=0.0, n=0, detail="the learner gets steps again", policy=policy)
        detail = (
            f"the learner has received no step for {seconds:.0f} s, although {ended} training games ended: "
            f"{wait.ended['void']} void, {buffer.filtered - self._filtered[policy]} players left out by "
            f"run.filter_opponent_invalid, {buffer.dropped_stale} steps dropped as too stale since the start; "
            f"{buffer.size()} steps wait, and a batch is {batch_size}"
        )
        return Reading(alarm="starved", value=seconds, n=ended, detail=detail, policy=policy)

    def _env_starvation(self, policy: str) -> Iterator[Reading]:
        """Yield for how long a policy's games of each env have ended without a step of it being trained on."""
        for env_id in [env.env_id for env in self._config.train_envs]:
            of_env = [counts for (name, _), counts in self._buffers[policy].counts.items() if name == env_id]
            played, trained, dropped = (sum(counts[fate] for counts in of_env) for fate in FATES)
            wait = self._waits[policy, env_id]
            seconds, ended = wait.seconds(trained), wait.ended.total()
            detail = (
                f"no step of {env_id} has been trained on for {seconds:.0f} s, although {ended} of its games ended; "
                f"since the start {played} of its steps were played, {trained} trained on and "
                f"{dropped} dropped as too stale, and the rest waits, was rejected or was left out"
            )
            yield Reading(alarm="starved", value=seconds, n=ended, subject=env_id, detail=detail, policy=policy)

    def _where(self, subject: str, best: Evaluation) -> str:
        if best.step == 0:
            return "That is the policy from which training started."
        kept = by_update(self._directory / "adapters") | by_update(self._directory / "checkpoints")
        if best.step in kept:
            policy = subject.partition(": ")[0]
            return f"That is {kept[best.step] / policy if policy in self._buffers else kept[best.step]}"
        nearest = min(kept, key=lambda update: abs(update - best.step), default=None)
        found = "no checkpoint was kept" if nearest is None else f"the nearest is {kept[nearest]}"
        return f"Update {best.step} itself has no checkpoint (run.checkpoint_every); {found}"
