from __future__ import annotations

import itertools
import random

import pytest
import trueskill

from unstable_lite.evaluation.ladder import LadderEntry, RatedGame, make_ladder


def games(seed: int = 0) -> list[RatedGame]:
    """Return games of four models, each stronger than the one before; eight games per pair."""
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    return [
        RatedGame("E", names[i], names[j], "draw" if rng.random() < 0.1 else "loss" if rng.random() < 0.9 else "win")
        for i in range(4)
        for j in range(i + 1, 4)
        for _ in range(8)
    ]


def test_ladder_does_not_depend_on_the_order_of_games() -> None:
    played = games()
    expected = make_ladder(played, beta=4.0)
    assert make_ladder(random.Random(3).sample(played, len(played)), beta=4.0) == expected


def test_ladder_sorts_by_strength_and_counts_games() -> None:
    ladder = make_ladder(games(), beta=4.0)
    assert [placed.model for placed in ladder] == ["d", "c", "b", "a"]
    assert all(placed.games == placed.wins + placed.draws + placed.losses == 24 for placed in ladder)
    assert all(upper.mu > lower.mu for upper, lower in itertools.pairwise(ladder))


def test_sigma_shrinks_with_more_games_and_not_with_more_orders() -> None:
    few, many = make_ladder(games(), beta=4.0), make_ladder(games() * 2, beta=4.0)
    assert all(m.sigma < f.sigma for f, m in zip(_by_name(few), _by_name(many), strict=True))
    (one, other) = make_ladder([RatedGame("E", "a", "b", "win")], beta=4.0)
    # One game with any number of orders: TrueSkill's own step from the prior.
    ((winner,), _) = trueskill.TrueSkill(beta=4.0).rate([(trueskill.Rating(),), (trueskill.Rating(),)])
    assert (one.model, one.mu, one.sigma) == ("a", pytest.approx(winner.mu), pytest.approx(winner.sigma))
    assert other.games == 1


def _by_name(ladder: list[LadderEntry]) -> list[LadderEntry]:
    return sorted(ladder, key=lambda placed: placed.model)
