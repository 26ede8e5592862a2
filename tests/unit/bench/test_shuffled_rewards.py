"""Rewards of the control keep their distribution at each seat, and say nothing of the game."""

from __future__ import annotations

import json
import random
from collections import Counter

from bench.shuffled_rewards import ShuffledRewards


def test_shuffled_rewards_are_independent_of_the_game_and_keep_each_seats_distribution() -> None:
    shuffled, draw = ShuffledRewards(), random.Random(1)
    games = [(draw.choice((0, 1)), draw.random() < 0.75) for _ in range(20_000)]
    given = [shuffled(2.0 * won - 1.0 if seat == 0 else -5.0 - won, seat, "env") for seat, won in games]
    pairs = Counter((won, reward) for (seat, won), reward in zip(games, given, strict=True) if seat == 0)
    after = {won: pairs[won, 1.0] / (pairs[won, 1.0] + pairs[won, -1.0]) for won in (False, True)}
    assert all(0.72 < share < 0.78 for share in after.values())
    assert {reward for (seat, _), reward in zip(games, given, strict=True) if seat == 1} == {0.0, -5.0, -6.0}
    assert given.count(0.0) == 2, "each seat's first game"


def test_envs_are_shuffled_apart() -> None:
    shuffled = ShuffledRewards()
    given = [(shuffled(1.0, 0, "a"), shuffled(2.0, 0, "b")) for _ in range(50)]
    assert given[1:] == [(1.0, 2.0)] * 49


def test_restored_rewards_continue_with_the_same_draws() -> None:
    whole, first = ShuffledRewards(), ShuffledRewards()
    rewards = [float(number) for number in range(40)]
    expected = [whole(reward, 0, "env") for reward in rewards]
    assert [first(reward, 0, "env") for reward in rewards[:20]] == expected[:20]
    second = ShuffledRewards(seed=9)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second(reward, 0, "env") for reward in rewards[20:]] == expected[20:]
