"""Groups of one deal with the policy at each seat in turn."""

from collections import defaultdict
from statistics import fmean, pvariance

import pytest

from fakes.group_games import KUHN, group_config, played, scheduler_of
from fakes.random_policy import RandomPolicy
from unstable_lite.config import Config
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.wiring import make_buffer
from unstable_lite.reward_transformations.group import SeatReward, across_seats, leave_one_out
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.types import GameRecord, Step

OF_CARDS = 1.0 / 2.109375
"""Share of the variance of the reward that the cards decide if both players of Kuhn poker are random, from its tree."""
OF_SEAT = 0.63
"""Share that games of a group at one seat have in common: the cards, and the draws of the scripted opponent, whose
stream follows from the game's seed and its seat (measured over 8,000 games)."""


def config(group_size: int, **env: object) -> Config:
    return group_config(group_size, {"reward_scale": 1.0} | env, {"group_baseline": "duplicate"})


async def play(scheduler: GameScheduler, factory: PlayerFactory, groups: int) -> list[GameRecord]:
    return [await played(spec, factory) for _ in range(groups) for spec in scheduler.next_train_group()]


async def compared(group_size: int, groups: int) -> list[Step]:
    of = config(group_size)
    buffer = make_buffer(of)
    assert isinstance(buffer, StepBuffer)
    for record in await play(scheduler_of(of), PlayerFactory(RandomPolicy(KUHN, 1).generate), groups):
        buffer.add_game(record)
    assert buffer.group_counts["whole"] == groups
    return await buffer.get_batch(buffer.size(), 1)


async def test_games_of_a_group_have_one_deal_and_one_opponent_and_change_seats():
    of = config(4)
    scheduler = scheduler_of(of)
    seeds = set()
    for _ in range(10):
        group = scheduler.next_train_group()
        seeds.add(group[0].seed)
        assert {(spec.seed, spec.group_idx, spec.env_id) for spec in group} == {
            (group[0].seed, group[0].game_idx, KUHN)
        }
        seats = [[agent.pid for agent in spec.agent_specs if agent.collect_data] for spec in group]
        assert seats[0] != seats[1]
        assert seats == [seats[0], seats[1]] * 2
        for spec in group:
            assert [agent.pid for agent in spec.agent_specs] == [0, 1]
            assert {agent.model.uid for agent in spec.agent_specs} == {"ckpt-1", "fixed-scripted:random"}
            assert all(agent.collect_data == (agent.model.uid == "ckpt-1") for agent in spec.agent_specs)
    assert len(seeds) == 10
    first_cards = set()
    for record in await play(scheduler_of(of), PlayerFactory(RandomPolicy(KUHN, 0).generate), 1):
        first_cards.add(next(line for line in record.turns[0].observation.splitlines() if " card: " in line))
    assert len(first_cards) == 1


def test_advantage_is_the_reward_plus_the_mean_at_the_other_seat():
    rewards = [SeatReward(0, 0, 2.0), SeatReward(1, 1, -1.0), SeatReward(2, 0, 1.0), SeatReward(3, 1, -2.0)]
    assert across_seats(rewards) == [0.5, 0.5, -0.5, -0.5]
    assert across_seats(rewards[::2]) == [None, None]
    # Mirror games bring both seats; the game's own result at the other seat depends on its actions.
    mirror = [SeatReward(0, 0, 1.0), SeatReward(0, 1, -1.0), SeatReward(1, 0, -1.0), SeatReward(1, 1, 1.0)]
    assert across_seats(mirror) == [2.0, -2.0, -2.0, 2.0]
    assert across_seats(mirror[:2]) == [None, None]


@pytest.mark.parametrize("group_size", [2, 8])
async def test_luck_of_the_deal_cancels(group_size):
    steps = await compared(group_size, 3200 // group_size)
    of_game = {step.step_info["game_idx"]: step for step in steps}.values()
    plain, advantage = (
        pvariance(values) for values in zip(*((s.step_info["env_reward"], s.reward) for s in of_game), strict=True)
    )
    partners = group_size // 2
    expected = 1 + (1 + (partners - 1) * OF_SEAT) / partners - 2 * OF_CARDS
    assert advantage / plain == pytest.approx(expected, abs=0.08)
    assert group_size == 2 or advantage < plain  # one partner alone needs more than half of the variance in the cards


async def test_leaving_one_out_has_a_smaller_variance_than_a_duplicate():
    """Games at the own seat cancel the deal and the opponent's draws, and a group of one seat has more of them."""
    of = config(8).model_copy(update={"rewards": config(8).rewards.model_copy(update={"group_baseline": "rloo"})})
    rewards = defaultdict(list)
    for record in await play(scheduler_of(of), PlayerFactory(RandomPolicy(KUHN, 1).generate), 300):
        rewards[record.spec.group_idx].append(record.trajectories[0].final_reward)
    advantages = [advantage for group in rewards.values() for advantage in leave_one_out(group)]
    plain = pvariance([reward for group in rewards.values() for reward in group])
    assert pvariance(advantages) / plain == pytest.approx((1 - OF_SEAT) * (1 + 1 / 7), abs=0.07)


async def test_void_games_shrink_a_group_and_games_without_a_partner_are_left_out():
    of = config(4)
    buffer = make_buffer(of)
    assert isinstance(buffer, StepBuffer)
    records = await play(scheduler_of(of), PlayerFactory(RandomPolicy(KUHN, 1).generate), 2)
    first, second = records[:4], records[4:]
    for record in (first[1], second[0], second[2]):
        record.end, record.trajectories = "void", []
    for record in first:
        buffer.add_game(record)
    own, other = first[0].trajectories[0], first[3].trajectories[0]
    kept = [first[0], first[2], first[3]]
    assert buffer.steps_in_groups == 0
    assert buffer.size() == sum(len(record.trajectories[0].steps) for record in kept)
    assert own.steps[0].reward == own.final_reward + other.final_reward
    assert other.steps[0].reward == other.final_reward + fmean(r.trajectories[0].final_reward for r in kept[:2])
    held = buffer.size()
    for record in second:
        buffer.add_game(record)
    assert (buffer.size(), buffer.steps_in_groups) == (held, 0)
    assert buffer.group_counts == {"whole": 2, "without_spread": buffer.group_counts["without_spread"], "of_one": 1}


async def test_equal_results_at_each_seat_give_advantage_zero():
    """A policy that always loses learns nothing, although its losses at both seats do not cancel."""
    of = config(2)
    records = await play(scheduler_of(of), PlayerFactory(RandomPolicy(KUHN, 1).generate), 40)
    buffer = make_buffer(of)
    assert isinstance(buffer, StepBuffer)

    async def batch(records: list[GameRecord], reward: float) -> set[float]:
        for record in records:
            record.trajectories[0].final_reward = reward
            buffer.add_game(record)
        return {step.reward for step in await buffer.get_batch(buffer.size(), 1)}

    assert await batch(records[:40], -1.0) == {0.0}
    assert await batch(records[40:], 1.0) == {2.0}, "results differ from those of the batch before"
    state = buffer.state_dict()
    del state["spread"]  # as a run of before saved it
    make_buffer(of).load_state_dict(state)
