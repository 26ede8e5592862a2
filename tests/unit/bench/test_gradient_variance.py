"""The variance of the gradient is estimated without bias, and measuring it does not change the update."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from bench.role_average import RoleAverage
from bench.shuffled_rewards import ShuffledRewards
from fakes.game_records import CONTEXT
from unstable_lite.errors import ConfigError
from unstable_lite.learner import load_learner
from unstable_lite.reward_transformations import RoleAdvantageByEnvFormatter
from unstable_lite.types import Opponent, TrainItem

MEASURED = "bench.gradient_variance:MeasuredREINFORCE"
Make = Callable[..., Any]


def load(
    make_config: Make, algorithm: str = MEASURED, group: str | None = None, dropout: float = 0.0, **options: Any
) -> Any:
    config = make_config(lora={"lora_dropout": dropout})
    changes = {
        "algorithm": algorithm,
        "learner": config.learner.model_copy(update={"options": options}),
        "rewards": config.rewards.model_copy(update={"group_baseline": group}),
    }
    learner = load_learner(config.model_copy(update=changes), "cpu")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in learner.training.policy.parameters.items():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return learner


@pytest.fixture
def items(make_items: Make) -> list[TrainItem]:
    """Ten steps of six games, of which two have both seats; the steps of a game are not together."""
    games = [(0, 0, 1.0), (1, 1, -1.0), (2, 0, 0.5), (3, 0, -0.5), (4, 0, 1.0), (4, 1, -1.0), (5, 1, 1.0)]
    games += [(5, 0, -1.0), (5, 1, 1.0), (0, 0, 1.0)]
    kinds = ("mirror", "scripted")
    return [
        replace(
            item,
            reward=reward - 0.25,
            context=msgspec.structs.replace(
                CONTEXT,
                game_idx=game,
                pid=pid,
                final_reward=reward,
                opponents=(Opponent(pid=1 - pid, uid="one", kind=kinds[game % 2]),),  # type: ignore[arg-type]
            ),
        )
        for item, (game, pid, reward) in zip(make_items(len(games)), games, strict=True)
    ]


def gradient_of(plain: Any, items: list[TrainItem], rows: list[int], advantages: list[float]) -> Tensor:
    """Return the gradient of some steps' share of the batch's loss, by REINFORCE itself."""
    for parameter in plain.policy.parameters.values():
        parameter.grad = None
    plain.add_gradient([replace(items[row], reward=advantages[row]) for row in rows])
    parts = [parameter.grad.flatten() for parameter in plain.policy.parameters.values()]
    return torch.cat(parts) * len(rows) / len(items)


def test_metrics_agree_with_the_formula_in_float64(make_config, items):
    """Unrolled: the gradient of each game, and the textbook covariance."""
    learner, plain = load(make_config, baseline="batch"), load(make_config, "reinforce")
    for one in (learner, plain):
        one.policy.model.double()
    advantages = learner.advantages(items)
    metrics = learner.measure(items, advantages)
    rows_of = [[r for r, item in enumerate(items) if item.context and item.context.game_idx == g] for g in range(6)]
    variance = {}
    for name, given in advantages.items():
        games = torch.stack([gradient_of(plain, items, rows, given) for rows in rows_of])
        variance[name] = 6 * float(games.var(0, correction=1).sum())
        if name == "own":
            whole = gradient_of(plain, items, list(range(len(items))), given)
            assert (games.sum(0) - whole).abs().max() < 1e-7
            square = float(whole @ whole)
    assert metrics["gradient_variance"] == pytest.approx(variance["own"], rel=1e-5)
    assert metrics["gradient_signal"] == pytest.approx(square - variance["own"], rel=1e-5)
    assert metrics["gradient_noise"] == pytest.approx(variance["own"] / square, rel=1e-5)
    for name in ("none", "batch", "role", "opponents"):
        assert metrics[f"relative_variance_{name}"] == pytest.approx(variance[name] / variance["none"], rel=1e-5)
    assert metrics["relative_variance"] == metrics["relative_variance_batch"] != 1
    assert metrics["relative_variance_shared"] == pytest.approx(1.0)


def test_baselines_are_those_of_the_package(make_config, items):
    advantages = load(make_config).advantages(items)
    assert advantages["own"] == [item.reward for item in items]
    assert advantages["none"] == [item.context.final_reward for item in items if item.context]
    assert np.mean(advantages["batch"]) == pytest.approx(0.0)
    assert np.std(advantages["batch"]) == pytest.approx(np.std(advantages["none"]))
    role, opponents, seen = RoleAverage(tau=0.01), RoleAdvantageByEnvFormatter(tau=0.01), set()
    for item, of_role, of_opponents in zip(items, advantages["role"], advantages["opponents"], strict=True):
        context = item.context
        if (context.game_idx, context.pid) not in seen:
            assert of_role == role(context.final_reward, context.pid, context.env_id, context)
            assert of_opponents == opponents(context.final_reward, context.pid, context.env_id, context)
        seen.add((context.game_idx, context.pid))
    assert advantages["role"] != advantages["opponents"]
    assert advantages["role"][-1] == advantages["role"][0], "two steps of one player's game"


def test_measuring_leaves_the_update_as_it_is_bit_for_bit(make_config, items, tmp_path):
    """The adapter has dropout, which draws random numbers in every pass of the update."""
    results: dict[str, list[dict[str, float]]] = {}
    for name in ("reinforce", MEASURED):
        options = {"every": 2} if name == MEASURED else {}
        learner = load(make_config, name, None, 0.1, **options)
        torch.manual_seed(0)
        results[name] = [learner.update(items, version).metrics for version in (1, 2, 3)]
        (directory := tmp_path / name.partition(":")[0]).mkdir()
        learner.training.save(directory)
    for ours, theirs, is_measured in zip(results[MEASURED], results["reinforce"], (False, True, False), strict=True):
        assert ("gradient_variance" in ours) == is_measured
        assert all(ours[name] == value for name, value in theirs.items() if name not in ("seconds", "tokens_per_s"))
    for file in (tmp_path / "reinforce").iterdir():
        assert (directory / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("options", [{"every": 0}, {"baseline": "rol"}, {"baseline": "group", "group": "grpo"}])
def test_wrong_options_are_refused(make_config, options):
    with pytest.raises(ConfigError, match="must be"):
        load(make_config, **options)


def test_shuffled_rewards_are_independent_of_the_game_and_keep_each_seats_distribution():
    shuffled, draw = ShuffledRewards(), random.Random(1)
    games = [(draw.choice((0, 1)), draw.random() < 0.75) for _ in range(20_000)]
    given = [shuffled(2.0 * won - 1.0 if seat == 0 else -5.0 - won, seat, "env") for seat, won in games]
    pairs = Counter((won, reward) for (seat, won), reward in zip(games, given, strict=True) if seat == 0)
    after = {won: pairs[won, 1.0] / (pairs[won, 1.0] + pairs[won, -1.0]) for won in (False, True)}
    assert all(0.72 < share < 0.78 for share in after.values())
    assert {reward for (seat, _), reward in zip(games, given, strict=True) if seat == 1} == {0.0, -5.0, -6.0}
    assert given.count(0.0) == 2, "each seat's first game"
    apart = [(shuffled(1.0, 2, "a"), shuffled(2.0, 2, "b")) for _ in range(50)]
    assert apart[1:] == [(1.0, 2.0)] * 49, "envs are shuffled apart"
