import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.game_records import make_generation
from unstable_lite.tracking.windows import Diversity, digests, repetition
from unstable_lite.types import Step

Trajectory = tuple[list[str], list[str]]


def entropy(things: list[object]) -> float:
    return -sum(c / len(things) * math.log(c / len(things)) for c in Counter(things).values())


def expected(trajectories: list[Trajectory]) -> dict[str, float]:
    """Compute all metrics from the start, the plain way."""
    actions: list[object] = [a for _, acts in trajectories for a in acts]
    states: list[object] = [s for states, _ in trajectories for s in states]
    metrics: dict[str, float] = {}
    for n in (1, 2, 3, 4):
        grams = [tuple(acts[i : i + n]) for _, acts in trajectories for i in range(len(acts) - n + 1)]
        if grams:
            metrics[f"Pct. Unique Action {n}-gram"] = len(set(grams)) / len(grams)
    by_turn: dict[int, list[object]] = {}
    for _, acts in trajectories:
        for turn, action in enumerate(acts):
            by_turn.setdefault(turn, []).append(action)
    return metrics | {
        "Unique Actions": len(set(actions)),
        "Unique States": len(set(states)),
        "Unique Trajectories": len({tuple(acts) for _, acts in trajectories}),
        "Action Entropy": entropy(actions),
        "State Entropy": entropy(states),
        "Action Entropy (per turn)": sum(len(acts) / len(actions) * entropy(acts) for acts in by_turn.values()),
        "Action Entropy (trajectory)": sum(entropy(list(acts)) for _, acts in trajectories) / len(trajectories),
        "n": len(trajectories),
        "n (turns)": len(actions),
    }


@pytest.mark.parametrize("num_games", [1, 19, 20, 21, 90])
def test_metrics_cover_only_the_newest_trajectories(num_games):
    rng = random.Random(num_games)
    diversity = Diversity(window=20)
    trajectories: list[Trajectory] = []
    for _ in range(num_games):
        actions = [rng.choice("abcd") for _ in range(rng.randint(1, 8))]
        trajectories.append(([f"{rng.randint(0, 9)}" for _ in actions], actions))
        diversity.append(*map(digests, trajectories[-1]))
    assert diversity.metrics() == pytest.approx(expected(trajectories[-20:]))


def test_long_games_fill_the_window_earlier():
    diversity = Diversity(window=512, max_turns=100)
    for game in range(30):
        diversity.append(digests([str(game)] * 9), digests([str(game)] * 9))
    metrics = diversity.metrics()
    assert metrics["n"] == metrics["Unique Actions"] == 11
    assert metrics["n (turns)"] == 99


def step(ids: Sequence[int]) -> Step:
    return Step(pid=0, obs="", act="", reward=0.0, env_id="E", generation=make_generation(ids))


@given(st.lists(st.lists(st.integers(0, 2) | st.integers(2**31 - 3, 2**31 - 1), max_size=12), max_size=6))
def test_repeated_4grams_are_those_seen_earlier_in_the_completion(completions):
    repeated = total = 0
    for ids in completions:
        grams = [tuple(ids[start : start + 4]) for start in range(len(ids) - 3)]
        total += len(grams)
        repeated += sum(gram in grams[:index] for index, gram in enumerate(grams))
    metrics = repetition(map(step, completions))
    assert metrics["num_4grams"] == total
    assert metrics["repeated_4grams"] == pytest.approx(repeated / max(total, 1))


def test_identical_completions_are_counted_for_the_commonest_one():
    metrics = repetition(map(step, [[1, 2], [1, 2], [1], [2, 1], [1, 2], [258]]))
    assert (metrics["identical_completions"], metrics["num_completions"]) == (0.5, 6)
    assert repetition([])["identical_completions"] == 0
