"""Groups of one deal with the policy at each seat in turn."""

from statistics import fmean, pvariance

import pytest

from fakes.group_games import KUHN, group_config, played, scheduler_of
from fakes.random_policy import RandomPolicy
from unstable_lite.config import Config
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.wiring import make_buffer
from unstable_lite.reward_transformations import build_reward_transformations
from unstable_lite.reward_transformations.group import SeatReward, across_seats
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.types import GameRecord

OF_CARDS = 1.0 / 2.109375
"""Share of the variance of the reward that the cards decide if both players of Kuhn poker are random, from its tree."""
OF_SEAT = 0.63
"""Share that games of a group at one seat have in common: the cards, and the draws of the scripted opponent, whose
stream follows from the game's seed and its seat (measured over 8,000 games)."""


def config(group_size: int, baseline: str = "duplicate") -> Config:
    return group_config(group_size, {"reward_scale": 1.0}, {"group_baseline": baseline})


def buffer_of(of: Config) -> StepBuffer:
    buffer = make_buffer(of)
    assert isinstance(buffer, StepBuffer)
    return buffer


async def play(scheduler: GameScheduler, groups: int) -> list[GameRecord]:
    factory = PlayerFactory(RandomPolicy(KUHN, 1).generate)
    return [await played(spec, factory) for _ in range(groups) for spec in scheduler.next_train_group()]


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
    for record in await play(scheduler_of(of), 1):
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


@pytest.mark.parametrize(
    ("baseline", "group_size", "share"),
    [
        pytest.param("duplicate", 2, 1 + 1 - 2 * OF_CARDS, id="one partner"),
        pytest.param("duplicate", 8, 1 + (1 + 3 * OF_SEAT) / 4 - 2 * OF_CARDS, id="four partners"),
        # Games at the own seat cancel the deal and the opponent's draws, and a group of one seat has more of them.
        pytest.param("rloo", 8, (1 - OF_SEAT) * (1 + 1 / 7), id="leaving one out has a smaller variance"),
    ],
)
async def test_luck_of_the_deal_cancels(baseline, group_size, share):
    of, groups = config(group_size, baseline), 3200 // group_size
    buffer = buffer_of(of)
    for record in await play(scheduler_of(of), groups):
        buffer.add_game(record)
    assert buffer.group_counts["whole"] == groups
    of_game = {step.step_info["game_idx"]: step for step in await buffer.get_batch(buffer.size(), 1)}.values()
    plain, advantage = (
        pvariance(values) for values in zip(*((s.step_info["env_reward"], s.reward) for s in of_game), strict=True)
    )
    assert advantage / plain == pytest.approx(share, abs=0.07)


async def test_void_games_shrink_a_group_and_games_without_a_partner_are_left_out():
    of = config(4)
    buffer, records = buffer_of(of), await play(scheduler_of(of), 2)
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


async def test_group_that_waits_when_a_lineage_ends_brings_none_of_its_steps():
    of = config(4)
    buffer, records = buffer_of(of), await play(scheduler_of(of), 1)
    for record in records[:2]:
        buffer.add_game(record)
    waiting = buffer.steps_in_groups
    buffer.begin_again(1 << 20, build_reward_transformations(of.rewards))
    for record in records[2:]:
        buffer.add_game(record)
    steps = sum(len(trajectory.steps) for record in records for trajectory in record.trajectories)
    assert 0 < waiting < steps
    assert (buffer.size(), buffer.steps_in_groups, buffer.drained, buffer.added) == (0, 0, steps, steps)


async def test_equal_results_at_each_seat_give_advantage_zero():
    """A policy that always loses learns nothing, although its losses at both seats do not cancel."""
    of = config(2)
    buffer, records = buffer_of(of), await play(scheduler_of(of), 40)

    async def batch(records: list[GameRecord], reward: float) -> set[float]:
        for record in records:
            record.trajectories[0].final_reward = reward
            buffer.add_game(record)
        return {step.reward for step in await buffer.get_batch(buffer.size(), 1)}

    assert await batch(records[:40], -1.0) == {0.0}
    assert await batch(records[40:], 1.0) == {2.0}, "results differ from those of the batch before"
    buffer.begin_again(0, build_reward_transformations(of.rewards))
    assert await batch(records[:40], -1.0) == {0.0}, "a new lineage has no batch before"
    state = buffer.state_dict()
    del state["spread"]  # as a run of before saved it
    make_buffer(of).load_state_dict(state)
