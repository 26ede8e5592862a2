"""Intervals of results whose games share deals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev

import msgspec
import numpy as np
import pytest
import scipy.stats

from fakes.game_records import make_record, make_spec
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.tracking.evaluations import Evaluation, summarise_evaluation
from unstable_lite.tracking.intervals import mean_interval, points_interval, share_interval, student, wilson_interval
from unstable_lite.types import UTILITY, GameRecord, ModelRef

MODEL = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
OTHER = ModelRef(uid="fixed-o", kind="fixed", name="o")
KUHN = "openspiel:kuhn_poker"
SHARES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.99)


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


@cache
def interval_of_counts(seats: int, counts: tuple[int, ...]) -> tuple[float, float]:
    """counts: number of deals by the sum of their scores in half points."""
    deals = [(half / 2 / seats,) * seats for half, count in enumerate(counts) for _ in range(count)]
    return share_interval(deals)


def coverage(share: float, alike: float, seats: int, games: int, draws: float, repeats: int) -> float:
    """Return how often the interval covers the share.

    alike: correlation of the games of a deal; they have a common random number that often, or, if it is negative,
    numbers that are as far apart as possible. draws: share of draws, relative to the most that are possible.
    """
    rng = np.random.default_rng(0)
    num_draws = draws * 2 * min(share, 1 - share)
    wins, shape = share - num_draws / 2, (repeats, games // seats, 1)
    own, common = rng.random((*shape[:2], seats)), rng.random(shape)
    together = common if alike >= 0 else (common + np.arange(seats) / seats) % 1
    u = np.where(rng.random(shape) < abs(alike), together, own)
    halves = (np.where(u < wins, 2, u < wins + num_draws)).sum(2)
    rows = np.stack([(halves == half).sum(1) for half in range(2 * seats + 1)], 1)
    found = [interval_of_counts(seats, tuple(row)) for row in rows.tolist()]
    return fmean(low <= share <= high for low, high in found)


def check_coverage(seats: int, games: int, draws: float, repeats: int, tolerance: float = 0.0) -> None:
    """Check the mean over the shares, and the worst share, for each correlation."""
    mean, worst = (0.93, 0.83) if seats == 2 else (0.91, 0.80)
    for alike in (-0.9, -0.5, 0.0, 0.5, 0.9):
        covered = [coverage(share, alike, seats, games, draws, repeats) for share in SHARES]
        assert fmean(covered) >= mean - tolerance and min(covered) >= worst - tolerance, (alike, covered)


@pytest.mark.parametrize(("seats", "games", "draws"), [(2, 20, 0.0), (2, 100, 0.9), (3, 50, 0.5), (4, 20, 0.0)])
def test_interval_covers_the_share_as_often_as_docs_say(seats, games, draws):
    check_coverage(seats, games, draws, repeats=200, tolerance=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("seats", [2, 3, 4])
@pytest.mark.timeout(600)
def test_interval_covers_every_share_as_often_as_docs_say(seats):
    for games in (20, 50, 100, 200, 400):
        for draws in (0.0, 0.5, 0.9):
            check_coverage(seats, games, draws, repeats=400)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 99, 100, 101, 400])
def test_quantiles_of_student_are_those_of_scipy(freedom):
    for level in (0.8, 0.95, 0.999):
        assert student(freedom, level) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, freedom), rel=5e-5)


def test_luck_of_the_deal_cancels_in_points_and_utility():
    rng = np.random.default_rng(1)
    utilities: list[float | None] = []
    for luck in rng.choice([-2.0, 2.0], size=100):
        utilities += [luck, -luck if rng.random() < 0.9 else luck]
    found = evaluation(utilities)
    independent = replace(found, scores=(), rewards=())
    for name in ("interval_at", "reward_interval"):
        (low, high), (lowest, highest) = getattr(found, name)(0.95), getattr(independent, name)(0.95)
        assert high - low < 0.6 * (highest - lowest), name
    low, high = found.reward_interval()
    assert "utility" not in evaluation(utilities, "Nim-v0-train").describe()
    assert found.describe().endswith(f"; mean utility {found.mean_reward:+.3f} (95 %: {low:+.3f} to {high:+.3f})")
    line = msgspec.json.decode(msgspec.json.encode(found.to_json()))
    assert line["interval"] == list(found.interval)
    read = Evaluation.from_json(line)
    assert (read.scores, read.rewards, read.interval) == (found.scores, found.rewards, found.interval)


def test_games_without_deals_are_deals_of_their_own():
    assert points_interval(3, 4, 5) == share_interval([(1.0,)] * 3 + [(0.5,)] * 4 + [(0.0,)] * 5)
    assert points_interval(0, 0, 0) == points_interval(1, 0, 0) == (0.0, 1.0)
    low, high = points_interval(0, 400, 0)
    assert 0.49 < low < 0.5 < high < 0.51
    assert points_interval(3, 5, 2) == pytest.approx([1 - edge for edge in reversed(points_interval(2, 5, 3))])


def test_void_game_leaves_the_rest_of_its_deal():
    found = evaluation([2.0, -1.0, 1.0, None, 1.0, 1.0, None, None])
    assert found.scores == ((1.0, 0.0), (1.0, None), (1.0, 1.0), (None, None))
    assert found.rewards == ((2.0, -1.0), (1.0, None), (1.0, 1.0), (None, None))
    assert found.interval == share_interval([(1.0, 0.0), (1.0,), (1.0, 1.0)])


def test_equal_results_leave_the_interval_a_width():
    found = evaluation([2.0, -2.0] * 10)
    assert 0 < found.interval[0] < 0.5 < found.interval[1] < 1
    assert found.reward_interval()[0] < 0 < found.reward_interval()[1]
    low, high = mean_interval(0.2, stdev([0.3 - 0.1, 0.5 - 0.3]), 2)
    assert low < -0.5 and high > 0.5, "equal but for rounding"
    won = evaluation([1.0] * 40)
    assert won.interval[1] == 1 and 0.7 < won.interval[0] < wilson_interval(40, 40)[0]


def test_line_of_an_older_run_has_the_interval_of_now(tmp_path):
    found = evaluation([1.0, -1.0, 1.0, 1.0])
    line = json.loads(msgspec.json.encode(found.to_json())) | {"interval": [0.0, 0.1], "points_over_deals": None}
    del line["rewards"]
    read = Evaluation.from_json(line)
    assert read.interval == found.interval and math.isfinite(read.reward_interval()[0])
    (tmp_path / "config.toml").write_text("model_name = 'm'\ntrain_envs = []\n[run]\nlearning_steps = 3\n")
    (tmp_path / "eval.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    run = RunDirectory(tmp_path)
    run.refresh()
    assert [row.newest.interval for row in run.results()] == [found.interval]
