"""The choice of the models that the dashboard shows, and the results in its cells."""

import re
from collections import Counter

import pytest

from unstable_lite.dashboards.league import (
    League,
    Standing,
    choose,
    find_strongest,
    ladder_lines,
    name_of,
)

RANDOM, OPTIMAL = "fixed-scripted:random", "fixed-scripted:optimal"


def standings(*uids: str, current: str = "") -> list[Standing]:
    return [Standing(uid, 25.0, 1.0, 10, is_current=uid == current) for uid in uids]


def league_of(*matches: tuple[str, str, int, int, int], current: str = "ckpt-60") -> League:
    """Return the league of these models, strongest first in the order in which they are named, and their results."""
    league = League()
    uids = dict.fromkeys(uid for match in matches for uid in match[:2])
    models = {uid: [90.0 - i, 1.0, 100, True, uid == current] for i, uid in enumerate(uids)}
    league.add(models, [[one, other, sum(counts), *counts] for one, other, *counts in matches])
    return league


def drawn(league: League, width: int = 100, height: int = 20) -> list[str]:
    return [line.plain for line in ladder_lines(league, width, height, has_results=True)]


def test_long_run_is_shown_by_the_players_that_matter():
    uids = [f"ckpt-{update}" for update in range(1, 61)]
    ladder = standings(*uids, RANDOM, "base", OPTIMAL, current="ckpt-60")
    ladder[20] = ladder[20]._replace(mu=35.0)  # ckpt-21
    games = Counter(dict.fromkeys([*uids, RANDOM, OPTIMAL, "base"], 10))
    for update in (5, 13, 30, 44, 52):
        games[f"ckpt-{update}"] = 100
    shown = [standing.uid for standing in choose(ladder, games, 10)]
    kept = ["ckpt-5", "ckpt-13", "ckpt-21", "ckpt-30", "ckpt-44", "ckpt-52", "ckpt-60", RANDOM, "base", OPTIMAL]
    assert shown == kept


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (0, []),
        (1, ["ckpt-3"]),
        (2, ["ckpt-3", "ckpt-2"]),
        (3, ["ckpt-3", "ckpt-2", "base"]),
        (4, ["ckpt-3", "ckpt-2", "base", RANDOM]),
        (5, ["ckpt-3", "ckpt-2", "ckpt-1", "base", RANDOM]),
        (9, ["ckpt-3", "ckpt-2", "ckpt-1", "base", RANDOM]),
    ],
)
def test_most_important_players_stay_in_little_room(room, shown):
    ladder = standings("ckpt-3", "ckpt-2", "ckpt-1", "base", RANDOM, current="ckpt-3")
    ladder[1] = ladder[1]._replace(mu=30.0)
    games = Counter(dict.fromkeys(["ckpt-3", "ckpt-2", "ckpt-1", "base", RANDOM], 10))
    assert [standing.uid for standing in choose(ladder, games, room)] == shown


def test_many_fixed_opponents_leave_half_of_the_room_to_checkpoints():
    fixed = [f"fixed-gemini-{n}" for n in range(20)]
    own = [f"ckpt-{n}" for n in range(1, 21)]
    games = Counter({uid: n + 1 for n, uid in enumerate([*own, *fixed])})
    shown = [standing.uid for standing in choose(standings(*own, *fixed), games, 11)]
    assert [uid for uid in shown if uid in fixed] == fixed[-5:]  # those with the most games
    assert len(shown) == 11
    few = [standing.uid for standing in choose(standings(*own[:2], *fixed), games, 11)]
    assert [uid for uid in few if uid in own] == own[:2]
    assert len(few) == 11


