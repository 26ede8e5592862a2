import heapq
import random
from pathlib import Path

import msgspec
import pytest
from test_tracker import game, make_tracker

from unstable_lite.rollout.back_pressure import PATIENCE, InOrder
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord

SLOTS = 64


def test_games_are_released_in_the_order_in_which_they_began() -> None:
    order: InOrder[str] = InOrder()
    for number in (2, 3, 7, 9):
        order.begin(number)
    assert order.end(7, "third") == []
    assert order.end(3, "second") == []
    assert order.end(2, "first") == ["first", "second", "third"]
    assert order.end(5, "unknown") == ["unknown"]
    assert order.end(9, "fourth") == ["fourth"]


def test_hanging_game_delays_few_others_and_counts_when_it_ends() -> None:
    order: InOrder[int] = InOrder()
    order.begin(0)
    released: list[int] = []
    for number in range(1, 1000):
        order.begin(number)
        released += order.end(number, number)
        assert number - len(released) <= 2 * PATIENCE
    assert released == list(range(1, 1000))
    assert order.end(0, 0) == [0]
    assert not order._begun
    assert not order._ended


def curve(tracker: Tracker, num_looks: int, pause_at: int) -> list[tuple[int, float, float]]:
    """Return (n, mean length, share ended by an own invalid move) of a policy that never changes, for each look.

    Half of its games end with an invalid first move, the others have 20 moves. There is a look after every 16 games.
    At look number `pause_at` all games end before others begin.
    """
    rng, in_flight, number = random.Random(0), list[tuple[float, int, GameRecord]](), 0

    def begin(now: float) -> None:
        nonlocal number
        is_invalid = rng.random() < 0.5
        record = game(end="invalid" if is_invalid else "natural", invalid_pids=(0,) if is_invalid else ())
        record.spec = msgspec.structs.replace(record.spec, game_idx=3 * number)  # evaluation games are numbered, too
        record.turns = record.turns[:1] * (1 if is_invalid else 20)
        tracker.begin_game(record.spec)
        heapq.heappush(in_flight, (now + len(record.turns) + rng.random(), number, record))
        number += 1

    looks, now = list[tuple[int, float, float]](), 0.0
    for look in range(num_looks):
        while len(in_flight) < SLOTS:
            begin(now)
        for _ in range(SLOTS if look == pause_at else 16):
            now, _, record = heapq.heappop(in_flight)
            tracker.add_record(record)
            if look != pause_at:
                begin(now)
        tracker.log_update(look, {})
        names = ("n", "Game Length", "Ended by own invalid move")
        n, length, invalid = (tracker.latest.get(f"collection-E/{name}", 0.0) for name in names)
        looks.append((int(n), length, invalid))
    return looks


def test_curves_of_an_unchanging_policy_are_flat(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path)
    looks = curve(tracker, 80, pause_at=40)
    tracker.close()
    counted = [(n, length, invalid) for n, length, invalid in looks if n >= 16]
    assert len(counted) > 70
    assert counted[-1][0] == 512
    for n, length, invalid in counted:
        error = 4 / (2 * n**0.5)
        assert invalid == pytest.approx(0.5, abs=error), n
        assert length == pytest.approx(10.5, abs=19 * error), n
