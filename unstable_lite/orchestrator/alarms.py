"""Alarms: signs that learning goes wrong, and a sentence for each that says what to try.

Owns when an alarm is on. Knows no runs, files or terminals, and does not perform an alarm's action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from unstable_lite.config.tracking import AlarmConfig, AlarmsConfig, ShareAlarm
from unstable_lite.tracking.displayed_metrics import named
from unstable_lite.tracking.evaluations import Evaluation
from unstable_lite.tracking.intervals import percent, percent_range
from unstable_lite.tracking.windows import VALID

SAY_EVERY = 20
"""Number of further readings after which an alarm that stays on is repeated, with its action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Description of one alarm."""

    measured: str = "{detail}"
    """Format of the measurement, with `value`, `n`, `subject` and `detail` of the reading."""
    means: str
    advice: str
    threshold: str | None = None
    """Format of the threshold; None: that of its type in the config."""
    metrics: tuple[str, str] | None = None
    """Metric of an update that the alarm reads, and the one that counts its samples; None: health.py takes readings."""
    is_under: bool = False
    updates: int = 1
    """Number of consecutive readings beyond the threshold that raise the alarm, and of others that clear it."""


ALARMS = {
    "mismatch": Alarm(
        measured="engine and learner disagree by {value:.3f} in mean |Δ log p| over {n} on-policy tokens",
        means="the gradient is not that of the policy that played",
        advice="give both the same dtype (engine.dtype, learner.dtype), and look for an engine that was updated",
        metrics=("learner/mismatch_mean", "learner/mismatch_tokens"),
    ),
    "clipping": Alarm(
        updates=3,
        measured="the importance weights of {value:.1%} of {n} tokens are cut at learner.importance_weight_cap",
        means="the policy has moved far from the one that sampled these tokens, so that the gradient is biased",
        advice="lower learner.learning_rate or buffer.max_staleness",
        metrics=("learner/importance_weight_clipped", "learner/num_tokens"),
    ),
    "staleness": Alarm(
        updates=5,
        measured="{n} tokens were trained {value:.1f} updates after they were sampled, on average",
        means="games take much longer than updates, or the learner is far behind",
        advice="lower run.num_collection_workers, buffer.buffer_size or buffer.max_staleness, or raise "
        "learner.batch_size",
        metrics=("learner/staleness_mean", "learner/num_tokens"),
    ),
    "dropped": Alarm(
        updates=3,
        measured="{value:.1%} of {n} steps that left the buffer were dropped as too stale",
        means="games take more updates than buffer.max_staleness allows, so that short games are trained on more than "
        "long ones",
        advice="see collection-{env}/Steps Dropped for which games; raise buffer.max_staleness and engine.max_loras, "
        "or learner.batch_size, or lower run.num_collection_workers",
        metrics=("buffer/dropped_share", "buffer/left"),
    ),
    "entropy": Alarm(
        updates=3,
        measured="the policy's entropy is {value:.4f} nats a token over {n} tokens",
        means="the policy gives the same answer in every state and no longer explores",
        advice="go back to an earlier checkpoint with a learner.entropy_coefficient or learner.kl_coefficient above "
        "0, a lower learner.learning_rate, or a higher engine.temperature",
        metrics=("learner/entropy", "learner/num_tokens"),
        is_under=True,
    ),
    "high_entropy": Alarm(
        updates=3,
        measured="the policy's entropy over {n} tokens is {value:.2f} nats a token above the first update's",
        means="the policy has become noise",
        advice="go back to an earlier checkpoint with a lower learner.learning_rate, and look at games.jsonl for "
        "rewards that blow up",
    ),
    "repetition": Alarm(
        updates=3,
        measured="{value:.1%} of {n} 4-grams of tokens stood in the same completion before",
        means="completions run in circles",
        advice="go back to an earlier checkpoint with a lower learner.learning_rate or a learner.kl_coefficient above "
        "0, and look at games.jsonl for the rewards of such completions",
        metrics=("batch/repeated_4grams", "batch/num_4grams"),
    ),
    "identical": Alarm(
        updates=5,
        measured="{value:.1%} of {n} completions are identical",
        means="the policy ignores the observation",
        advice="look at games.jsonl for the answers; then a higher engine.temperature, a lower learner.learning_rate, "
        "or opponents against which this answer does not win",
        metrics=("batch/identical_completions", "batch/num_completions"),
    ),
    "zero_advantage": Alarm(
        updates=5,
        measured="{value:.1%} of {n} steps have an advantage of 0",
        means="the policy learns almost nothing: the games that are compared all have the same result",
        advice="choose games or opponents that the policy sometimes beats, a higher engine.temperature, or a "
        "larger run.group_size",
        metrics=("learner/zero_advantage", "learner/num_items"),
    ),
    "invalid_moves": Alarm(
        updates=5,
        measured="{value:.1%} of the newest {n} training games of {subject} ended with an invalid move of the policy",
        means="the policy does not know the format of a move, or has unlearnt it",
        advice="look at games.jsonl for the answers; then another prompt_template or action_extraction_fn, a larger "
        "engine.max_generation_len, or a warm start (unstable-lite sft)",
    ),
    "ended_early": Alarm(
        measured="{value:.1%} of the newest {n} games ended early: {subject}",
        means="games end for a reason outside of their rules (for context_full also: an answer was cut off by the "
        "context), and void ones are missing among the trained and rated games",
        advice="for context_full and prompt_too_long a larger engine.max_model_len, or observation = 'first-last' or "
        "'board'; for other reasons see logs/orchestrator.log",
    ),
    "collapse": Alarm(
        means="the policy has become worse",
        advice="continue from the best checkpoint (lora.initial_lora_path) with a lower learner.learning_rate or a "
        "learner.kl_coefficient above 0",
    ),
    "decline": Alarm(
        means="the policy is becoming worse, or relies on a habit that no longer wins",
        advice="evaluate its checkpoints (unstable-lite eval) to find the best, and continue from it with a lower "
        "learner.learning_rate or buffer.max_staleness, or a learner.kl_coefficient above 0",
    ),
    "exploitability": Alarm(
        measured="a best response wins {detail} a game of {subject} ({n} decision states), {value:.0%} of the "
        "highest utility more than at best",
        threshold="{:.0%}",
        means="the policy has learned a habit that its opponents do not punish",
        advice="other opponents (older checkpoints, base), a learner.entropy_coefficient or a learner.kl_coefficient "
        "above 0, or an earlier checkpoint",
    ),
    "starved": Alarm(
        threshold="{:.0f} s",
        means="games are void, left out by run.filter_opponent_invalid or because their group is incomplete, or too "
        "stale when they end",
        advice="look at games.jsonl for how games end, and at logs/orchestrator.log for why they are void",
    ),
    "skipped": Alarm(
        means="the policy no longer changes",
        advice="lower learner.learning_rate, look at games.jsonl for rewards that blow up, and look for the mistake in "
        "your own algorithm or reward transform if you have one",
    ),
}
"""Alarms by their names in section `alarms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One measurement that an alarm judges."""

    alarm: str
    value: float
    n: int
    subject: str = ""
    """Env, or env and opponent, if the alarm has several; else empty."""
    detail: str = ""
    policy: str = ""
    """Name of the policy that it is about, if several learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of one alarm, or the repetition of one that stays on."""

    phase: Literal["begins", "stays", "ends"]
    action: Literal["warn", "pause", "stop"]
    text: str


@dataclass(slots=True)
class _State:
    """State of one alarm for one subject."""

    bad: int = 0
    """Number of consecutive readings beyond the threshold."""
    good: int = 0
    """Number of consecutive readings within it."""
    since: int | None = None
    """Update after which the alarm began; None if it is off."""
    begun: int = 0
    """Number of times that it began."""


class Alarms:
    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self._states: dict[str, dict[str, _State]] = {name: {} for name in ALARMS}

    def judge(self, update: int, readings: Iterable[Reading]) -> list[Change]:
        """Return the changes that follow from readings taken after `update`."""
        return [change for reading in readings if (change := self._judge(update, reading)) is not None]

    def is_on(self, alarm: str, subject: str = "") -> bool:
        return self._states[alarm].get(subject, _State()).since is not None

    def on(self) -> list[str]:
        """Return the names of the alarms that are on."""
        return [name for name, states in self._states.items() if any(s.since is not None for s in states.values())]

    def forget(self, is_over: Callable[[str, str], bool]) -> None:
        """End the alarms (name, subject) that are over, without a message, and begin to judge them again."""
        for name, states in self._states.items():
            for subject, state in states.items():
                if is_over(name, subject):
                    states[subject] = _State(begun=state.begun)

    def counts(self) -> dict[str, int]:
        """Return how often each alarm began, without those that are switched off."""
        return {
            name: sum(state.begun for state in states.values())
            for name, states in self._states.items()
            if getattr(self._config, name).action != "off"
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self._states)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = msgspec.convert(state, dict[str, dict[str, _State]])
        self._states |= {name: states[name] for name in states.keys() & ALARMS.keys()}

    def _judge(self, update: int, reading: Reading) -> Change | None:
        config: AlarmConfig = getattr(self._config, reading.alarm)
        alarm = ALARMS[reading.alarm]
        if config.action == "off":
            return None
        state = self._states[reading.alarm].setdefault(named(reading.policy, reading.subject), _State())
        is_within = reading.value >= config.threshold if alarm.is_under else reading.value <= config.threshold
        state.bad, state.good = (0, state.good + 1) if is_within else (state.bad + 1, 0)
        phase: Literal["begins", "stays", "ends"]
        if state.since is None:
            if state.bad < alarm.updates:
                return None
            phase, state.since = "begins", update
            state.begun += 1
        elif state.good >= alarm.updates:
            phase = "ends"
        elif state.bad and (state.bad - alarm.updates) % SAY_EVERY == 0:
            phase = "stays"
        else:
            return None
        text = _sentence(reading, config, phase, state.since)
        if phase == "ends":
            state.since = None
        return Change(phase=phase, action=config.action, text=text)


def _sentence(reading: Reading, config: AlarmConfig, phase: str, since: int) -> str:
    alarm = ALARMS[reading.alarm]
    form = alarm.threshold or ("{:.0%}" if isinstance(config, ShareAlarm) else "{:g}")
    n, threshold = f"{reading.n:,}", form.format(config.threshold)
    measured = alarm.measured.format(value=reading.value, n=n, subject=reading.subject, detail=reading.detail)
    measured = named(reading.policy, measured)
    if phase == "ends":
        return f"{reading.alarm}, on since update {since}, has ended: {measured}"
    beyond = f"{'under' if alarm.is_under else 'over'} {threshold}"
    times = f", {alarm.updates} times in a row" * (alarm.updates > 1 and phase == "begins")
    still = f", still on since update {since}" * (phase == "stays")
    limit = f" ({beyond}{times})" * (config.threshold != 0 or bool(times))
    return f"{reading.alarm}{still}: {measured}{limit}. It usually means: {alarm.means}. Try: {alarm.advice}"


def readings_of(metrics: Mapping[str, float]) -> list[Reading]:
    """Return the readings from the metrics of one update, without metrics of nothing (no on-policy token)."""
    names = [(name, *alarm.metrics) for name, alarm in ALARMS.items() if alarm.metrics is not None]
    return [
        Reading(alarm=name, value=metrics[metric], n=int(metrics[count]))
        for name, metric, count in names
        if metric in metrics and metrics.get(count, 0) > 0
    ]


@dataclass(slots=True)
class Contest:
    """Comparison of the newest result of one subject, an env and an opponent, with the best result before it."""

    best: Evaluation | None = None
    newest: Evaluation | None = None
    compared: int = 0
    """Number of results so far."""

    def add(self, alarm: str, subject: str, result: Evaluation) -> list[Reading]:
        """Return the reading of `alarm` that follows from a result: how far its interval is below that of the best.

        There is none if there is no earlier result, or if the newest is the best. Evaluations overlap, so the result of
        an earlier update may come after the newest. The intervals hold at 95 % for all comparisons together
        (Bonferroni), because the best of many results was lucky and one of many newest results will be unlucky.
        """
        level = 1 - 0.05 / max(self.compared, 1)
        self.compared += 1
        is_best = self.best is None or result.interval[0] > self.best.interval[0]
        if self.newest is None or result.step >= self.newest.step:
            self.newest, rival = result, self.best
        else:  # a late result, which says nothing about the newest unless it is a new best
            rival = result if is_best else None
        if is_best:
            self.best = result
        newest = self.newest
        if rival is None or rival == newest:
            return []
        gap = rival.interval_at(level)[0] - newest.interval_at(level)[1]
        size = f"{100 * gap:.1f} percentage points" if newest.is_share else f"{gap:.3f}"
        apart = f"do not overlap: they lie {size} apart" if gap > 0 else "overlap"
        detail = f"{subject}: {score_of(newest)}, but {score_of(rival)}; intervals, all widened, {apart}"
        return [Reading(alarm=alarm, value=gap, n=newest.n, subject=subject, detail=detail)]


def contest_of(state: dict[str, Any]) -> Contest:
    """Return a contest that was saved; earlier versions saved fewer facts of a result."""
    for result in filter(None, (state["best"], state["newest"])):
        if "who" in result:
            n, draws, is_share = result["n"], result.get("draws", 0), result.get("std") is None
            wins = round(result["mean"] * n - draws / 2) * is_share
            result |= {"label": result.get("what") or "", "model": result["who"], "step": result["update"]}
            result |= dict.fromkeys(("env_id", "opponent"), "") | dict.fromkeys(("invalid", "void"), 0)
            result |= {"wins": wins, "draws": draws, "losses": (n - wins - draws) * is_share}
            result |= {"mean_reward": result["mean"], "reward_std": result.get("std") or 0.0}
            result |= {"scores": result.get("deals", ())}
    return msgspec.convert(state, Contest)


def score_of(result: Evaluation) -> str:
    """Return the policy with its result; the label of training games names those that are counted."""
    low, high = result.interval
    if result.is_share:
        of = f"{result.n} games {VALID}" if result.label == VALID else f"the points in {result.n} games"
        return f"{result.model} {percent(result.points)} of {of} (95 %: {percent_range(low, high)})"
    return f"{result.model} a mean reward of {result.value_text} in {result.n} games (95 %: {low:.3f} – {high:.3f})"
