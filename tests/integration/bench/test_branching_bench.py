"""The exact gradient that the branching bench compares with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import branching


def mean_reward(table: branching.Table) -> float:
    """Return the mean reward of the policy, over both seats, by recursion over the game."""
    known: dict[tuple[str, int], float] = {}

    def value(state: Any, seat: int) -> float:
        if state.is_terminal():
            return float(state.returns()[seat])
        if (str(state), seat) not in known:
            children = [value(state.child(action), seat) for action in branching.ordered_actions(state)]
            is_policy = state.current_player() == seat
            chances = table.probabilities(branching.shown(state)) if is_policy else None
            known[str(state), seat] = float(np.average(children, weights=chances))
        return known[str(state), seat]

    start = branching.load_game(branching.GAME).new_initial_state()
    return (value(start, 0) + value(start, 1)) / 2


def test_exact_gradient_is_that_of_the_mean_reward() -> None:
    table = branching.Table(0)
    gradient = branching.exact_gradient(table)
    assert len(gradient) == table.size > 1000
    for state in list(table.logits)[::25]:
        logits, step = table.logits[state], 1e-5
        for number in range(len(logits)):
            logits[number] += step
            above = mean_reward(table)
            logits[number] -= 2 * step
            below = mean_reward(table)
            logits[number] += step
            expected = gradient[table.first[state] + number]
            assert (above - below) / (2 * step) == pytest.approx(expected, abs=1e-9, rel=1e-4)
