"""Intervals over deals that were played from every seat."""

import json
import math
from statistics import fmean, stdev

import msgspec
import numpy as np
import pytest

from fakes.game_records import make_record, make_spec
from unstable_lite.tracking.evaluations import Evaluation, summarise_evaluation
from unstable_lite.tracking.intervals import deals_interval, points_interval, t_95
from unstable_lite.types import UTILITY, GameRecord, ModelRef

MODEL = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
OTHER = ModelRef(uid="fixed-o", kind="fixed", name="o")
KUHN = "openspiel:kuhn_poker"


def record(number: int, utility: float | None, env_id: str = KUHN) -> GameRecord:
    """Return game `number` of a quota, which the model ended with this utility; None: a void game."""
    seat, reward = number % 2, 0.0 if utility is None else utility / 2
    models, rewards = ((MODEL, OTHER), (reward, -reward)) if seat == 0 else ((OTHER, MODEL), (-reward, reward))
    spec = make_spec(*models, kind="eval", game_idx=number, env_id=env_id, seed=number // 2)
    shown = {} if utility is None else {seat: {UTILITY: utility}, 1 - seat: {UTILITY: -utility}}
    return make_record(spec, *rewards, end="void" if utility is None else "natural", game_info=shown)


def evaluation(utilities: list[float | None], env_id: str = KUHN) -> Evaluation:
    records = [record(number, utility, env_id) for number, utility in enumerate(utilities)]
    return summarise_evaluation("before", 0, MODEL, env_id, "o", records[::-1])


def test_interval_is_over_the_means_of_whole_deals() -> None:
    scores = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.5), (None, 1.0), (0.0,)]
    means = [0.5, 1.0, 0.25]
    half = t_95(2) * stdev(means) / math.sqrt(3)
    found = deals_interval(scores)
    assert (found.mean, found.seeds) == (pytest.approx(fmean(means)), 3)
    assert (found.low, found.high) == (pytest.approx(fmean(means) - half), pytest.approx(fmean(means) + half))


@pytest.mark.parametrize("scores", [(), ((1.0, 0.0),), ((1.0,), (0.0,)), ((1.0, None), (None, 0.0), (1.0, 1.0))])
def test_there_is_no_interval_for_one_deal_or_one_seat(scores: tuple[tuple[float | None, ...], ...]) -> None:
    assert deals_interval(scores) is None


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        luck, skill = rng.normal(size=30), rng.normal(0.3, 0.5, size=(30, 2))
        found = deals_interval((skill + np.stack([luck, -luck], 1)).tolist())
        covered += found.low <= 0.3 <= found.high
    assert 930 <= covered <= 970


def test_luck_of_the_deal_cancels_in_points_and_utility() -> None:
    rng = np.random.default_rng(1)
    utilities: list[float | None] = []
    for luck in rng.choice([-2.0, 2.0], size=100):
        utilities += [luck, -luck if rng.random() < 0.9 else luck]
    found = evaluation(utilities)
    points, reward = found.points_over_deals, found.reward_over_deals
    assert (points.seeds, reward.seeds) == (100, 100)
    assert points.mean == pytest.approx(found.points)
    assert reward.mean == pytest.approx(found.mean_reward)
    low, high = points_interval(found.wins, found.draws, found.losses)
    assert points.high - points.low < 0.6 * (high - low)
    low, high = found.reward_interval
    assert reward.high - reward.low < 0.6 * (high - low)
    assert found.describe().endswith(
        f"; over 100 deals played from every seat (95 %): points {points.low:.1%} – {points.high:.1%}, "
        f"utility {reward.low:+.3f} – {reward.high:+.3f}"
    )
    line = msgspec.json.decode(msgspec.json.encode(found.to_json()))
    assert line["points_over_deals"] == {"mean": points.mean, "low": points.low, "high": points.high, "seeds": 100}
    assert line["reward_over_deals"]["high"] == reward.high
    read = Evaluation.from_json(line)
    assert (read.scores, read.rewards) == (found.scores, found.rewards)


def test_void_game_takes_its_deal_out() -> None:
    found = evaluation([2.0, -1.0, 1.0, None, 1.0, 1.0])
    assert found.scores == ((1.0, 0.0), (1.0, None), (1.0, 1.0))
    assert found.rewards == ((2.0, -1.0), (1.0, None), (1.0, 1.0))
    assert (found.points_over_deals.seeds, found.points_over_deals.mean) == (2, 0.75)
    assert 0 <= found.points_over_deals.low and found.points_over_deals.high <= 1


def test_equal_deals_leave_points_a_width_and_utility_no_interval() -> None:
    found = evaluation([2.0, -2.0] * 10)
    assert 0 < found.points_over_deals.low < 0.5 < found.points_over_deals.high < 1
    assert found.reward_over_deals is None
    assert "utility" not in found.describe()


def test_utility_is_named_in_games_of_openspiel_only() -> None:
    utilities = [1.0, -1.0, 1.0, 1.0]
    assert "utility" in evaluation(utilities).describe()
    text = evaluation(utilities, "Nim-v0-train").describe()
    assert "over 2 deals" in text and "utility" not in text


def test_line_of_an_older_run_can_be_read() -> None:
    line = json.loads(msgspec.json.encode(evaluation([1.0, -1.0, 1.0, 1.0]).to_json()))
    del line["rewards"], line["points_over_deals"], line["reward_over_deals"]
    assert Evaluation.from_json(line).reward_over_deals is None
