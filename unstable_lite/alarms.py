"""What learning gone wrong looks like: figures in, alarms out, each a sentence that says what to try.

Decides when an alarm is on. Knows nothing of runs, files or terminals, nor of what an alarm's action does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

from unstable_lite.config import AlarmConfig, AlarmsConfig
from unstable_lite.trackers.tracker import Z_95, Evaluation, mean_interval, points_interval

SAY_EVERY = 20
"""An alarm that stays on is said again, and its action taken again, after so many further readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What one alarm is about."""

    measured: str
    """With `value`, `n`, `subject` and `detail` of the reading."""
    threshold: str
    """How the threshold is written."""
    means: str
    advice: str
    figure: str | None = None
    """The metric of an update that it reads; None: it has readings of its own."""
    n: str | None = None
    """The metric that says what `figure` is of."""
    is_under: bool = False


ALARMS = {
    "mismatch": Alarm(
        measured="engine and learner disagree by {value:.3f} in mean |Δ log p| over {n} on-policy tokens",
        threshold="{:g}",
        means="the gradient is that of another policy than the one that played",
        advice="give both the same dtype (engine.dtype, learner.dtype), and look for an engine that was updated",
        figure="learner/mismatch_mean",
        n="learner/mismatch_tokens",
    ),
    "clipping": Alarm(
        measured="the importance weights of {value:.1%} of {n} tokens are cut at learner.importance_weight_cap",
        threshold="{:.0%}",
        means="the policy has moved far from the one that sampled these tokens, so that the gradient is biased",
        advice="lower learner.learning_rate or buffer.max_staleness",
        figure="learner/importance_weight_clipped",
        n="learner/num_tokens",
    ),
    "staleness": Alarm(
        measured="{n} tokens were trained {value:.1f} updates after they were sampled, on average",
        threshold="{:g}",
        means="games take much longer than updates, or the learner is far behind",
        advice="lower run.num_collection_workers, buffer.buffer_size or buffer.max_staleness, or raise "
        "learner.batch_size",
        figure="learner/staleness_mean",
        n="learner/num_tokens",
    ),
    "dropped": Alarm(
        measured="{value:.1%} of {n} steps that left the buffer were dropped as too stale",
        threshold="{:.0%}",
        means="games take more updates than buffer.max_staleness allows, so that short games are trained on more than "
        "long ones",
        advice="see collection-{env}/Steps Dropped for which games; raise buffer.max_staleness and engine.max_loras, "
        "or learner.batch_size, or lower run.num_collection_workers",
        figure="buffer/dropped_share",
        n="buffer/left",
    ),
    "entropy": Alarm(
        measured="the policy's entropy is {value:.4f} nats a token over {n} tokens",
        threshold="{:g}",
        means="the policy no longer chooses: it says the same whatever happens, and finds nothing better any more",
        advice="go back to an earlier checkpoint with a learner.entropy_coefficient or learner.kl_coefficient above "
        "0, a lower learner.learning_rate, or a higher engine.temperature",
        figure="learner/entropy",
        n="learner/num_tokens",
        is_under=True,
    ),
    "high_entropy": Alarm(
        measured="the policy's entropy over {n} tokens is {value:.2f} nats a token above the first update's",
        threshold="{:g}",
        means="the policy has become noise",
        advice="go back to an earlier checkpoint with a lower learner.learning_rate, and look at games.jsonl for "
        "rewards that blow up",
    ),
    "repetition": Alarm(
        measured="{value:.1%} of {n} 4-grams of tokens stood in the same completion before",
        threshold="{:.0%}",
        means="completions run in circles",
        advice="go back to an earlier checkpoint with a lower learner.learning_rate or a learner.kl_coefficient above "
        "0, and look at games.jsonl for what such completions are paid",
        figure="batch/repeated_4grams",
        n="batch/num_4grams",
    ),
    "identical": Alarm(
        measured="{value:.1%} of {n} completions are one and the same",
        threshold="{:.0%}",
        means="the policy answers without regard to what it is shown",
        advice="look at games.jsonl for what it says; then a higher engine.temperature, a lower learner.learning_rate, "
        "or opponents against whom it does not win with it",
        figure="batch/identical_completions",
        n="batch/num_completions",
    ),
    "zero_advantage": Alarm(
        measured="{value:.1%} of {n} steps have an advantage of 0",
        threshold="{:.0%}",
        means="nearly nothing is learnt: the games that are compared all end alike",
        advice="choose games or opponents of which some are won and some lost, a higher engine.temperature, or a "
        "larger run.group_size",
        figure="learner/zero_advantage",
        n="learner/num_items",
    ),
    "invalid_moves": Alarm(
        measured="{value:.1%} of the newest {n} training games of {subject} were ended by an own invalid move",
        threshold="{:.0%}",
        means="the policy does not know the form of a move, or has lost it",
        advice="look at games.jsonl for what it says; then another prompt_template or action_extraction_fn, a larger "
        "engine.max_generation_len, or a warm start (unstable-lite sft)",
    ),
    "collapse": Alarm(
        measured="{detail}; their intervals lie {value:.3f} apart",
        threshold="{:g}",
        means="the policy has unlearnt what it could",
        advice="go on from the best checkpoint (lora.initial_lora_path) with a lower learner.learning_rate or a "
        "learner.kl_coefficient above 0",
    ),
    "decline": Alarm(
        measured="{detail}; their intervals lie {value:.3f} apart",
        threshold="{:g}",
        means="the policy is losing what it could, or knows a habit that no longer pays",
        advice="evaluate its checkpoints (unstable-lite eval) to see which is the best, and go on from there with a "
        "lower learner.learning_rate or a learner.kl_coefficient above 0",
    ),
    "starved": Alarm(
        measured="{detail}",
        threshold="{:.0f} s",
        means="games are void, left out by run.filter_opponent_invalid or for want of a group to compare them with, or "
        "too stale at their end",
        advice="look at games.jsonl for how they end, and into logs/orchestrator.log for why they are void",
    ),
    "skipped": Alarm(
        measured="{detail}",
        threshold="{:g}",
        means="the policy no longer changes",
        advice="lower learner.learning_rate, or look at games.jsonl for rewards that blow up",
    ),
}
"""By their names in section `alarms`."""
_SHARES = ("clipping", "dropped", "repetition", "identical", "zero_advantage", "invalid_moves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One figure that an alarm looks at."""

    alarm: str
    value: float
    n: int
    subject: str = ""
    """What it is of, where an alarm looks at several: an env, an env and an opponent."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An alarm that goes on, stays on, or goes off."""

    alarm: str
    phase: Literal["begins", "stays", "ends"]
    action: Literal["warn", "pause", "stop"]
    text: str


