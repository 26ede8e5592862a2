"""The limit on games in flight, which must never block the run for ever."""

import asyncio
import math

import pytest
from test_collector import MIRROR, League, any_cell_of_many

from fakes import game_records
from fakes.game_records import BASE, Observer, make_record
from unstable_lite.rollout.back_pressure import InFlight, spread_of, turn_spread_of
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.rollout.collector import LockStep
from unstable_lite.types import GameSpec


def make_spec(game_idx: int, env_id: str = "E", seats: int = 2) -> GameSpec:
    return game_records.make_spec(BASE, BASE, trained=range(seats), game_idx=game_idx, env_id=env_id, max_turns=50)


def test_games_in_flight_count_by_env_and_collected_seats_and_lengths_are_learnt_in_starting_order():
    in_flight = InFlight(10, 10, 8, {"E": 3.0, "F": 10.0})
    in_flight.begin(make_spec(0))
    in_flight.begin(make_spec(1, "F", seats=1))
    assert in_flight.steps == 2 * 3.0 + 10.0
    in_flight.end(1, 4)
    assert in_flight.steps == 2 * 3.0
    in_flight = InFlight(10, 10, 8, {})
    in_flight.begin(make_spec(0))
    assert in_flight.steps == 50
    in_flight = InFlight(10, 10, 8, {"E": 3.0})
    for game_idx in range(101):
        in_flight.begin(make_spec(game_idx))
    for game_idx in range(1, 100):
        in_flight.end(game_idx, 2)
    assert in_flight.steps == 2 * 2 * 3.0, "game 0, the first, is still in flight"
    in_flight.end(0, 40)
    assert in_flight.steps == pytest.approx(2 * 1.0, abs=0.2)


@pytest.mark.parametrize(
    ("max_age", "lifetimes", "limit"),
    [
        pytest.param(8, [(10, 5)] * 20, 700, id="games of one length"),
        pytest.param(8, [(6, 6)] * 50 + [(30, 30)] * 50, 700 * 18 / 30, id="long over mean lifetime"),
        pytest.param(8, [(10, 10)] * 10_000 + [(200, 200)] * 3, 700, id="without the top percent"),
        pytest.param(1, [(10, 5)] * 20, 0, id="no game in flight during an update"),
    ],
)
def test_limit_grows_with_allowed_age_and_shrinks_with_the_spread_of_lifetimes(max_age, lifetimes, limit):
    in_flight = InFlight(100, 100, max_age, {})
    in_flight.set_spreads(lifetimes)
    assert in_flight.limit == pytest.approx(limit, rel=0.01)


def test_slots_limit_the_length_of_turns_instead_of_games():
    by_turn = InFlight(100, 100, 8, {}, max_turn_age=1)
    rare = [(10.0, 10)] * 950 + [(200.0, 200)]
    by_turn.set_spreads(rare)
    assert by_turn.spread < 0.6 * spread_of(rare), "only the first turns of a long game are old"
    by_turn.set_spreads([(20.0, 10)] * 100)
    assert turn_spread_of([(20.0, 1)] * 100) == turn_spread_of([(0.0, 1)]) == turn_spread_of([(0.0, 0)]) == 2.0
    assert by_turn.limit == pytest.approx(100 / 0.2), "a turn takes up to a fifth of a game's lifetime"
    by_turn.set_spreads([(20.0, 1)] * 100)
    assert by_turn.limit == pytest.approx(100 / 2), "as short as slots require, although steps may be older"


async def test_cancelled_waiter_for_room_passes_its_turn_on():
    buffer = StepBuffer(2)
    buffer.in_flight = InFlight(2, 2, 0, {"E": 3.0})
    buffer.begin_game(make_spec(0))
    first, second = (asyncio.create_task(buffer.wait_for_room()) for _ in range(2))
    await asyncio.sleep(0)
    buffer.in_flight.end(0, 0)
    buffer.wake(1)
    first.cancel()
    await asyncio.wait_for(second, 5)


async def test_room_for_many_games_wakes_as_many_waiters():
    buffer = StepBuffer(100)
    buffer.in_flight = InFlight(10, 10, 0, {"E": 100.0})
    buffer.begin_game(make_spec(0))
    waiting = [asyncio.create_task(buffer.wait_for_room()) for _ in range(5)]
    await asyncio.sleep(0)
    buffer.add_game(make_record(make_spec(0), end="void"))
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


# with a collector


@pytest.mark.parametrize(
    ("batch", "buffer_size", "max_age", "workers", "group_size", "delay", "expected"),
    [
        (40, 80, 0, 3, 1, 1.0, 3.0),  # no game may be in flight while an update is made
        (200, 200, 1, 2, 1, 1.0, 3.0),  # a batch is many times the limit in flight
        (30, 45, 8, 20, 1, 1.5, 3.0),  # a batch waits for more steps than it takes
        (30, 30, 8, 20, 1, 1.0, 5000.0),  # games yield a thousandth of the expected steps
        (30, 30, 8, 20, 1, 1.0, 0.001),  # games yield a thousand times the expected steps
        (20, 20, 1, 3, 8, 1.0, 3.0),  # groups that are larger than a batch
        (7, 7, 0, 1, 4, 1.0, 200.0),  # one worker plays a whole group
        (1, 1, 0, 12, 1, 1.0, 3.0),
    ],
)
async def test_learner_gets_every_batch_for_any_settings(
    tmp_path, batch, buffer_size, max_age, workers, group_size, delay, expected
):
    league = League(tmp_path, any_cell_of_many, buffer_size, MIRROR, group_size=group_size)
    league.buffer.batch_delay = delay
    least = math.ceil(delay * batch)
    league.buffer.in_flight = InFlight(batch, least, max_age, {MIRROR.env_id: expected})
    async with league.playing(workers):
        for _ in range(6):
            await league.buffer.get_batch(batch, 0)


async def test_fewer_games_than_workers_start_if_more_would_be_too_old(tmp_path):
    league = League(tmp_path, any_cell_of_many, 1000, MIRROR)
    league.buffer.in_flight = InFlight(20, 20, 4, {MIRROR.env_id: 3.5})
    most = 0

    def look(record: object) -> None:
        nonlocal most
        most = max(most, league.collector.games_in_flight["train"])

    league.collector._listeners = [Observer(look)]
    async with league.playing(100):
        for _ in range(20):
            await league.buffer.get_batch(20, 0)
    assert 1 < most <= 20, "of 100 workers"


async def test_games_of_a_group_are_played_together_despite_the_limit(tmp_path):
    league = League(tmp_path, any_cell_of_many, 1000, MIRROR, group_size=8)
    league.buffer.in_flight = InFlight(20, 20, 0, {MIRROR.env_id: 100.0})
    flying = set()
    async with league.playing(16):
        while len(league.records) < 24:
            await asyncio.sleep(0)
            if len(league.records) >= 8:  # the workers of the first group did not have to wait
                flying.add(league.collector.games_in_flight["train"])
            if league.buffer.size() >= 20:
                await league.buffer.get_batch(20, 0)
    assert max(flying) == 8, "exactly one whole group at once"


async def test_sync_round_plays_as_many_games_as_a_batch_needs(tmp_path):
    league = League(tmp_path, any_cell_of_many, 1000, MIRROR)
    league.collector._lock_step = LockStep(any_cell_of_many)
    league.buffer.in_flight = InFlight(50, 50, 0, {MIRROR.env_id: 5.0})
    await league.collector.play_round(256)
    assert len(league.records) == 5, "expected 10 steps per game"
    await league.collector.play_round(2)
    assert len(league.records) == 7