def test_strongest_checkpoint_has_a_known_rating_and_was_not_added_by_hand():
    ladder = [
        Standing(OPTIMAL, 50.0, 1.0, 9),
        Standing("ckpt-3", 31.0, 8.0, 1),
        Standing("ckpt-1", 30.0, 0.5, 90),
        Standing("ckpt-2", 29.9, 0.1, 0),
    ]
    games = Counter({OPTIMAL: 9, "ckpt-3": 1, "ckpt-1": 90})
    assert find_strongest(ladder, games) == "ckpt-1"
    assert find_strongest(ladder, Counter()) is None
    ladder = standings("rival", "initial", "ckpt-1", "ckpt-2", current="ckpt-2")
    games = Counter({"rival": 1, "initial": 5, "ckpt-1": 9, "ckpt-2": 1})
    assert [standing.uid for standing in choose(ladder, games, 4)] == ["rival", "initial", "ckpt-1", "ckpt-2"]
    assert find_strongest(ladder, Counter({"rival": 9})) is None


def test_only_models_that_met_another_and_the_current_policy_are_rated():
    league = League()
    models = {uid: [25.0, 1.0, 50, True, uid == "ckpt-2"] for uid in ("base", "ckpt-1", "ckpt-2", RANDOM)}
    league.add(models, [["ckpt-1", "ckpt-1", 50, 0, 0, 0], ["base", RANDOM, 9, 4, 0, 5]])
    assert {standing.uid for standing in league.ladder} == {"base", "ckpt-2", RANDOM}


THREE = (("ckpt-60", RANDOM, 90, 0, 10), ("ckpt-60", "base", 3, 2, 1), ("base", OPTIMAL, 0, 1, 49))


def test_cells_have_points_and_games_and_models_stand_by_their_lower_bound():
    head, *lines = drawn(league_of(*THREE))
    assert re.findall(r"vs \S+", head) == ["vs newest", "vs random", "vs base", "vs optimal"]
    assert [re.split(r" {2,}", line.strip()) for line in lines] == [
        ["ckpt-60 newest strongest", "90.0 ± 1.0", "106", "·", "90.0 % 100", "66.7 % 6"],
        ["random", "89.0 ± 1.0", "100", "10.0 % 100", "·"],
        ["base", "88.0 ± 1.0", "56", "33.3 % 6", "·", "1.0 % 50"],
        ["optimal", "87.0 ± 1.0", "50", "99.0 % 50", "·"],
    ]
    league = league_of(*THREE)
    league.add({"base": [99.0, 9.0, 1, True, False]}, [])  # rated high, but hardly known
    assert drawn(league)[-1].startswith("base")


def test_result_that_was_not_recorded_is_not_invented_and_none_is_named():
    league = League()
    models = {uid: [25.0, 1.0, 9, True, False] for uid in ("base", RANDOM)}
    league.add(models, [["base", RANDOM, 9]])  # as earlier versions wrote it
    assert sum("? 9" in line for line in drawn(league)) == 2
    assert any("no games between different models yet" in line for line in drawn(League()))


@pytest.mark.parametrize("width", range(60, 140, 14))
def test_ladder_has_no_past_checkpoints_and_leaves_out_columns_that_do_not_fit(width):
    names = [RANDOM, OPTIMAL, "fixed-google/gemini-2.0-flash-lite-001", *(f"ckpt-{n}" for n in range(1, 60))]
    head, *lines = drawn(league_of(*(("ckpt-60", name, 5, 0, 5) for name in names)), width, 12)
    assert head.startswith("ladder 4 of 63 models")
    assert [line.split()[0] for line in lines] == ["ckpt-60", "random", "optimal", "google/gemini-2.0-flash-lite-001"]
    assert all(len(line) == len(head) <= width for line in lines)
    assert len(re.findall(r" vs \S+", head)) == {60: 0, 74: 2, 88: 3, 102: 3, 116: 4, 130: 4}[width]
    assert len(drawn(league_of(*(("ckpt-60", name, 5, 0, 5) for name in names)), width, 3)) == 3


def test_base_as_a_fixed_opponent_keeps_a_name_of_its_own():
    assert (name_of("base"), name_of("fixed-base"), name_of(RANDOM)) == ("base", "fixed-base", "scripted:random")
