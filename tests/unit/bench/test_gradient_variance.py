"""The variance of the gradient is estimated without bias, and measuring it does not change the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gradient_variance import Moments
from bench.role_average import RoleAverage
from fakes.step_contexts import CONTEXT
from unstable_lite.errors import ConfigError
from unstable_lite.learner import load_learner
from unstable_lite.reward_transformations import RoleAdvantageByEnvFormatter
from unstable_lite.reward_transformations.group import leave_one_out
from unstable_lite.types import Opponent, TrainItem

MEASURED = "bench.gradient_variance:MeasuredREINFORCE"
Make = Callable[..., Any]


def load(
    make_config: Make, algorithm: str = MEASURED, group_size: int = 1, dropout: float = 0.0, **options: Any
) -> Any:
    config = make_config(run={"group_size": group_size}, lora={"lora_dropout": dropout})
    learner_config = config.learner.model_copy(update={"options": options})
    learner = load_learner(config.model_copy(update={"algorithm": algorithm, "learner": learner_config}), "cpu")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in learner.training.policy.parameters.items():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return learner


@pytest.fixture
def items(make_items: Make) -> list[TrainItem]:
    """Ten steps of six games; the last two games have both seats, and a step is far from the others of its game."""
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


def test_estimates_are_unbiased_for_units_of_a_known_distribution() -> None:
    """Units are groups of two games that share a part; the second baseline's gradients are three times the first's."""
    generator, mean = torch.Generator().manual_seed(0), torch.tensor([0.9, -0.6, 0.0, 0.3], dtype=torch.float64)
    shared_std, own_std, units, rounds = 0.5, 1.5, 6, 4000
    signals, variances, apart = [], [], []
    for _ in range(rounds):
        moments = Moments()
        for _ in range(units):
            shared = shared_std * torch.randn(4, generator=generator, dtype=torch.float64)
            games = [mean + shared + own_std * torch.randn(4, generator=generator, dtype=torch.float64) for _ in "ab"]
            moments.add([torch.stack([game, 3 * game]) for game in games])
        signals.append(moments.signal_K)
        variances.append(moments.variance_K)
        apart.append(moments.variance_of_games_K)
    scales = torch.tensor([1.0, 9.0], dtype=torch.float64)
    expected = {
        "signal": (signals, (2 * units) ** 2 * float(mean @ mean)),
        "variance": (variances, units * 4 * (4 * shared_std**2 + 2 * own_std**2)),
        "games": (apart, 2 * units * 4 * (shared_std**2 + own_std**2)),
    }
    for name, (found, truth) in expected.items():
        sample = torch.stack(found)
        error = sample.std(0) / rounds**0.5
        assert ((sample.mean(0) - truth * scales).abs() < 4 * error).all(), name
        assert (error < 0.05 * truth * scales).all(), name


def test_metrics_agree_with_the_formula_in_float64(make_config: Make, items: list[TrainItem]) -> None:
    """Unrolled: the gradient of each game by REINFORCE itself, and the textbook covariance."""
    learner, plain = load(make_config, baseline="batch"), load(make_config, "reinforce")
    for one in (learner, plain):
        one.policy.model.double()
    advantages = learner.advantages(items)
    metrics = learner.measure(items, advantages)

    def gradient(rows: list[int], given: list[float]) -> Tensor:
        """Return the gradient of some steps' share of the batch's loss."""
        for parameter in plain.policy.parameters.values():
            parameter.grad = None
        plain.add_gradient([replace(items[row], reward=given[row]) for row in rows])
        parts = [parameter.grad.flatten() for parameter in plain.policy.parameters.values()]
        return torch.cat(parts) * len(rows) / len(items)

    variance = {}
    for name, given in advantages.items():
        games = torch.stack(
            [
                gradient([r for r, i in enumerate(items) if i.context and i.context.game_idx == g], given)
                for g in range(6)
            ]
        )
        variance[name] = 6 * float(games.var(0, correction=1).sum())
        if name == "own":
            whole = gradient(list(range(len(items))), given)
            assert (games.sum(0) - whole).abs().max() < 1e-7
            assert metrics["gradient_signal"] == pytest.approx(float(whole @ whole) - variance[name], rel=1e-5)
            assert metrics["gradient_noise"] == pytest.approx(variance[name] / float(whole @ whole), rel=1e-5)
    assert metrics["gradient_variance"] == pytest.approx(variance["own"], rel=1e-5)
    for name in ("batch", "role", "opponents"):
        assert metrics[f"relative_variance_{name}"] == pytest.approx(variance[name] / variance["none"], rel=1e-5)
    assert metrics["relative_variance"] == metrics["relative_variance_batch"]


def test_baselines_are_those_of_the_package(make_config: Make, items: list[TrainItem]) -> None:
    advantages = load(make_config).advantages(items)
    assert advantages["own"] == [item.reward for item in items]
    assert advantages["none"] == [item.context.final_reward for item in items if item.context]
    assert np.mean(advantages["batch"]) == pytest.approx(0.0)
    assert np.std(advantages["batch"]) == pytest.approx(np.std(advantages["none"]))
    role, opponents, seen = RoleAverage(tau=0.01), RoleAdvantageByEnvFormatter(tau=0.01), set()
    for item, of_role, of_opponents in zip(items, advantages["role"], advantages["opponents"], strict=True):
        context = item.context
        assert context is not None
        if (context.game_idx, context.pid) not in seen:
            assert of_role == role(context.final_reward, context.pid, context.env_id, context)
            assert of_opponents == opponents(context.final_reward, context.pid, context.env_id, context)
        seen.add((context.game_idx, context.pid))
    assert advantages["role"] != advantages["opponents"]
    assert advantages["role"][-1] == advantages["role"][0], "two steps of one player's game"


def test_groups_are_the_units_of_their_own_baseline_and_games_those_of_the_others(
    make_config: Make, items: list[TrainItem]
) -> None:
    """Two groups: the games of each share their deal, so that the sum of a group's gradients is what varies."""
    rewards = [item.context.final_reward for item in items if item.context]
    compared = [*leave_one_out(rewards[:5]), *leave_one_out(rewards[5:])]
    grouped = [
        replace(
            item,
            reward=advantage,
            context=msgspec.structs.replace(item.context, game_idx=row, group_idx=row // 5),
        )
        for row, (item, advantage) in enumerate(zip(items, compared, strict=True))
    ]
    alone = [replace(i, context=msgspec.structs.replace(i.context, group_idx=None)) for i in grouped]
    learner, other = load(make_config, group_size=5, baseline="group"), load(make_config)
    metrics = learner.measure(grouped, learner.advantages(grouped))
    separate = other.measure(alone, other.advantages(alone))
    assert "relative_variance_group" not in separate
    assert metrics["relative_variance"] == metrics["relative_variance_group"]
    assert metrics["gradient_variance"] != pytest.approx(separate["gradient_variance"], rel=0.01)
    assert metrics["relative_variance_none"] == separate["relative_variance_none"] == 1


def test_measuring_leaves_the_update_as_it_is_bit_for_bit(
    make_config: Make, items: list[TrainItem], tmp_path: Path
) -> None:
    """With dropout, which draws random numbers in every pass of the update."""
    results: dict[str, list[dict[str, float]]] = {}
    for name, options in (("reinforce", {}), (MEASURED, {"every": 2})):
        learner = load(make_config, name, dropout=0.1, **options)
        torch.manual_seed(0)
        results[name] = [learner.update(items, version).metrics for version in (1, 2, 3)]
        (directory := tmp_path / name.partition(":")[0]).mkdir()
        learner.training.save(directory)
    for ours, theirs, is_measured in zip(results[MEASURED], results["reinforce"], (True, False, True), strict=True):
        assert ("gradient_variance" in ours) == is_measured
        assert all(ours[name] == value for name, value in theirs.items() if name not in ("seconds", "tokens_per_s"))
    for file in (tmp_path / "reinforce").iterdir():
        assert (directory / file.name).read_bytes() == file.read_bytes(), file.name


def test_batch_of_one_game_has_no_variance(make_config: Make, items: list[TrainItem]) -> None:
    learner = load(make_config)
    assert "gradient_variance" not in learner.update([items[0], items[-1]], 1).metrics
    assert learner.training.step == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 0}, "every = 0: must be at least 1"),
        ({"baseline": "rol"}, "'rol': must be one of none, batch, role, opponents$"),
        ({"baseline": "group"}, "'group': must be one of none, batch, role, opponents$"),
    ],
)
def test_wrong_options_are_refused(make_config: Make, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(make_config, **options)
