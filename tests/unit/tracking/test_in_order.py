import msgspec
from test_tracker import game, make_tracker

from unstable_lite.rollout.back_pressure import PATIENCE, InOrder


def test_games_are_released_in_the_order_in_which_they_began():
    order: InOrder[str] = InOrder()
    for number in (2, 3, 7, 9):
        order.begin(number)
    assert order.end(7, "third") == []
    assert order.end(3, "second") == []
    assert order.end(2, "first") == ["first", "second", "third"]
    assert order.end(5, "unknown") == ["unknown"]
    assert order.end(9, "fourth") == ["fourth"]


def test_hanging_game_delays_few_others_and_counts_when_it_ends():
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


def test_short_games_do_not_enter_the_curves_before_longer_ones_that_began_earlier(tmp_path):
    tracker, records = make_tracker(tmp_path), [game() for _ in range(3)]
    for number, record in enumerate(records):
        record.spec = msgspec.structs.replace(record.spec, game_idx=3 * number)  # evaluation games are numbered, too
        tracker.begin_game(record.spec)
    seen = []
    for update, record in enumerate((records[1], records[0], records[2])):
        tracker.add_record(record)
        tracker.log_update(update, {})
        seen.append(tracker.latest.get("collection-E/n", 0))
    tracker.close()
    assert seen == [0, 2, 3]
