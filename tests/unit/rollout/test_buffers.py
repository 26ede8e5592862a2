import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import game_records
from fakes.game_records import BASE, make_record, make_spec, make_step
from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations import (
    GROUP_BASELINES,
    NormalizeRewards,
    PenaltyForInvalidMove,
    RewardForFormat,
    RoleAdvantageFormatter,
)
from unstable_lite.rollout.back_pressure import InFlight
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.types import ModelRef

BUFFERS = pytest.mark.parametrize("buffer_class", [StepBuffer, EpisodeBuffer])


def make_trajectory(num_steps, *, game_idx=0, version=0, **changes):
    steps = [make_step(act=f"{game_idx}.{turn}", version=version) for turn in range(num_steps)]
    return game_records.make_trajectory(*steps, game_idx=game_idx, **changes)


def names_of(steps):
    return [step.act for step in steps]


def assert_balanced(buffer):
    assert buffer.added == buffer.taken + buffer.dropped_stale + buffer.rejected + buffer.drained + buffer.size()


# rewards


async def test_steps_have_the_final_reward_and_episodes_only_on_their_last_step():
    kinds = StepBuffer, EpisodeBuffer
    steps, episodes = (kind(10, RoleAdvantageFormatter(role_adv=0.5), RewardForFormat(reward=2.0)) for kind in kinds)
    for buffer in (steps, episodes):
        buffer.add_player_trajectory(make_trajectory(3))
    for step in await steps.get_batch(3, 0):
        assert step.reward == 2.5
        assert step.step_info == {"raw_reward": 1.0, "env_reward": 0.5, "baseline": 0.5, "step_reward": 2.5}
    (episode,) = await episodes.get_batch(3, 0)
    assert [step.reward for step in episode] == [2.0, 2.0, 2.5]
    assert [step.step_info["env_reward"] for step in episode] == [0.0, 0.0, 0.5]


@BUFFERS
async def test_player_without_a_turn_goes_through_no_transform(buffer_class):
    seen = []
    buffer = buffer_class(10, lambda reward, pid, env_id: seen.append(pid) or np.float32(reward))
    buffer.add_player_trajectory(make_trajectory(0))
    assert (seen, buffer.size()) == ([], 0)
    buffer.add_player_trajectory(make_trajectory(1))
    assert (seen, buffer.size()) == ([0], 1)
    (step,) = buffer.drain()
    assert type(step.reward) is type(step.step_info["env_reward"]) is float, "numpy's numbers become plain ones"


@BUFFERS
async def test_new_lineage_learns_from_no_step_and_no_average_of_the_one_before(buffer_class):
    def model(version):
        return ModelRef(uid=f"main/ckpt-{version}", kind="checkpoint", adapter_version=version)

    def game(version):
        trajectory = make_trajectory(2, version=version, model=model(version))
        return make_record(make_spec(model(version), trained=[0]), 1.0, trajectories=[trajectory])

    buffer = buffer_class(10, RoleAdvantageFormatter(role_adv=0.5), policy="main")
    in_flight = buffer.in_flight = InFlight(4, 4, None, {game(1).spec.env_id: 10.0})
    buffer.add_game(game(1))
    in_flight.begin(game(4).spec, "main")
    buffer.begin_again(5, (RoleAdvantageFormatter(role_adv=0.0), None, None))
    buffer.add_game(game(4))  # it was in flight
    assert len(in_flight.state_dict()["lifetimes"]) == 1, "no lifetime of a game of which steps are dropped"
    in_flight.begin(game(5).spec, "main")
    assert in_flight.steps == 10.0, "no mean of steps that are dropped"
    assert (buffer.size(), buffer.drained, buffer.dropped_stale) == (0, 4, 0)
    resumed = buffer_class(10, RoleAdvantageFormatter(), policy="main")
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    for one in (buffer, resumed):
        one.add_game(game(4))
        one.add_game(game(5))
        assert_balanced(one)
        assert {step.step_info["game_length"] for step in one.drain()} == {"1-4 turns"}
    assert buffer.drained == 4 + 2 + 2


