"""The conversion of a buffer's batch for the learner."""

import itertools

from fakes.game_records import make_generation, make_step, make_trajectory
from unstable_lite.learner.client import train_items
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.types import PlayerTrajectory


def trajectory(game_idx: int, num_steps: int, final_reward: float) -> PlayerTrajectory:
    """Return a trajectory whose tokens encode the game and the turn."""
    sampled = [make_generation([n], prompt_ids=[game_idx, n], adapter_version=game_idx) for n in range(num_steps)]
    steps = [make_step(generation=generation) for generation in sampled]
    return make_trajectory(*steps, game_idx=game_idx, final_reward=final_reward, num_turns=num_steps)


async def test_episodes_reach_the_learner_whole_in_turn_order():
    buffer = EpisodeBuffer(100)
    for game_idx in range(1, 6):
        buffer.add_player_trajectory(trajectory(game_idx, game_idx, float(game_idx)))
    items = train_items(await buffer.get_batch(15, 5))
    games = [[*items] for _, items in itertools.groupby(items, lambda item: item.trajectory)]
    assert sorted(map(len, games)) == [1, 2, 3, 4, 5]
    for game in games:
        size, turns = len(game), [*range(len(game))]
        assert [item.prompt_ids.tolist() for item in game] == [[size, turn] for turn in turns]
        assert [item.completion_ids.tolist() for item in game] == [[turn] for turn in turns]
        assert [item.reward for item in game] == [0.0] * (size - 1) + [size]
        assert {item.adapter_version for item in game} == {size}


async def test_single_steps_are_separate_trajectories():
    buffer = StepBuffer(100)
    buffer.add_player_trajectory(trajectory(1, 4, 1.0))
    items = train_items(await buffer.get_batch(4, 1))
    assert [item.trajectory for item in items] == [0, 1, 2, 3]
    assert [item.reward for item in items] == [1.0] * 4
