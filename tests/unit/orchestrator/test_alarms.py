"""The begin, end and repetition of alarms, and the test for a collapse."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.config import Config
from unstable_lite.config.tracking import AlarmsConfig, ShareAlarm
from unstable_lite.orchestrator.alarms import ALARMS, SAY_EVERY, Alarms, Contest, Reading, contest_of, readings_of
from unstable_lite.tracking.evaluations import Evaluation, Tally
from unstable_lite.tracking.intervals import mean_interval, points_interval, share_interval

PAGE = (Path(__file__).parents[3] / "docs" / "collapse.md").read_text()


def alarms(**tables: dict[str, Any]) -> Alarms:
    return Alarms(AlarmsConfig.model_validate(tables))


def phases(judge: Alarms, values: list[float], alarm: str = "staleness") -> list[tuple[int, str]]:
    """Return pairs of a reading, counted from 1, and a phase."""
    return [
        (update, change.phase)
        for update, value in enumerate(values, start=1)
        for change in judge.judge(update, [Reading(alarm=alarm, value=value, n=10)])
    ]


def test_alarm_begins_and_ends_after_consecutive_readings():
    judge = alarms(dropped={"threshold": 0.5})
    assert phases(judge, [0.6, 0.6, 0.5, 0.6, 0.6, 0.6, 0.6, 0.5, 0.5, 0.6, 0.5, 0.5, 0.5], "dropped") == [
        (6, "begins"),
        (13, "ends"),
    ]
    assert judge.counts()["dropped"] == 1
    assert judge.on() == []


def test_lasting_alarm_is_repeated_and_a_flickering_one_is_silent():
    judge = alarms(staleness={"threshold": 5})
    assert phases(judge, [6.0] * (5 + 2 * SAY_EVERY)) == [
        (5, "begins"),
        (5 + SAY_EVERY, "stays"),
        (5 + 2 * SAY_EVERY, "stays"),
    ]
    assert judge.on() == ["staleness"]
    assert phases(alarms(staleness={"threshold": 5}), [6, 4] * 50) == []


def test_low_entropy_and_nan_raise_alarms():
    for value, on in ((0.01, ["entropy"]), (0.02, []), (3.5, [])):
        judge = alarms()
        for update in (1, 2, 3):
            judge.judge(update, readings_of({"learner/entropy": value, "learner/num_tokens": 7}))
        assert judge.on() == on
    judge = alarms()
    judge.judge(1, readings_of({"learner/mismatch_mean": float("nan"), "learner/mismatch_tokens": 7}))
    assert judge.on() == ["mismatch"]


def test_missing_or_empty_measurements_are_not_judged():
    assert readings_of({}) == []
    assert readings_of({"learner/mismatch_mean": 0.0, "learner/mismatch_tokens": 0.0}) == []
    readings = readings_of({"learner/mismatch_mean": 0.5, "learner/mismatch_tokens": 3.0, "learner/entropy": 1.0})
    assert [(reading.alarm, reading.value, reading.n) for reading in readings] == [("mismatch", 0.5, 3)]


def test_disabled_alarm_is_neither_raised_nor_counted():
    judge = alarms(staleness={"threshold": 5, "action": "off"})
    assert phases(judge, [9.0] * 50) == []
    assert "staleness" not in judge.counts()


def test_each_subject_is_judged_separately_and_named():
    judge = alarms(invalid_moves={"action": "pause"})
    readings = [Reading(alarm="invalid_moves", value=v, n=512, subject=e) for e, v in (("A", 0.95), ("B", 0.1))]
    assert [judge.judge(update, readings) for update in range(1, 5)] == [[]] * 4
    (change,) = judge.judge(5, readings)
    assert (change.phase, change.action) == ("begins", "pause")
    assert "95.0" in change.text and "512" in change.text and " A " in change.text
    assert judge.is_on("invalid_moves", "A")
    assert not judge.is_on("invalid_moves", "B")


@pytest.mark.parametrize("name", ALARMS)
def test_every_alarm_states_reading_threshold_meaning_and_advice(name):
    judge = alarms(**{name: {"action": "warn"}})
    far = -1.0 if ALARMS[name].is_under else 1e9
    reading = Reading(alarm=name, value=far, n=1234, subject="S", detail="D")
    (change,) = [change for update in range(ALARMS[name].updates) for change in judge.judge(update, [reading])]
    threshold = getattr(AlarmsConfig(), name).threshold
    assert change.text.startswith(f"{name}: ")
    assert "1,234" in change.text or ": D" in change.text
    form = ALARMS[name].threshold or ("{:.0%}" if isinstance(getattr(AlarmsConfig(), name), ShareAlarm) else "{:g}")
    assert form.format(threshold) in change.text
    assert ALARMS[name].means in change.text and change.text.endswith(ALARMS[name].advice)


def test_config_keys_that_alarms_recommend_exist():
    named = {key for alarm in ALARMS.values() for key in re.findall(r"\b([a-z]+)\.([a-z_]+)", alarm.advice)}
    keys = {key for key in named if key[0] in Config.model_fields}
    assert ("learner", "entropy_coefficient") in keys
    for section, key in keys:
        table = Config.model_fields[section].annotation
        assert key in getattr(table, "model_fields", {}), f"{section}.{key}"


def test_every_alarm_has_a_section_and_a_docs_row_with_its_defaults():
    assert list(ALARMS) == list(AlarmsConfig.model_fields)
    rows = re.findall(r"^\| \[`(\w+)`\]\([^)]*\) \| .* \| (over|under) ([\d.]+)[^|]* \| (\d+) \| (\w+) \|", PAGE, re.M)
    written = {name: (side, float(threshold), int(n), action) for name, side, threshold, n, action in rows}
    config = {name: getattr(AlarmsConfig(), name) for name in ALARMS}
    assert written == {
        name: ("under" if ALARMS[name].is_under else "over", c.threshold, ALARMS[name].updates, c.action)
        for name, c in config.items()
    }


def evaluation(wins: int, n: int = 400, step: int = 10, **changes: Any) -> Evaluation:
    fields = {"draws": 0, "losses": n - wins, "invalid": 0, "void": 0, "mean_reward": 0.0, "reward_std": 1.0}
    return Evaluation(
        label="x", model=f"ckpt-{step}", step=step, env_id="E", opponent="O", n=n, wins=wins, **(fields | changes)
    )


def gaps(contest: Contest, evaluations: list[Evaluation]) -> list[float]:
    return [reading.value for each in evaluations for reading in contest.add("collapse", "S", each)]


def test_result_collapses_if_its_interval_is_below_the_best_one():
    contest = Contest()
    fine, worse = gaps(contest, [evaluation(200, step=10), evaluation(330, step=20), evaluation(240, step=30)])
    assert fine < 0 < worse
    assert contest.best.model == "ckpt-20"
    (reading,) = contest.add("collapse", "S", evaluation(200, step=40))
    assert re.search(r"^S: ckpt-40 50\.0 %.* 400 .*45\.1–54\.9.* ckpt-20 82\.5 %.* 78\.5–85\.9", reading.detail)
    assert re.search(r"do not overlap: they lie \d+\.\d percentage points apart$", reading.detail)
    # Two results: disjoint intervals of 95 % decide.
    (_, high), (low, _) = points_interval(161, 0, 239), points_interval(200, 0, 200)
    assert gaps(Contest(), [evaluation(200), evaluation(161)]) == [pytest.approx(low - high)]


def test_result_is_judged_by_the_deals_of_its_games():
    """The luck of every deal cancels: one of its games is won, the other lost."""
    alike = tuple((1.0, 0.0) for _ in range(200))
    first = replace(evaluation(200), scores=alike)
    second = replace(evaluation(180), scores=((0.0, 0.0),) * 20 + alike[20:])
    assert gaps(Contest(), [evaluation(200), evaluation(180)])[0] < 0 < gaps(Contest(), [first, second])[0]


def test_contests_that_earlier_versions_saved_have_the_same_results():
    saved = {"who": "ckpt-20", "update": 20, "n": 100, "what": None, "std": None, "deals": []}
    deals = [[1.0, 0.5], [0.0, 1.0]]
    for result, expected in (
        (saved | {"mean": 0.6, "draws": 20}, points_interval(50, 20, 30)),
        (saved | {"mean": 0.625, "draws": 1, "n": 4, "deals": deals}, share_interval(deals)),
        (saved | {"mean": 0.25, "draws": 0, "std": 0.5}, mean_interval(0.25, 0.5, 100)),
        ({"who": "ckpt-20", "update": 20, "n": 100, "mean": 0.6}, points_interval(60, 0, 40)),
    ):
        best = contest_of({"best": result, "newest": None, "compared": 1}).best
        assert (best.model, best.step, best.value, best.interval) == ("ckpt-20", 20, result["mean"], expected)


def test_lost_draws_against_an_unbeatable_opponent_are_a_collapse():
    drawn = [
        evaluation(0, draws=draws, losses=400 - draws, step=step) for step, draws in ((0, 40), (20, 380), (40, 10))
    ]
    rise, fall = gaps(Contest(), drawn)
    assert rise == pytest.approx(-0.451, abs=1e-3)
    assert fall == pytest.approx(0.436, abs=1e-3)


def test_late_results_are_judged_in_the_order_of_updates():
    contest = Contest()
    gaps(contest, [evaluation(200, step=0), evaluation(320, step=20), evaluation(220, step=10)])
    newest, best = contest.newest, contest.best
    assert newest is not None and newest == best
    assert newest.model == "ckpt-20", "the better result of update 20 is the newest: no collapse"
    assert gaps(contest, [evaluation(250, step=15)]) == [], "the result of update 20 was already judged"
    assert not any(gap > 0 for gap in gaps(contest, [evaluation(310, step=30)]))
    assert gaps(contest, [evaluation(390, step=25)])[0] > 0, "update 30 is worse than 25, which arrived later"
    assert contest.newest.model == "ckpt-30"


def test_rewards_are_compared_in_envs_without_winners():
    first, second = (evaluation(0, losses=0, mean_reward=mean, reward_std=0.5) for mean in (0.9, 0.2))
    assert gaps(Contest(), [first, second])[0] == pytest.approx(0.7 - 2 * 1.96 * 0.5 / 20, abs=1e-3)


def test_identical_rewards_decide_only_what_shares_would():
    def paid(games: int) -> Evaluation:
        """Return an evaluation of 20 games, of which `games` ended with a reward of 1 and the others with 0."""
        tally = Tally()
        for number in range(20):
            tally.add("na", float(number < games), own_invalid=False)
        return tally.evaluation("x", "ckpt-10", 10, "E", "none")

    for last, is_collapse in ((15, False), (19, False), (0, True)):
        (gap,) = gaps(Contest(), [paid(20), paid(last)])
        (share_gap,) = gaps(Contest(), [evaluation(20, n=20), evaluation(last, n=20)])
        assert (gap > 0, share_gap > 0) == (is_collapse, is_collapse)


@pytest.mark.parametrize("runs", [10, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("alike", [0.0, pytest.param(0.5, marks=pytest.mark.nightly), 0.9])
def test_unchanging_policy_rarely_collapses_against_any_of_four_opponents(alike, runs):
    """Both games of a deal have the same result with probability `alike`, else each its own; docs/collapse.md."""
    chance, false_alarms = random.Random(7), 0
    for _ in range(runs):
        is_false_alarm = False
        for share in (0.9, 0.05, 0.95, 0.88):
            contest = Contest()
            for update in range(20):
                first = [chance.random() < share for _ in range(200)]
                second = [won if chance.random() < alike else chance.random() < share for won in first]
                deals = tuple((float(one), float(other)) for one, other in zip(first, second, strict=True))
                result = replace(evaluation(sum(first) + sum(second), step=update), scores=deals)
                is_false_alarm |= any(reading.value > 0 for reading in contest.add("collapse", "S", result))
        false_alarms += is_false_alarm
    assert false_alarms <= 0.05 * runs