@dataclass(slots=True)
class _State:
    """Of one alarm and subject."""

    bad: int = 0
    """Readings in a row beyond the threshold."""
    good: int = 0
    """Readings in a row within it."""
    since: int | None = None
    """The update after which it went on; None: it is off."""


class Alarms:
    def __init__(self, config: AlarmsConfig) -> None:
        self._config = config
        self._states: dict[tuple[str, str], _State] = {}
        self._begun: Counter[str] = Counter()

    def judge(self, update: int, readings: Iterable[Reading]) -> list[Change]:
        """What the newest readings change; `update`: after which they were taken."""
        changes = (self._judge(update, reading) for reading in readings)
        return [change for change in changes if change is not None]

    def is_on(self, alarm: str, subject: str = "") -> bool:
        return self._states.get((alarm, subject), _State()).since is not None

    def on(self) -> list[str]:
        """The names of those that are on."""
        return list(dict.fromkeys(alarm for (alarm, _), state in self._states.items() if state.since is not None))

    def counts(self) -> dict[str, int]:
        """How often each went on so far; without those that are switched off."""
        return {name: self._begun[name] for name in ALARMS if self._of(name).action != "off"}

    def state_dict(self) -> dict[str, Any]:
        states = [{"alarm": alarm, "subject": subject, **asdict(s)} for (alarm, subject), s in self._states.items()]
        return {"states": states, "begun": dict(self._begun)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._states = {(s.pop("alarm"), s.pop("subject")): _State(**s) for s in map(dict, state["states"])}
        self._begun = Counter(state["begun"])

    def _of(self, alarm: str) -> AlarmConfig:
        config: AlarmConfig = getattr(self._config, alarm)
        return config

    def _judge(self, update: int, reading: Reading) -> Change | None:
        config, alarm = self._of(reading.alarm), ALARMS[reading.alarm]
        if config.action == "off":
            return None
        state = self._states.setdefault((reading.alarm, reading.subject), _State())
        is_within = reading.value >= config.threshold if alarm.is_under else reading.value <= config.threshold
        state.bad, state.good = (0, state.good + 1) if is_within else (state.bad + 1, 0)
        phase: Literal["begins", "stays", "ends"]
        if state.since is None and state.bad >= config.updates:
            phase, state.since = "begins", update
            state.bad = config.updates  # there are more where a resumed run asks for fewer
            self._begun[reading.alarm] += 1
        elif state.since is not None and state.bad and (state.bad - config.updates) % SAY_EVERY == 0:
            phase = "stays"
        elif state.since is not None and state.good >= config.updates:
            phase = "ends"
        else:
            return None
        text = _sentence(reading, config, phase, state.since)
        if phase == "ends":
            state.since = None
        return Change(alarm=reading.alarm, phase=phase, action=config.action, text=text)


def _sentence(reading: Reading, config: AlarmConfig, phase: str, since: int) -> str:
    alarm = ALARMS[reading.alarm]
    n, threshold = f"{reading.n:,}", alarm.threshold.format(config.threshold)
    measured = alarm.measured.format(value=reading.value, n=n, subject=reading.subject, detail=reading.detail)
    if phase == "ends":
        return f"{reading.alarm}, on since update {since}, is over: {measured}"
    beyond = f"{'under' if alarm.is_under else 'over'} {threshold}"
    times = f", {config.updates} times in a row" * (config.updates > 1 and phase == "begins")
    still = f", still on since update {since}" * (phase == "stays")
    return f"{reading.alarm}{still}: {measured} ({beyond}{times}). It usually means: {alarm.means}. Try: {alarm.advice}"


def readings_of(figures: Mapping[str, float]) -> list[Reading]:
    """Of the metrics of one update. What is of nothing (no on-policy token) or was not measured has no reading."""
    return [
        Reading(alarm=name, value=figures[alarm.figure], n=int(figures[alarm.n]))
        for name, alarm in ALARMS.items()
        if alarm.figure is not None and alarm.n is not None
        if alarm.figure in figures and figures.get(alarm.n, 0) > 0
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the policy did at some time: its share of the points, the share of games of some kind, or a mean reward."""

    who: str
    """`ckpt-20`, `up to update 20`."""
    update: int
    mean: float
    n: int
    draws: int = 0
    """Games that count half in a share of points."""
    what: str | None = None
    """Kind of games that `mean` is the share of; None: it is the share of points."""
    std: float | None = None
    """Of one game's reward; None: `mean` is a share."""

    @classmethod
    def of(cls, evaluation: Evaluation) -> Result | None:
        """None where there is nothing to compare: fewer than two games that count."""
        if evaluation.n < 2:
            return None
        model, step, n = evaluation.model, evaluation.step, evaluation.n
        if math.isfinite(evaluation.points):
            return cls(who=model, update=step, mean=evaluation.points, n=n, draws=evaluation.draws)
        return cls(who=model, update=step, mean=evaluation.mean_reward, n=n, std=evaluation.reward_std)

    def interval(self, z: float = Z_95) -> tuple[float, float]:
        if self.std is None:
            wins = round(self.mean * self.n - self.draws / 2)
            return points_interval(wins, self.draws, self.n - wins - self.draws, z)
        return mean_interval(self.mean, self.std, self.n, z)

    def describe(self) -> str:
        low, high = self.interval()
        if self.std is None:
            of = f"{self.n} games {self.what}" if self.what else f"the points in {self.n} games"
            return f"{self.who} {self.mean:.1%} of {of} (95 %: {low:.1%} – {high:.1%})"
        return f"{self.who} a mean reward of {self.mean:.3f} in {self.n} games (95 %: {low:.3f} – {high:.3f})"


@dataclass(slots=True)
class Contest:
    """Results of one kind: that of the newest update against the best before it."""

    best: Result | None = None
    newest: Result | None = None
    compared: int = 0
    """How many results there were."""

    def add(self, result: Result) -> tuple[Result, float] | None:
        """The best result of an earlier update than the newest one, and how far the newest one's interval lies under
        its; None where there is none, or the newest is the best.

        Evaluations overlap, so that one of an earlier update may come after the newest.

        The intervals are of 95 % for all comparisons together (Bonferroni): the best of many results was lucky, and
        the newest of many will once be unlucky.
        """
        z = NormalDist().inv_cdf(1 - 0.025 / max(self.compared, 1))
        self.compared += 1
        before = self.best
        if before is None or result.interval()[0] > before.interval()[0]:
            self.best = result
        is_late = self.newest is not None and result.update < self.newest.update
        if self.newest is None or not is_late:
            self.newest = result
        rival = self.best if is_late else before
        if rival is None or rival == self.newest or (is_late and rival is before):  # else it was told before
            return None
        return rival, rival.interval(z)[0] - self.newest.interval(z)[1]


class Contests:
    """By subject: games of which env, against whom."""

    def __init__(self) -> None:
        self.of: dict[str, Contest] = {}

    def add(self, alarm: str, subject: str, result: Result) -> list[Reading]:
        """What the newest result says to `alarm`; the first one of a subject says nothing."""
        contest = self.of.setdefault(subject, Contest())
        compared = contest.add(result)
        if compared is None or contest.newest is None:
            return []
        (best, gap), newest = compared, contest.newest
        detail = f"{subject}: {newest.describe()}, but {best.describe()}"
        return [Reading(alarm=alarm, value=gap, n=newest.n, subject=subject, detail=detail)]

    def state_dict(self) -> dict[str, Any]:
        return {subject: asdict(contest) for subject, contest in self.of.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.of = {
            subject: Contest(_result(saved["best"]), _result(saved["newest"]), saved["compared"])
            for subject, saved in state.items()
        }


def _result(saved: dict[str, Any] | None) -> Result | None:
    return None if saved is None else Result(**saved)


def alarm_problems(config: AlarmsConfig) -> Iterable[str]:
    """Thresholds that no figure can reach, or that every figure does."""
    for name in ALARMS:
        alarm: AlarmConfig = getattr(config, name)
        if name in _SHARES and not 0 <= alarm.threshold < 1:
            yield (
                f"alarms.{name}.threshold = {alarm.threshold:g} is of a share: from 0 to under 1; "
                f'alarms.{name}.action = "off" switches it off'
            )
        elif alarm.threshold < 0 or (name == "starved" and alarm.threshold == 0):
            yield f"alarms.{name}.threshold = {alarm.threshold:g}: {'over' if name == 'starved' else 'at least'} 0"
    for name in ("starved", "skipped"):
        if getattr(config, name).updates != 1:
            yield f"alarms.{name}.updates: it does not count updates; its threshold says how long or how often"
