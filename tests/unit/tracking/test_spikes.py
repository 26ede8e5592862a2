"""Tests of the rule of spikes, which docs/curves.md explains."""

import random
import re
from collections.abc import Callable
from statistics import median

import pytest

from unstable_lite.tracking.displayed_metrics import JUDGED, METRICS, Spike, find_spikes, spike_texts

KL, LOSS, MISMATCH = "learner/kl_to_base", "learner/loss", "learner/mismatch_mean"


def updates(metric: str, size: Callable[[int], float | None], **others: float) -> list[dict[str, float | None]]:
    return [{"step": step, metric: size(step), **others} for step in range(1, 121)]


def noise(step: int) -> float:
    """Return values from 0.05 to 0.07."""
    return 0.06 + random.Random(step).uniform(-0.01, 0.01)


def test_spike_has_its_update_its_value_and_the_usual_one():
    (spike,) = find_spikes(updates(KL, lambda step: 2.9 if step == 88 else noise(step)))
    assert (spike.update, spike.metric, spike.value) == (88, KL, 2.9)
    assert spike.usual == pytest.approx(0.06, abs=0.005)
    assert spike.text == f"update 88: KL to base 2.9, {2.9 / spike.usual:.0f} times the usual {spike.usual:.3g}"


def test_every_spike_is_more_than_eight_median_absolute_deviations_from_the_median():
    """The rule has no condition for it, because fifteen times the median is always further."""
    found = 0
    for seed in range(60):
        values = [random.Random(seed * 1000 + step).lognormvariate(0, 1 + seed / 20) for step in range(120)]
        for spike in find_spikes(updates(KL, lambda step, values=values: values[step - 1])):  # type: ignore[misc]
            before = values[max(0, spike.update - 51) : spike.update - 1]
            deviation = median(abs(value - spike.usual) for value in before)
            assert spike.value - spike.usual > 8 * deviation
            found += 1
    assert found > 100


def test_loss_counts_by_its_absolute_value():
    (spike,) = find_spikes(updates(LOSS, lambda step: -3.0 if step == 50 else noise(step) * (-1) ** step))
    assert spike.value == -3.0 and "loss -3," in spike.text


def test_usual_value_moves_with_the_fifty_updates_before():
    """A level that stays is one spike, not one for each of its updates, and later is usual."""
    raised = find_spikes(updates(KL, lambda step: noise(step) * (1 if step < 40 else 50)))
    assert [40 <= spike.update <= 90 for spike in raised] == [True]
    assert find_spikes(updates(KL, lambda step: noise(step) * 1.05**step)) == []


def test_neighbours_are_one_spike_with_the_largest_value():
    bump = {87: 1.0, 88: 4.0, 89: 2.0, 91: 1.5}
    spikes = find_spikes(updates(KL, lambda step: bump.get(step, noise(step))))
    assert [(spike.update, spike.value) for spike in spikes] == [(88, 4.0), (91, 1.5)]


def test_updates_without_a_sample_are_left_out():
    lines = updates(MISMATCH, lambda step: 5.0 if step == 60 else None if step % 2 else noise(step))
    tokens = [line | {"learner/mismatch_tokens": 300 * (line["step"] != 60)} for line in lines]
    assert find_spikes(tokens) == []
    assert len(find_spikes([line | {"learner/mismatch_tokens": 300} for line in lines])) == 1


def test_five_spikes_are_listed_the_largest_first_and_the_others_are_counted():
    spikes = find_spikes(updates(KL, lambda step: float(step) if step % 10 == 0 else noise(step)))
    assert spike_texts(spikes)[0].startswith("update 120: ") and len(spike_texts(spikes[:5])) == 5
    assert spike_texts(spikes)[5:] == [f"and {len(spikes) - 5} more"]


def test_spikes_of_one_update_are_listed_together():
    spikes = [Spike(update=update, metric=metric, value=9, usual=0.1) for metric in (KL, LOSS) for update in (40, 90)]
    assert [re.findall(r"update \d+|KL|loss", text) for text in spike_texts(spikes)] == [
        ["update 40", "KL", "loss"],
        ["update 90", "KL", "loss"],
    ]


@pytest.mark.parametrize(
    ("metric", "size", "num_spikes"),
    [
        *(pytest.param(metric, noise, 0, id=f"{metric} only scatters") for metric in JUDGED),
        pytest.param(KL, lambda step: 14 * 0.06 if step == 88 else 0.06, 0, id="fourteen times the usual value"),
        pytest.param(KL, lambda step: 16 * 0.06 if step == 88 else 0.06, 1, id="sixteen times"),
        pytest.param(KL, lambda step: 3.0 if step == 19 else noise(step), 0, id="among the first nineteen updates"),
        pytest.param(KL, lambda step: 3.0 if step == 20 else noise(step), 1, id="after them"),
        pytest.param(KL, lambda step: 0.5 if step > 60 else 0.0, 0, id="mostly zero before"),
        pytest.param("learner/seconds", lambda step: 900.0 if step == 60 else noise(step), 0, id="not judged"),
    ],
)
def test_number_of_spikes(metric, size, num_spikes):
    assert len(find_spikes(updates(metric, size))) == num_spikes
    assert {METRICS[name].topic for name in JUDGED} == {"health"}
