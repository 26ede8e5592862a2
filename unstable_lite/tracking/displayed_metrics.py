"""Metrics that a person watches: one table of their labels, formats and meanings, for every view of a run.

Owns also the texts of games and time, which docs/curves.md defines, and the rule of spikes: single updates in which a
metric of the learner was far from its usual values. docs/curves.md says how many it finds in runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from unstable_lite.types import uid_of

WINDOW = 50
"""Number of updates before, whose median is the usual value."""
FIRST = 20
"""First value of a metric that can be a spike, usually that of update 20."""
TIMES = 15
"""Multiple of the usual value above which a value is a spike. That is also further than 8 median absolute deviations
from it, because half of all sizes are within one median of the median."""
_KL = tuple(f"learner/kl_to_{reference}" for reference in ("base", "initial", "average", "stage"))
JUDGED = ("learner/loss", "learner/policy_grad_norm", *_KL, "learner/entropy", "learner/mismatch_mean")


class Metric(NamedTuple):
    label: str
    name: str
    form: str = ".3g"
    topic: str = ""
    """Group of charts of the report and of TensorBoard: one of `TOPICS`."""
    meaning: str = ""
    n: str | None = None
    """Metric with the sample size, if that may be 0."""
    title: str = ""
    """Title of the chart, if it is not the label."""

    def shown(self, metrics: Mapping[str, float]) -> str:
        """Return label and value."""
        return f"{self.label} {metrics[self.name]:{self.form}}"

    def of(self, policy: str) -> Metric:
        """Return the metric of one policy, under its name."""
        return self._replace(name=uid_of(policy, self.name), n=self.n and uid_of(policy, self.n))


_LOGPROBS = "How far engine and learner disagree about the same tokens' log-probabilities. Should stay near 0."
_ENTROPY = "How open the model's choice of tokens is, in nats. Near 0 it always writes the same."
_WEIGHT = "Should stay near 1: far from it, old games say little about the policy."
_ALL = (
    Metric("zero advantages", "learner/zero_advantage", ".1%", "health", "Share of steps that teach nothing."),
    Metric("staleness", "learner/staleness_mean", ".3g", "health", "Updates from playing a turn to learning from it."),
    Metric("entropy", "learner/entropy", topic="health", meaning=_ENTROPY),
    Metric("KL to base", "learner/kl_to_base", topic="health", meaning="How far the policy is from the base model."),
    Metric("mismatch", "learner/mismatch_mean", ".3g", "health", _LOGPROBS, n="learner/mismatch_tokens"),
    Metric("loss", "learner/loss", topic="health", meaning="Its level says little; a jump says something."),
    Metric("gradient norm", "learner/policy_grad_norm", topic="health", meaning="Before clipping."),
    Metric("importance weight", "learner/importance_weight_mean", topic="health", meaning=_WEIGHT),
    Metric("weights clipped", "learner/importance_weight_clipped", ".1%", "health", "Share of tokens at the cap."),
    Metric("greatest staleness", "learner/staleness_max", ",.0f", "health"),
    Metric("value loss", "learner/value_loss", topic="health"),
    Metric("KL to the start", "learner/kl_to_initial", topic="health", meaning="How far it is from its first adapter."),
    Metric("KL to the average", "learner/kl_to_average", topic="health", meaning="How far it is from its own average."),
    Metric("KL to the stage", "learner/kl_to_stage", topic="health", meaning="How far it is from its newest copy."),
    Metric("wait for games (s)", "learner/wait_for_batch_s", ".3g", "speed", "How long the learner waited."),
    Metric("update (s)", "learner/seconds", ".3g", "speed", "How long the learner computed."),
    Metric("weight sync (s)", "learner/publish_s", ".3g", "speed", "Time until games use the new adapter."),
    Metric("tokens trained/s", "learner/tokens_per_s", ",.0f", "speed", "Prompts and completions of an update."),
    Metric("tokens generated/s", "run/tokens_per_s", ",.0f", "speed", "Of all engines, on average since the start."),
    Metric("steps in buffer", "buffer/size", ",.0f", "speed"),
    Metric("steps dropped", "buffer/dropped_stale", ",.0f", "speed", "Too stale to be trained on, since the start."),
)
"""Metrics in the order of `top`."""
METRICS = {metric.name: metric for metric in _ALL}
TOPICS = {"play": "Does it play better?", "health": "Is it healthy?", "speed": "How fast is it?"}
"""Questions that groups of charts answer."""
_REWARD, _POINTS = "Of the policy's seats, over the newest 512.", "Against every opponent; against itself it is a half."
_EXACT = "A best response wins this much a game, in its units: exact, or estimated; 0 is an equilibrium."
_LEGAL = "The same, if every answer were legal."
_FORMAT = "collection-{}/Format Success Rate - correct_answer_format"
_INVALID = "collection-{}/Ended by own invalid move"
_OF_ENV = (
    Metric("reward", "collection-{}/reward", "+.2f", "play", _REWARD, title="Reward in training games"),
    Metric("points", "collection-{}/Points", ".1%", "play", _POINTS, title="Points in training games"),
    Metric("exploitability", "exploitability/{}", ".4f", "play", _EXACT),
    Metric("of legal answers", "exploitability_legal/{}", ".4f", "play", _LEGAL, title="Exploitability, legal"),
    Metric("format ok", _FORMAT, ".1%", "health", "Share of turns.", title="Answers in the right place"),
    Metric("own invalid", _INVALID, ".1%", "health", "Share of games.", title="Lost by an own invalid move"),
    Metric("turns a game", "collection-{}/Game Length", topic="health"),
    Metric("tokens a turn", "collection-{}/Response Length (token)", topic="health"),
)

_SHARE = re.compile(
    r"(Points|Rate|Rate - \w+|Optimal Moves|invalid move|share|clipped|/clip_fraction|/pct_\w+|learner/zero_advantage)"
    r"( \(.*\)| low| high)*$|/(Draw|Truncated|Pct\. .*|(repeated|identical)_\w+|value_dir_acc)$"
)

OF_RUN = ("alarms", "ended", "inference", "opponents", "run", "transport")
"""Groups of metrics that are the run's, not one of its policies'."""


def of_policy(policy: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a policy's metrics under its names, `exploiter/learner/loss`; those of the run keep theirs."""
    return {uid_of("" if name.partition("/")[0] in OF_RUN else policy, name): of for name, of in metrics.items()}


