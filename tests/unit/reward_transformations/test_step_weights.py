"""Weights that transforms set: their way to the learner and through a checkpoint, and the shipped examples."""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fakes import game_records
from fakes.game_records import CONTEXT
from unstable_lite.errors import ConfigError
from unstable_lite.learner.client import train_items
from unstable_lite.orchestrator.checkpoint import read_checkpoint, save_checkpoint
from unstable_lite.reward_transformations import ComposeSamplingRewardTransforms
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.transport.codec import decode, encode
from unstable_lite.transport.messages import Update
from unstable_lite.types import Forced, PlayerTrajectory, Step, StepContext

EXAMPLES = Path(__file__).parents[3] / "examples"


def make_step(context: StepContext = CONTEXT, reward: float = 0.0) -> Step:
    info = {"raw_reward": reward}
    return game_records.make_step([5, 6, 7], 0, pid=context.pid, reward=reward, step_info=info, context=context)


def make_trajectory(**changes: Any) -> PlayerTrajectory:
    """Return a game of six turns, of which this player had 1, 3 and 5; `changes` are those of every context."""
    contexts = [{"turn": 1 + 2 * turn, "player_turn": turn} | changes for turn in range(3)]
    steps = [make_step(structs.replace(CONTEXT, **given)) for given in contexts]
    return game_records.make_trajectory(*steps, num_turns=6)


