"""Spikes: single updates in which a metric of the learner was far from its usual values.

Owns the rule, which docs/curves.md explains with the numbers of spikes that it finds in runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from unstable_lite.tracking.displayed_metrics import METRICS

WINDOW = 50
"""Number of updates before, whose median is the usual value."""
FIRST = 20
"""First value of a metric that can be a spike, usually that of update 20."""
TIMES = 15
"""Multiple of the usual value above which a value is a spike. That is also further than 8 median absolute deviations
from it, because half of all sizes are within one median of the median."""
_KL = tuple(f"learner/kl_to_{reference}" for reference in ("base", "initial", "average", "stage"))
JUDGED = ("learner/loss", "learner/policy_grad_norm", *_KL, "learner/entropy", "learner/mismatch_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    update: int
    metric: str
    value: float
    usual: float
    """Median of the absolute values of the updates before, above 0."""

    @property
    def text(self) -> str:
        return f"update {self.update}: {self.size_text}"

    @property
    def size_text(self) -> str:
        label, form = METRICS[self.metric].label, METRICS[self.metric].form
        times = abs(self.value) / self.usual
        return f"{label} {self.value:{form}}, {times:.0f} times the usual {self.usual:{form}}"


def find_spikes(updates: Iterable[Mapping[str, Any]]) -> list[Spike]:
    """Return the spikes in the lines of metrics of the updates, which are in order: the largest multiple first.

    Of neighbouring updates the one with the largest value counts. A metric that was mostly 0 has no usual value.
    """
    lines = list(updates)
    spikes = [spike for metric in JUDGED for spike in _spikes_of(metric, lines)]
    return sorted(spikes, key=lambda spike: -abs(spike.value) / spike.usual)


def _spikes_of(metric: str, lines: list[Mapping[str, Any]]) -> list[Spike]:
    n = METRICS[metric].n
    known = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None and (not n or line.get(n))]
    sizes = [abs(value) for _, value in known]
    spikes, newest = list[Spike](), -1
    for place in range(FIRST - 1, len(known)):
        usual = median(sizes[max(place - WINDOW, 0) : place])
        if sizes[place] > TIMES * usual > 0:
            spike = Spike(update=known[place][0], metric=metric, value=known[place][1], usual=usual)
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