async def test_sampling_transform_sees_the_whole_batch():
    buffer = StepBuffer(10, sampling_reward_transformation=NormalizeRewards())
    buffer.add_player_trajectory(make_trajectory(1, final_reward=1.0))
    buffer.add_player_trajectory(make_trajectory(1, final_reward=3.0))
    assert sorted(step.reward for step in await buffer.get_batch(2, 0)) == [-1.0, 1.0]
    buffer = EpisodeBuffer(10, sampling_reward_transformation=NormalizeRewards())
    buffer.add_player_trajectory(make_trajectory(1, game_idx=0, final_reward=1.0))
    buffer.add_player_trajectory(make_trajectory(2, game_idx=1, final_reward=5.0))
    episodes = await buffer.get_batch(3, 0)
    rewards = {step.act: step.reward for episode in episodes for step in episode}
    assert rewards == {"0.0": -1.0, "1.0": -2.0, "1.1": 3.0}
    assert sorted(names_of(episode) for episode in episodes) == [["0.0"], ["1.0", "1.1"]]


async def test_sampling_transform_that_drops_steps_of_an_episode_is_an_error():
    buffer = EpisodeBuffer(10, sampling_reward_transformation=lambda steps: list(steps[:-1]))
    buffer.add_player_trajectory(make_trajectory(2))
    with pytest.raises(ConfigError, match="1 of 2"):
        await buffer.get_batch(2, 0)


def forgets_to_return(*_):
    pass


@BUFFERS
@pytest.mark.parametrize(
    ("reward", "transforms", "says"),
    [
        (float("nan"), {}, "nan"),
        (float("inf"), {}, "inf"),
        (1.0, {"final_reward_transformation": forgets_to_return}, "forgets_to_return"),
        (1.0, {"step_reward_transformation": forgets_to_return}, "forgets_to_return"),
    ],
)
def test_reward_other_than_a_finite_number_never_enters(buffer_class, reward, transforms, says):
    buffer = buffer_class(10, **transforms)
    with pytest.raises(ConfigError, match=says):
        buffer.add_player_trajectory(make_trajectory(2, final_reward=reward))
    assert buffer.size() == 0


# capacity


async def test_dropping_stale_steps_makes_room():
    buffer = StepBuffer(2, max_staleness=0)
    buffer.add_player_trajectory(make_trajectory(2, version=0))
    collector = asyncio.create_task(buffer.wait_for_room())
    learner = asyncio.create_task(buffer.get_batch(2, current_version=1))
    await asyncio.wait_for(collector, 1)
    buffer.add_player_trajectory(make_trajectory(2, version=1))
    assert len(await asyncio.wait_for(learner, 1)) == 2


@pytest.mark.parametrize(("size", "n"), [(4, 0), (4, 5), (0, 1)])
async def test_batch_that_can_never_fill_is_refused(size, n):
    with pytest.raises(ConfigError, match="buffer_size"):
        await StepBuffer(size).get_batch(n, 0)


# age


async def test_episode_with_one_stale_step_is_dropped_whole():
    buffer = EpisodeBuffer(10, max_staleness=1)
    mixed = make_trajectory(2, game_idx=0, version=1)
    mixed.steps[0].generation = replace(mixed.steps[0].generation, adapter_version=0)
    buffer.add_player_trajectory(mixed)
    buffer.add_player_trajectory(make_trajectory(2, game_idx=1, version=1))
    assert [names_of(e) for e in await buffer.get_batch(2, current_version=2)] == [["1.0", "1.1"]]
    assert buffer.dropped_stale == 2
    buffer = StepBuffer(10)
    buffer.add_player_trajectory(make_trajectory(2, version=0))
    assert len(await buffer.get_batch(2, current_version=1000)) == 2


# sampling


async def test_every_step_is_equally_likely():
    drawn: Counter[str] = Counter()
    rng = random.Random(0)
    for _ in range(3000):
        buffer = StepBuffer(6, rng=rng)
        buffer.add_player_trajectory(make_trajectory(6))
        drawn.update(names_of(await buffer.get_batch(2, 0)))
    assert len(drawn) == 6
    assert all(abs(count - 1000) < 150 for count in drawn.values())


@BUFFERS
async def test_oldest_steps_are_taken_first(buffer_class):
    buffer = buffer_class(100, max_staleness=2)
    for game_idx, version in enumerate([3, 1, 2, 1, 3, 2]):
        buffer.add_player_trajectory(make_trajectory(5, game_idx=game_idx, version=version))
    given = []
    for current_version in (3, 4, 5):
        batch = await buffer.get_batch(10, current_version)
        steps = batch if buffer_class is StepBuffer else [step for episode in batch for step in episode]
        given.append({step.generation.adapter_version for step in steps})
    assert given == [{1}, {2}, {3}]
    assert buffer.dropped_stale == 0


