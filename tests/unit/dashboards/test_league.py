"""The choice of the models that the dashboard shows, and the results in its cells."""

import io
import re
from collections import Counter

import pytest
from rich.console import Console

from unstable_lite.dashboards.league import (
    League,
    Result,
    Results,
    Standing,
    choose,
    find_strongest,
    league_panel,
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


def drawn(league: League, width: int = 100, height: int = 20, styles: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, color_system="standard" if styles else None, force_terminal=styles
    )
    console.print(league_panel(league, width, height), width=width, height=height)
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined,no-any-return]


def test_long_run_is_shown_by_the_players_that_matter() -> None:
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
def test_most_important_players_stay_in_little_room(room: int, shown: list[str]) -> None:
    ladder = standings("ckpt-3", "ckpt-2", "ckpt-1", "base", RANDOM, current="ckpt-3")
    ladder[1] = ladder[1]._replace(mu=30.0)
    games = Counter(dict.fromkeys(["ckpt-3", "ckpt-2", "ckpt-1", "base", RANDOM], 10))
    assert [standing.uid for standing in choose(ladder, games, room)] == shown


def test_many_fixed_opponents_leave_half_of_the_room_to_checkpoints() -> None:
    fixed = [f"fixed-gemini-{n}" for n in range(20)]
    own = [f"ckpt-{n}" for n in range(1, 21)]
    games = Counter({uid: n + 1 for n, uid in enumerate([*own, *fixed])})
    shown = [standing.uid for standing in choose(standings(*own, *fixed), games, 11)]
    assert [uid for uid in shown if uid in fixed] == fixed[-5:]  # those with the most games
    assert len(shown) == 11
    few = [standing.uid for standing in choose(standings(*own[:2], *fixed), games, 11)]
    assert [uid for uid in few if uid in own] == own[:2]
    assert len(few) == 11


def test_strongest_checkpoint_has_a_known_rating_and_was_not_added_by_hand() -> None:
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


def test_results_are_read_from_both_sides() -> None:
    results = Results()
    results.set("b", "a", Result(5, won=3, drawn=1, lost=1))
    results.set("a", "b", Result(6, won=1, drawn=1, lost=4))  # in place of the first
    assert results.of("b", "a") == Result(6, won=4, drawn=1, lost=1)
    assert results.of("a", "b") == Result(6, won=1, drawn=1, lost=4)
    assert results.of("a", "c") is None
    assert results.games == {"a": 6, "b": 6}
    assert Result(6, 4, 1, 1).points == 4.5 / 6


def test_only_models_that_met_another_and_the_current_policy_are_rated() -> None:
    league = League()
    models = {uid: [25.0, 1.0, 50, True, uid == "ckpt-2"] for uid in ("base", "ckpt-1", "ckpt-2", RANDOM)}
    league.add(models, [["ckpt-1", "ckpt-1", 50, 0, 0, 0], ["base", RANDOM, 9, 4, 0, 5]])
    assert {standing.uid for standing in league.ladder} == {"base", "ckpt-2", RANDOM}


THREE = (("ckpt-60", RANDOM, 90, 0, 10), ("ckpt-60", "base", 3, 2, 1), ("base", OPTIMAL, 0, 1, 49))


def test_cells_have_points_and_games_coloured_if_chance_does_not_explain_them() -> None:
    lines = drawn(league_of(*THREE))
    assert "ladder: 4 of 4 rated models" in lines[0]
    head = lines[1]
    assert re.findall(r"vs \d", head) == ["vs 1", "vs 2", "vs 3", "vs 4"]
    columns = [head.index(f"vs {number}") + 4 for number in (1, 2, 3, 4)]  # where each one ends
    starts = [columns[0] - 7, *columns[:-1]]
    cells = [[" ".join(line[a:b].split()) for a, b in zip(starts, columns, strict=True)] for line in lines[2:6]]
    assert cells == [
        ["·", "90% 100", "67% 6", ""],
        ["10% 100", "·", "", ""],
        ["33% 6", "", "·", "1% 50"],
        ["", "", "99% 50", "·"],
    ]
    text = "\n".join(drawn(league_of(*THREE), styles=True))
    for share, colour in (("90%", "32"), ("10%", "31"), ("1%", "31"), ("99%", "32")):
        assert f"\x1b[{colour}m{share}" in text, share
    assert not re.search(r"\x1b\[3[12]m(67|33)%", text)  # 6 games


def test_result_that_was_not_recorded_is_not_invented_and_none_is_named() -> None:
    league = League()
    models = {uid: [25.0, 1.0, 9, True, False] for uid in ("base", RANDOM)}
    league.add(models, [["base", RANDOM, 9]])  # as earlier versions wrote it
    assert sum("? 9" in line for line in drawn(league)) == 2
    league = League()
    assert any("no games between different models yet" in line for line in drawn(league))


@pytest.mark.parametrize("width", range(40, 140, 14))
def test_panel_says_how_many_models_and_opponents_it_omits(width: int) -> None:
    names = [RANDOM, OPTIMAL, "fixed-google/gemini-2.0-flash-lite-001", *(f"ckpt-{n}" for n in range(1, 60))]
    league = league_of(*(("ckpt-60", name, 5, 0, 5) for name in names))
    lines = drawn(league, width, 12)
    assert {len(line) for line in lines} == {width}
    assert "9 of 63 rated models" in lines[0]
    shown = len(re.findall(r" vs \d+", lines[1]))
    below = lines[-1]
    assert f"{shown} of 9 opponents fit" in below or shown == 9
    for line in lines[2:-1]:
        assert re.search(r"\d\d\.\d±1\.0 +\d+ ", line), line  # no rating is cut


def test_base_as_a_fixed_opponent_keeps_a_name_of_its_own() -> None:
    assert [name_of(uid) for uid in ("base", "fixed-base", RANDOM, "ckpt-1")] == [
        "base",
        "fixed-base",
        "scripted:random",
        "ckpt-1",
    ]