def example(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return getattr(importlib.import_module(module), name)


async def test_step_transform_may_replace_a_step_and_a_sampling_transform_all_of_them():
    def exchange(player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        player_traj.steps[step_index] = replace(player_traj.steps[step_index], weight=0.5)
        return reward + 1

    buffer = StepBuffer(10, step_reward_transformation=exchange)
    buffer.add_player_trajectory(make_trajectory())
    assert [(step.reward, step.weight) for step in await buffer.get_batch(3, 0)] == [(2.0, 0.5)] * 3
    sampling = ComposeSamplingRewardTransforms([lambda steps: [replace(s, weight=np.float32(0.25)) for s in steps]])
    buffer = StepBuffer(10, sampling_reward_transformation=sampling)
    buffer.add_player_trajectory(make_trajectory())
    items = train_items(await buffer.get_batch(3, 0))
    assert [(item.weight, type(item.weight), item.token_weights) for item in items] == [(0.25, float, None)] * 3


@pytest.mark.parametrize("buffer_class", [StepBuffer, EpisodeBuffer])
async def test_weights_of_a_step_transform_reach_the_learner(buffer_class):
    def weigh(player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        player_traj.steps[step_index].weight = np.float64(0.5 * step_index)
        player_traj.steps[step_index].token_weights = [0, 1, step_index]  # type: ignore[assignment]
        return reward

    buffer = buffer_class(10, step_reward_transformation=weigh)
    buffer.add_player_trajectory(make_trajectory())
    (update,) = decode(
        encode([Update(request_id=1, items=train_items(await buffer.get_batch(3, 0)), version=1, path="x")])
    )
    assert isinstance(update, Update)
    items = sorted(update.items, key=lambda item: item.weight)
    assert [item.weight for item in items] == [0.0, 0.5, 1.0]
    for index, item in enumerate(items):
        assert item.token_weights is not None and item.token_weights.dtype == np.float32
        assert item.token_weights.tolist() == [0.0, 1.0, float(index)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": -0.5}, "weight -0.5"),
        ({"weight": math.nan}, "weight nan"),
        ({"weight": "heavy"}, "weight 'heavy'"),
        ({"token_weights": np.ones(2)}, r"shape \(2,\) for a completion of 3 tokens"),
        ({"token_weights": np.ones((3, 1))}, r"shape \(3, 1\)"),
        ({"token_weights": [1.0, -1.0, 1.0]}, "at least 0"),
        ({"token_weights": [1.0, math.inf, 1.0]}, "finite"),
        ({"token_weights": "abc"}, "not numbers"),
    ],
)
def test_bad_weights_of_a_transform_are_refused_with_its_name(change, says):
    class Heavy:
        def __repr__(self) -> str:
            return "Heavy"

        def __call__(self, *given: Any) -> Any:
            if len(given) == 1:
                return [replace(step, **change) for step in given[0]]
            for name, value in change.items():
                setattr(given[0].steps[given[1]], name, value)
            return given[2]

    with pytest.raises(ConfigError, match=f"Heavy.*{says}"):
        ComposeSamplingRewardTransforms([Heavy()])([make_step()])
    with pytest.raises(ConfigError, match=f"Heavy.*{says}"):
        StepBuffer(10, step_reward_transformation=Heavy()).add_player_trajectory(make_trajectory())


async def test_waiting_step_keeps_its_weights_in_a_checkpoint(tmp_path):
    async def save_learner(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"weights")

    steps = [make_step(), replace(make_step(), weight=0.3, token_weights=np.array([0.0, 2.0, 0.1], np.float32))]
    directory = await save_checkpoint(tmp_path, 1, {}, [[step] for step in steps], save_learner)
    (plain,), (weighted,) = read_checkpoint(directory).waiting
    assert (plain.weight, plain.token_weights) == (1.0, None)
    assert weighted.weight == 0.3
    assert weighted.token_weights is not None
    assert np.array_equal(weighted.token_weights, np.float32([0.0, 2.0, 0.1]))


def test_example_weights_steps_by_the_spread_of_their_group(monkeypatch):
    weigh = example(monkeypatch, "weight_by_group_spread", "WeightByGroupSpread")()

    def of_game(group: int, game: int, reward: float) -> Step:
        return make_step(structs.replace(CONTEXT, group_idx=group, game_idx=game), reward=reward)

    games = [of_game(0, 0, 1.0), of_game(0, 1, -1.0), of_game(1, 2, 1.0), of_game(1, 3, 1.0)]
    given = [games[0], *games]  # a second turn of game 0 does not count its reward twice
    assert [step.weight for step in weigh(given)] == pytest.approx([5 / 3, 5 / 3, 5 / 3, 0.0, 0.0])
    assert [step.weight for step in weigh(games[2:])] == [0.0, 0.0]
    assert all(step.weight == 1.0 for step in given)


def weights_by(weigh: Any, trajectory: PlayerTrajectory) -> list[float]:
    """Return the weights of the steps after two calls for each, which change no reward."""
    for index, step in (*enumerate(trajectory.steps), *enumerate(trajectory.steps)):
        assert weigh(trajectory, index, 1.5, step.context) == 1.5
    return [step.weight for step in trajectory.steps]


def test_example_gives_late_and_decisive_turns_more_weight(monkeypatch):
    weigh = example(monkeypatch, "turn_level_credit", "TurnLevelCredit")(decay=0.5, decisive=3.0)
    assert weights_by(weigh, make_trajectory()) == [0.25, 0.5, 3.0]
    assert weights_by(weigh, make_trajectory(num_turns=7)) == [0.25, 0.5, 1.0]
    assert weights_by(weigh, make_trajectory(end="invalid", is_invalid=True)) == [0.0, 0.0, 3.0]


def test_example_masks_wins_by_forfeit_and_thinking(monkeypatch):
    mask = example(monkeypatch, "eligibility_mask", "EligibilityMask")
    assert weights_by(mask(), make_trajectory()) == [1.0] * 3
    assert weights_by(mask(), make_trajectory(end="invalid")) == [0.0] * 3
    assert weights_by(mask(), make_trajectory(end="invalid", is_invalid=True)) == [1.0] * 3
    cut = make_trajectory()
    for step in cut.steps:
        step.generation = replace(step.generation, forced=Forced(at=2, ids=np.array([9], np.int32)))
    for trajectory, end, of_tokens in (
        (make_trajectory(), 5, [0.0, 1.0, 1.0]),
        (make_trajectory(), 6, [0.0, 0.0, 1.0]),
        (make_trajectory(), 9, [0.0] * 3),
        (cut, 9, [0.0, 0.0, 1.0]),  # a budget ended the thinking, so no token did
    ):
        weights_by(mask(end_of_thinking=end), trajectory)
        assert trajectory.steps[0].token_weights is not None
        assert trajectory.steps[0].token_weights.tolist() == of_tokens