async def test_steps_are_counted_by_env_and_game_length():
    buffer = StepBuffer(100, max_staleness=0)
    for game_idx, num_turns in enumerate([1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 200]):
        buffer.add_game(make_game([1.0], group_idx=None, num_steps=2, game_idx=game_idx, turns=[None] * num_turns))
    await buffer.get_batch(10, 0)
    assert not buffer.has_batch(3, 1)
    metrics = {name.removeprefix("collection-E/Steps "): n for name, n in buffer.counts.metrics().items()}
    assert (metrics["Played"], metrics["Trained"], metrics["Dropped"]) == (24, 10, 14)
    classes = ("1-4", "5-8", "9-16", "17-32", "33-64", "65+")
    assert [metrics[f"Played ({turns} turns)"] for turns in classes] == [4] * 6
    assert (buffer.counts.most_dropped() or "").startswith("E, ")


async def test_episodes_come_shuffled_and_whole():
    buffer = EpisodeBuffer(40, rng=3)
    for game_idx in range(10):
        buffer.add_player_trajectory(make_trajectory(4, game_idx=game_idx))
    episodes = await buffer.get_batch(10, 0)
    assert [len(episode) for episode in episodes] == [4, 4, 4]
    assert buffer.size() == 28
    games = [names_of(episode)[0] for episode in episodes + await buffer.get_batch(28, 0)]
    assert len(set(games)) == 10
    assert games != sorted(games)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 3)),
        st.tuples(st.just("take"), st.integers(1, 6), st.integers(0, 4)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(operations=operations, is_by_episode=st.booleans(), rejects=st.booleans())
def test_no_step_is_lost_or_given_twice(operations, is_by_episode, rejects):
    async def play():
        kind = EpisodeBuffer if is_by_episode else StepBuffer
        buffer = kind(6, max_staleness=2, reject_zero_signal=rejects)
        given, out = 0, []
        for game_idx, (operation, n, version) in enumerate(operations):
            if operation == "add":
                reward = float(game_idx % 3 == 0)
                trajectory = make_trajectory(n, game_idx=game_idx, version=version, final_reward=reward)
                buffer.add_player_trajectory(trajectory)
                given += n
            elif operation == "drain":
                out += names_of(buffer.drain())
            else:
                # An incomplete batch is cancelled: stale steps are dropped, and nothing else.
                learner = asyncio.create_task(buffer.get_batch(n, current_version=version))
                await asyncio.sleep(0)
                if not learner.done():
                    learner.cancel()
                    await asyncio.wait({learner})
                else:
                    batch = learner.result()
                    steps = [s for episode in batch for s in episode] if is_by_episode else batch
                    assert all(version - step.generation.adapter_version <= 2 for step in steps)
                    assert len(steps) >= n if is_by_episode else len(steps) == n
                    out += names_of(steps)
            assert_balanced(buffer)
            assert buffer.added == given
        assert len(out) == len(set(out)) == buffer.taken + buffer.drained

    asyncio.run(play())


# groups


def make_game(rewards, *, group_idx=0, num_steps=1, end="natural", invalid=(), game_idx=0, turns=()):
    """Return a game of a group with the policy at every seat and a reward for each seat."""
    trajectories = [
        make_trajectory(num_steps, game_idx=game_idx, final_reward=reward, pid=pid)
        for pid, reward in enumerate(rewards)
    ]
    spec = make_spec(*[BASE] * len(rewards), group_idx=group_idx, game_idx=game_idx)
    trajectories *= end != "void"
    return make_record(spec, trajectories=trajectories, end=end, invalid_pids=tuple(invalid), turns=list(turns))


def make_grouped_buffer(group_size, baseline="grpo", size=100, **kwargs):
    return StepBuffer(size, group_size=group_size, group_baseline=GROUP_BASELINES[baseline], **kwargs)


async def test_group_reaches_the_batch_only_when_complete():
    buffer = make_grouped_buffer(3)
    for index, reward in enumerate([1.0, 0.0]):
        buffer.add_game(make_game([reward], game_idx=index, num_steps=2))
    assert buffer.size() == buffer.added == 0
    assert buffer.steps_in_groups == 4
    buffer.add_game(make_game([-1.0], game_idx=2))
    assert buffer.size() == 5
    assert buffer.steps_in_groups == 0
    advantages = {step.act: step.reward for step in await buffer.get_batch(5, 0)}
    assert advantages["0.0"] == advantages["0.1"] == pytest.approx(1.5**0.5)
    assert advantages["1.0"] == advantages["1.1"] == pytest.approx(0)
    assert advantages["2.0"] == pytest.approx(-(1.5**0.5))
    assert_balanced(buffer)


async def test_group_of_an_ended_lineage_has_no_lifetime():
    buffer = make_grouped_buffer(2)
    in_flight = buffer.in_flight = InFlight(4, 4, None, {})
    for index in range(2):
        record = make_game([1.0], game_idx=index)
        in_flight.begin(record.spec)
        buffer.add_game(record)
        if index == 0:
            buffer.begin_again(5, (None, None, None))
    assert in_flight.state_dict()["lifetimes"] == [] and buffer.drained == 2
    assert_balanced(buffer)


async def test_players_are_compared_with_their_own_seat_in_games_of_their_group():
    buffer = make_grouped_buffer(2, "rloo")
    buffer.add_game(make_game([1.0, -1.0], game_idx=0))
    buffer.add_game(make_game([0.0, 0.0], game_idx=1))
    batch = await buffer.get_batch(4, 0)
    assert sorted((step.act, step.step_info["raw_reward"], step.reward) for step in batch) == [
        ("0.0", -1.0, -1.0),
        ("0.0", 1.0, 1.0),
        ("1.0", 0.0, -1.0),
        ("1.0", 0.0, 1.0),
    ]
    buffer = make_grouped_buffer(2, "rloo")
    for group_idx, rewards in {5: [1.0, 0.0], 9: [10.0, 20.0]}.items():
        buffer.add_game(make_game([rewards[0]], group_idx=group_idx))
        buffer.add_game(make_game([7.0], group_idx=100 + group_idx))
        buffer.add_game(make_game([rewards[1]], group_idx=group_idx))
    assert sorted(step.reward for step in await buffer.get_batch(4, 0)) == [-10.0, -1.0, 1.0, 10.0]


@pytest.mark.parametrize("shaping", [None, RewardForFormat(reward=2.0)], ids=["plain", "uniform shaping"])
@pytest.mark.parametrize("baseline", ["grpo", "rloo", "mean"])
async def test_group_of_equal_rewards_gives_advantage_zero_in_any_game_length_and_is_counted(baseline, shaping):
    assert GROUP_BASELINES["mean"]([1.0, 0.0, -4.0]) == [2.0, 1.0, -3.0], "the scale of the rewards stays"
    buffer = make_grouped_buffer(3, baseline, step_reward_transformation=shaping)
    for num_steps in (1, 2, 3):
        buffer.add_game(make_game([0.1], num_steps=num_steps))
    assert [step.reward for step in await buffer.get_batch(6, 0)] == [0.0] * 6
    assert buffer.group_counts == {"whole": 1, "without_spread": 1, "of_one": 0}


async def test_void_and_filtered_games_shrink_a_group_and_a_group_of_one_is_dropped():
    buffer = make_grouped_buffer(3, "rloo")
    for record in (make_game([3.0]), make_game([], end="void"), make_game([1.0])):
        buffer.add_game(record)
    assert sorted(step.reward for step in await buffer.get_batch(2, 0)) == [-2.0, 2.0]
    for end in ("void", "natural", "void"):
        buffer.add_game(make_game([3.0], end=end, group_idx=1))
    assert buffer.size() == buffer.steps_in_groups == 0
    for _ in range(3):
        buffer.add_game(make_game([], end="void", group_idx=2))
    assert buffer.group_counts == {"whole": 2, "without_spread": 0, "of_one": 1}
    assert_balanced(buffer)
    buffer = make_grouped_buffer(2, filter_opponent_invalid=True)
    buffer.add_game(make_game([1.0, -1.0], end="invalid", invalid=[1]))
    buffer.add_game(make_game([0.0, 0.0]))
    assert buffer.group_counts == {"whole": 2, "without_spread": 0, "of_one": 1}
    assert buffer.size() == 2


async def test_steps_that_wait_for_their_group_count_towards_capacity():
    buffer = make_grouped_buffer(2, size=4)
    buffer.add_game(make_game([1.0], num_steps=4))
    assert buffer.is_full
    waiting = asyncio.ensure_future(buffer.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    buffer.add_game(make_game([], end="void"))
    await asyncio.wait_for(waiting, 5)
    assert not buffer.is_full


@pytest.mark.parametrize("baseline", ["grpo", "rloo"])
@pytest.mark.parametrize("num_steps", [2, 5, 20])
async def test_invalid_move_costs_only_its_own_turn_in_any_game_length(baseline, num_steps):
    penalty = PenaltyForInvalidMove(reward=1.0, penalty=-1.0)
    buffer = make_grouped_buffer(2, baseline, step_reward_transformation=penalty)
    lost = make_game([-1.0], num_steps=num_steps)
    lost.trajectories[0].steps[-1].format_feedback["invalid_move"] = True
    buffer.add_game(lost)
    buffer.add_game(make_game([-1.0], num_steps=num_steps, game_idx=1))
    rewards = {step.act: step.reward for step in await buffer.get_batch(2 * num_steps, 0)}
    invalid = rewards.pop(f"0.{num_steps - 1}")
    (valid,) = set(rewards.values())  # both games were lost
    assert valid - invalid == pytest.approx(2.0)
    assert valid >= 0 > invalid


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_group_advantages_sum_to_zero_and_are_bounded(rewards):
    for name, baseline in GROUP_BASELINES.items():
        advantages = baseline(rewards)
        assert sum(advantages) == pytest.approx(0, abs=1e-6)
        if name == "grpo":
            assert max(map(abs, advantages)) <= (len(rewards) - 1) ** 0.5 + 1e-6
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert advantages == pytest.approx([advantages[i] for i in range(len(rewards))])
    assert [advantages[i] for i in order] == sorted(advantages)


# games ended by another player


@BUFFERS
def test_games_ended_by_others_invalid_move_can_be_filtered(buffer_class):
    buffer = buffer_class(100, filter_opponent_invalid=True)
    buffer.add_game(make_game([1.0, -1.0], group_idx=None, end="invalid", invalid=[1]))
    assert buffer.size() == 1  # the player who made the invalid move still learns from it
    assert buffer.filtered == 1
    buffer.add_game(make_game([1.0, -1.0], group_idx=None))
    assert buffer.size() == 3
    everything = buffer_class(100)
    everything.add_game(make_game([1.0, -1.0], group_idx=None, end="invalid", invalid=[1]))
    assert everything.size() == 2
    assert everything.filtered == 0


@pytest.mark.parametrize("baseline", ["grpo", "rloo"])
async def test_player_without_a_turn_is_not_compared(baseline):
    """The first move of the other side was invalid: a win, but without the paid steps of the other games."""
    buffer = make_grouped_buffer(
        4, baseline, step_reward_transformation=PenaltyForInvalidMove(reward=2.5, penalty=-1.0)
    )
    buffer.add_game(make_game([1.0], num_steps=0))
    buffer.add_game(make_game([1.0], num_steps=2, game_idx=1))
    buffer.add_game(make_game([-1.0], num_steps=4, game_idx=2))
    buffer.add_game(make_game([1.0], num_steps=0, game_idx=3))
    advantages = {step.act[0]: step.reward for step in await buffer.get_batch(6, 0)}
    assert advantages["1"] > 0 > advantages["2"]
    assert advantages["1"] == -advantages["2"]
    for index in range(4):
        buffer.add_game(make_game([1.0], num_steps=0 if index else 1, group_idx=1, game_idx=index))
    assert buffer.group_counts == {"whole": 2, "without_spread": 0, "of_one": 1}


# delay


@BUFFERS
async def test_batch_delay_waits_for_more_steps_than_a_batch_takes(buffer_class):
    buffer = buffer_class(10, batch_delay=1.5)
    buffer.add_player_trajectory(make_trajectory(4))
    batch = asyncio.ensure_future(buffer.get_batch(4, 0))
    await asyncio.sleep(0)
    assert not batch.done()
    buffer.add_player_trajectory(make_trajectory(2))
    await asyncio.wait_for(batch, 5)
    assert buffer.taken == 4 or buffer_class is EpisodeBuffer  # whole episodes may overshoot
    with pytest.raises(ConfigError, match=r"batch_delay_buffer 1\.5"):
        await buffer.get_batch(7, 0)


# batches in which something is to be learnt


def add_games(buffer, rewards, *, group_idx=None, first=0):
    for index, reward in enumerate(rewards):
        buffer.add_game(make_game([reward], group_idx=group_idx, game_idx=first + index))


async def test_group_whose_results_are_alike_does_not_count_towards_a_batch():
    buffer = make_grouped_buffer(2, reject_zero_signal=True, max_staleness=0)
    for group_idx, reward in enumerate([1.0, 0.0]):
        add_games(buffer, [reward, reward], group_idx=group_idx, first=2 * group_idx)
    assert not buffer.has_batch(4, 0)
    assert buffer.size() == 4, "the steps wait until the batch is complete"
    for group_idx in (2, 3, 4):
        add_games(buffer, [1.0, 0.0], group_idx=group_idx, first=2 * group_idx)
    assert all(step.reward for step in await buffer.get_batch(4, 0))
    assert (buffer.rejected, buffer.size()) == (4, 2)
    add_games(buffer, [1.0, 0.0, 0.0, 1.0], group_idx=5, first=10)
    assert buffer.has_batch(4, 0) and not buffer.has_batch(4, 1), "steps that were chosen grow old, too"
    assert (buffer.dropped_stale, buffer.size()) == (6, 0)
    assert buffer.rejection.metrics() == {"buffer/rejected": 4, "buffer/filled": 0, "buffer/rejected-E ()": 4}
    assert_balanced(buffer)


@BUFFERS
async def test_results_of_a_seat_that_are_alike_do_not_count_towards_a_batch(buffer_class):
    buffer = buffer_class(100, RoleAdvantageFormatter(tau=0.5), reject_zero_signal=True)
    add_games(buffer, [1.0, 1.0, 1.0])
    assert not buffer.has_batch(3, 0), "their advantages after the baseline differ, their results do not"
    add_games(buffer, [0.0, 0.0, 0.0], first=3)
    assert buffer.has_batch(3, 0), "they differ from the newest result before"
    assert len(await buffer.get_batch(3, 0)) == buffer.rejected == 3
    add_games(buffer, [0.0, 0.0, 0.0], first=6)
    assert not buffer.has_batch(3, 0)
    add_games(buffer, [0.0, 1.0, 0.0], first=9)
    assert buffer.has_batch(3, 0), "one result that differs shows something about the others"
    assert_balanced(buffer)


async def test_batch_is_completed_by_other_steps_after_four_batches():
    buffer = make_grouped_buffer(2, reject_zero_signal=True)
    for group_idx in range(7):
        add_games(buffer, [1.0, 1.0], group_idx=group_idx, first=2 * group_idx)
    assert not buffer.has_batch(4, 0)
    add_games(buffer, [1.0, 0.0], group_idx=7, first=14)
    batch = await buffer.get_batch(4, 0)
    assert sorted(map(abs, (step.reward for step in batch))) == [0, 0, 1, 1], "those with a signal are in it"
    assert (buffer.rejected, buffer.rejection.filled, buffer.size()) == (12, 2, 0)
    assert_balanced(buffer)


async def test_rejection_never_stops_the_games():
    buffer = make_grouped_buffer(2, size=4, reject_zero_signal=True)
    for group_idx in range(100):
        await asyncio.wait_for(buffer.wait_for_room(), 1)
        add_games(buffer, [1.0, 1.0], group_idx=group_idx, first=2 * group_idx)
        if buffer.has_batch(4, 0):
            break
    assert len(await buffer.get_batch(4, 0)) == 4
    assert buffer.rejected > 0


async def test_steps_that_are_judged_survive_a_restart():
    buffer, resumed = (make_grouped_buffer(2, reject_zero_signal=True) for _ in range(2))
    for rewards in ([1.0] * 4, [1.0, 0.0] * 2):
        add_games(buffer, rewards, group_idx=0)
        assert buffer.has_batch(4, 0) == (0.0 in rewards)
    await buffer.get_batch(4, 0)
    add_games(buffer, [1.0, 1.0, 1.0, 0.0], group_idx=0)
    assert not buffer.has_batch(4, 0)
    add_games(buffer, [1.0, 0.0], group_idx=1, first=4)
    assert (buffer.rejection.size(), len(buffer.contents())) == (4, 6)
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    resumed.refill(buffer.contents())
    assert_balanced(resumed)
    assert sorted(names_of(chunk)[0] for chunk in resumed.contents()) == [f"{game}.0" for game in range(6)]
    assert resumed.rejection.size() == 4
    for one in (buffer, resumed):
        add_games(one, [1.0, 0.0] * 2, group_idx=2, first=6)
        one.batch = await one.get_batch(4, 0)
        assert_balanced(one)
    assert names_of(resumed.batch) == names_of(buffer.batch)
    assert all(step.reward for step in resumed.batch)
    assert resumed.rejection.metrics() == buffer.rejection.metrics()
    assert (resumed.rejected, resumed.left_lately) == (6, 6)
