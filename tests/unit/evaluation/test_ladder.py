"""Elo ratings against the rungs: known strengths are found, and a model's rating depends on its own games only."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import pytest

from unstable_lite.evaluation.ladder import Place, RatedGame, places_tables, rate, write_places
from unstable_lite.evaluation.plan import ANCHOR, RUNGS

STRENGTH = {"scripted:random": -300.0, ANCHOR: 0.0, "scripted:mcts:100": 150.0, "scripted:mcts:1000": 250.0}
ENV = "openspiel:tic_tac_toe"


def meet(one: str, other: str, games: int, strengths: dict[str, float], env_id: str = ENV) -> list[RatedGame]:
    """Return games whose points follow the strengths; a fifth of the games is drawn where both are equally strong."""
    rng, found = random.Random(f"{one} {other} {env_id}"), []
    expected = 1 / (1 + 10 ** ((strengths[other] - strengths[one]) / 400))
    drawn = 0.8 * min(expected, 1 - expected)
    for _ in range(games):
        draw = rng.random()
        is_win = draw < expected - drawn / 2
        outcome = "win" if is_win else "draw" if draw < expected + drawn / 2 else "loss"
        found.append(RatedGame(env_id, one, other, outcome))
    return found


def ladder(models: dict[str, float], games: int = 2000, env_id: str = ENV) -> list[Place]:
    strengths = STRENGTH | models
    pairs = [(one, other) for i, one in enumerate(RUNGS) for other in RUNGS[i + 1 :]]
    pairs += [(model, rung) for model in models for rung in RUNGS]
    return rate([game for pair in pairs for game in meet(*pair, games, strengths, env_id)])


def test_strengths_are_found_within_their_intervals() -> None:
    models = {"weak": -250.0, "strong": 120.0}
    places = ladder(models)
    ranked = ["scripted:mcts:1000", "scripted:mcts:100", "strong", ANCHOR, "weak", "scripted:random"]
    assert [place.model for place in places] == ranked
    for place in places:
        assert place.rating == pytest.approx((STRENGTH | models)[place.model], abs=25)
        if place.model == ANCHOR:
            assert place.rating == 0 and math.isnan(place.low)
        else:
            assert place.low < place.rating < place.high < place.low + 60
    (weak,) = (place for place in places if place.model == "weak")
    assert (weak.games, set(weak.points)) == (8000, set(RUNGS))


def test_rating_does_not_depend_on_the_other_models() -> None:
    alone, beside = ladder({"one": 40.0}, games=50), ladder({"one": 40.0, "two": 500.0, "three": -500.0}, games=50)
    by_model = {place.model: place for place in beside}
    assert all(place == by_model[place.model] for place in alone)


def test_games_that_were_all_lost_give_a_finite_rating_below_the_anchor() -> None:
    games = [RatedGame(ENV, "m", rung, "loss") for rung in RUNGS for _ in range(20)]
    games += [
        game for i, one in enumerate(RUNGS) for other in RUNGS[i + 1 :] for game in meet(one, other, 20, STRENGTH)
    ]
    (place,) = (place for place in rate(games) if place.model == "m")
    assert -1500 < place.low < place.rating < place.high < 0
    assert set(place.points.values()) == {0.0}
    assert place.rating - place.low > place.high - place.rating, "losses alone bound a rating from above only"


def test_envs_have_scales_of_their_own() -> None:
    ours, theirs = ladder({"m": 100.0}, games=100), ladder({"m": -100.0}, games=100, env_id="openspiel:connect_four")
    games = [
        game
        for env_id, strength in ((ENV, 100.0), ("openspiel:connect_four", -100.0))
        for i, one in enumerate(RUNGS)
        for other in (*RUNGS[i + 1 :], "m")
        for game in meet(*(("m", one) if other == "m" else (one, other)), 100, STRENGTH | {"m": strength}, env_id)
    ]
    assert sorted(rate(games), key=lambda place: (place.env_id, place.model)) == sorted(
        ours + theirs, key=lambda place: (place.env_id, place.model)
    )


def test_table_and_file_have_a_row_for_each_model(tmp_path: Path) -> None:
    places = ladder({"m": 0.0}, games=10)
    write_places(tmp_path, places)
    with (tmp_path / "ladder.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    named = ("env_id", "model", "rating", "low", "high", "games")
    assert tuple(rows[0]) == (*named, *(f"points against {rung}" for rung in RUNGS))
    assert [(row["model"], float(row["rating"])) for row in rows] == [
        (place.model, pytest.approx(place.rating, abs=1e-5)) for place in places
    ]
    anchor = next(row for row in rows if row["model"] == ANCHOR)
    assert (anchor["low"], anchor["high"], anchor[f"points against {ANCHOR}"]) == ("", "", "")
    (table,) = places_tables(places)
    assert [*table.columns[0].cells] == [place.model for place in places]
    assert table.row_count == 5