def named(policy: str, text: str) -> str:
    """Return a text about one policy of a run, whose name comes first if the run has several."""
    return f"{policy}: {text}" if policy else text


def is_share(name: str) -> bool:
    """Return whether a metric, or the edge of its interval, is a share between 0 and 1."""
    return bool(_SHARE.search(name))


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a run since its start, whose definitions are in docs/curves.md."""

    games: int
    """Number of finished games, of which `eval_games` in evaluations, and `void_games` without a result."""
    eval_games: int
    void_games: int
    seconds: float
    """Time of the run, without the breaks before it was resumed."""

    @property
    def games_text(self) -> str:
        return f"{self.games:,}, of which {self.eval_games:,} in evaluations; {self.void_games:,} void"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def of_topic(topic: str) -> list[Metric]:
    return [metric for metric in METRICS.values() if metric.topic == topic]


def metrics_of_env(env_id: str) -> list[Metric]:
    """Return the metrics of one env; exact evaluations (`run.exact_every`) are in the game's units."""
    return [metric._replace(name=metric.name.format(env_id)) for metric in _OF_ENV]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    update: int
    metric: str
    value: float
    usual: float
    """Median of the absolute values of the updates before, above 0."""
    policy: str = ""

    @property
    def text(self) -> str:
        return f"update {self.update}: {self.size_text}"

    @property
    def size_text(self) -> str:
        label, form = METRICS[self.metric].label, METRICS[self.metric].form
        times = abs(self.value) / self.usual
        return named(self.policy, f"{label} {self.value:{form}}, {times:.0f} times the usual {self.usual:{form}}")


def find_spikes(updates: Iterable[Mapping[str, Any]], policies: Iterable[str] = ("",)) -> list[Spike]:
    """Return the spikes in the lines of metrics of the updates, which are in order: the largest multiple first.

    Of neighbouring updates the one with the largest value counts. A metric that was mostly 0 has no usual value.
    """
    lines = list(updates)
    spikes = [spike for policy in policies for metric in JUDGED for spike in _spikes_of(METRICS[metric], policy, lines)]
    return sorted(spikes, key=lambda spike: -abs(spike.value) / spike.usual)


def _spikes_of(metric: Metric, policy: str, lines: list[Mapping[str, Any]]) -> list[Spike]:
    name, n = uid_of(policy, metric.name), metric.n and uid_of(policy, metric.n)
    known = [(line["step"], line[name]) for line in lines if line.get(name) is not None and (not n or line.get(n))]
    sizes = [abs(value) for _, value in known]
    spikes, newest = list[Spike](), -1
    for place in range(FIRST - 1, len(known)):
        usual = median(sizes[max(place - WINDOW, 0) : place])
        if sizes[place] > TIMES * usual > 0:
            spike = Spike(update=known[place][0], metric=metric.name, policy=policy, value=known[place][1], usual=usual)
            if place != newest + 1:
                spikes.append(spike)
            elif sizes[place] > abs(spikes[-1].value):
                spikes[-1] = spike
            newest = place
    return spikes


def spike_texts(spikes: list[Spike], listed: int = 5) -> list[str]:
    """Return a text for each of the first updates with spikes, and one that counts the others if there are any."""
    updates = [*dict.fromkeys(spike.update for spike in spikes)]
    sizes = {update: [spike.size_text for spike in spikes if spike.update == update] for update in updates[:listed]}
    others = len(updates) - listed
    return [f"update {update}: {'; '.join(sizes[update])}" for update in sizes] + [f"and {others} more"] * (others > 0)
