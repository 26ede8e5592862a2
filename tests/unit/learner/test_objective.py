"""Importance weights, clipping and regularisation as configured, compared with their formulas token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.unrolled import double, gradient, grads_of, is_equal, largest_difference, logprobs, snapshot
from unstable_lite.learner import schedules
from unstable_lite.learner.batching import pad
from unstable_lite.learner.old_policy import OldPolicy, proximal_policy
from unstable_lite.types import TrainItem

MakeLearner = Callable[..., Any]
MakeItems = Callable[..., list[TrainItem]]

CLIPPED = ["ppo", "grpo"]
AVERAGE = {"kl_coefficient": 0.5, "kl_reference": "average", "kl_average_decay": 0.75}


def close(items: list[TrainItem], learner: Any, spread: float) -> list[TrainItem]:
    """Return the items as sampled by a policy whose log-probabilities differ by about `spread` nats."""
    rng, scored = np.random.default_rng(8), learner.policy.score(items)
    noise = [rng.normal(0, spread, len(item.completion_ids)) + rng.normal(0, spread) for item in items]
    moved = [(each.adapter + shift).astype(np.float32) for each, shift in zip(scored, noise, strict=True)]
    rounded = [replace(item, reward=float(np.float32(item.reward))) for item in items]
    return [replace(item, logprobs=logp) for item, logp in zip(rounded, moved, strict=True)]


def importance(log_ratios: list[float], t: int, level: str, mode: str, cap: float) -> float:
    """Return the weight of token `t`."""
    ratio = math.exp(log_ratios[t])
    if level == "sequence":
        ratio = math.prod(math.exp(each) for each in log_ratios) ** (1 / len(log_ratios))
    return ratio if ratio <= cap else (cap if mode == "truncate" else 0.0)


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c"])
@pytest.mark.parametrize(
    ("level", "mode"), [("token", "truncate"), ("token", "mask"), ("sequence", "truncate"), ("sequence", "mask")]
)
def test_importance_weights_match_the_formula(
    make_learner: MakeLearner, make_items: MakeItems, algorithm: str, level: str, mode: str
) -> None:
    settings = {"importance_weight_level": level, "importance_weight_mode": mode, "importance_weight_cap": 1.2}
    learner = make_learner(algorithm, learner={"max_tokens_per_micro_batch": 60, **settings})
    double(learner)
    items = close(make_items(9), learner, spread=0.5)
    learner.add_gradient(items)
    ours, total, weights = grads_of(learner.policy.parameters), torch.zeros((), dtype=torch.float64), []
    for item in items:
        logps = logprobs(learner, item)
        log_ratios = [a - b for a, b in zip(logps.tolist(), item.logprobs.tolist(), strict=True)]
        for t, logp in enumerate(logps):
            weights.append(importance(log_ratios, t, level, mode, 1.2))
            total = total - weights[-1] * item.reward * logp
    assert 0.1 < np.mean([weight in (0.0, 1.2) for weight in weights]) < 0.9
    expected = gradient(total / (16 * len(items)), learner.policy.parameters)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-3
    assert largest_difference(ours, expected) < 1e-7


@pytest.mark.parametrize("algorithm", CLIPPED)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipped_ratio_matches_the_formula_of_clip_higher_and_of_gspo(
    make_learner: MakeLearner, make_items: MakeItems, algorithm: str, level: str
) -> None:
    """The gradient of GSPO is taken by its own formula, in which every token changes its sequence's ratio."""
    settings = {"clip_range": 0.1, "clip_range_high": 0.4, "importance_weight_level": level}
    learner = make_learner(algorithm, learner={"max_tokens_per_micro_batch": 60, **settings})
    double(learner)
    items, rng = close(make_items(16), learner, spread=0.5), np.random.default_rng(4)
    now = proximal_policy(learner.policy, items, learner.training.config)
    old = [logp + torch.tensor(rng.normal(0, 0.1, len(logp)) + rng.normal(0, 0.4)) for logp in now.logp]
    learner.add_gradient(items, OldPolicy(old, None, now.trained))
    ours, total = grads_of(learner.policy.parameters), torch.zeros((), dtype=torch.float64)
    kinds: set[bool] = set()
    for item, old_logps in zip(items, old, strict=True):
        logps, length = logprobs(learner, item), len(item.completion_ids)
        log_ratios = [a - b for a, b in zip(old_logps.tolist(), item.logprobs.tolist(), strict=True)]
        ratios = torch.exp(logps - old_logps)
        if level == "sequence":
            ratios = torch.exp((logps - old_logps).sum() / length).expand(length)
        for t in range(length):
            ratio, advantage = ratios[t], item.reward
            clipped = ratio.clamp(0.9, 1.4)
            kinds.add(bool(1.1 < ratio.item() < 1.4 and advantage > 0))
            weight = importance(log_ratios, t, level, "truncate", 2.0)
            total = total - weight * torch.minimum(ratio * advantage, clipped * advantage)
    assert kinds == {True, False}, "some ratio is allowed only by the higher limit"
    expected = gradient(total / (16 * len(items)), learner.policy.parameters)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-3
    assert largest_difference(ours, expected) < 1e-7


def test_token_of_weight_zero_has_no_gradient_at_the_level_of_sequences(
    make_learner: MakeLearner, make_items: MakeItems
) -> None:
    learner = make_learner("grpo", learner={"importance_weight_level": "sequence"})
    double(learner)
    (item,) = make_items(1, seed=2)
    mask = np.zeros(len(item.completion_ids), np.float32)
    mask[-1] = 1.0
    assert len(mask) > 1
    items = close([replace(item, token_weights=mask)], learner, spread=0.1)
    now = proximal_policy(learner.policy, items, learner.training.config)
    learner.add_gradient(items, now)
    log_ratios = (now.logp[0] - torch.from_numpy(items[0].logprobs)).tolist()
    weight = importance(log_ratios, 0, "sequence", "truncate", 2.0)
    ours = grads_of(learner.policy.parameters)
    loss = -weight * items[0].reward * logprobs(learner, items[0])[-1] / 16
    assert largest_difference(ours, gradient(loss, learner.policy.parameters)) < 1e-7


def test_sequence_mean_is_that_of_the_tokens_own_completion(make_items: MakeItems) -> None:
    items = make_items(5)
    batch = pad(items)
    means = batch.sequence_mean(batch.behaviour_logp_N.double())
    expected = [item.logprobs.astype(np.float64).mean() for item in items for _ in item.completion_ids]
    assert means.tolist() == pytest.approx(expected)


# the entropy's target


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_entropy_coefficient_rises_below_the_target_and_falls_above(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path, algorithm: str
) -> None:
    for target, factor in ((5.7, math.exp(0.1)), (0.001, math.exp(-0.1))):
        settings = {"entropy_coefficient": 0.01, "entropy_target": target}
        learner = make_learner(algorithm, learner=settings)
        used = [learner.update(make_items(6), version).metrics for version in (1, 2)]
        assert used[0]["entropy_coefficient"] == 0.01
        expected = 0.01 * math.exp(0.1 * max(-1.0, (target - used[0]["entropy"]) / target))
        assert used[1]["entropy_coefficient"] == pytest.approx(expected)
        assert (expected > 0.01) == (factor > 1)
        directory = tmp_path / str(target)
        directory.mkdir()
        learner.training.save(directory)
        resumed = make_learner(algorithm, has_signal=False, learner=settings)
        resumed.training.load(directory)
        states = []
        for each in (learner, resumed):
            torch.manual_seed(1)
            each.update(make_items(6, seed=3), 3)
            states.append(snapshot(each) | {"": torch.tensor(each.training.entropy_coefficient)})
        assert is_equal(*states)


def test_adapted_coefficient_is_the_one_of_the_loss(make_learner: MakeLearner, make_items: MakeItems) -> None:
    adapted = make_learner(learner={"entropy_coefficient": 0.2, "entropy_target": 1.0})
    adapted.training.entropy_coefficient = 0.7
    constant = make_learner(learner={"entropy_coefficient": 0.7})
    items = make_items(5)
    for each in (adapted, constant):
        each.add_gradient(items)
    assert is_equal(*(grads_of(each.policy.parameters) for each in (adapted, constant)))


def test_skipped_update_keeps_the_entropy_coefficient(make_learner: MakeLearner, make_items: MakeItems) -> None:
    learner = make_learner(learner={"entropy_coefficient": 0.01, "entropy_target": 5.0})
    assert learner.update([replace(item, reward=math.nan) for item in make_items(3)], 1).skipped is not None
    assert learner.training.entropy_coefficient == 0.01


def test_entropy_coefficient_stays_within_a_factor_of_its_start() -> None:
    coefficient = 0.01
    for _ in range(200):
        coefficient = schedules.adapted(coefficient, entropy=0.0, start=0.01, target=1.0)
    assert coefficient == pytest.approx(1.0)
    for _ in range(200):
        coefficient = schedules.adapted(coefficient, entropy=9.0, start=0.01, target=1.0)
    assert coefficient == pytest.approx(0.0001)
    assert schedules.adapted(0.02, entropy=1.0, start=0.01, target=1.0) == 0.02


# the moving average of the adapter


def averages(learner: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.model.named_parameters() if ".average." in name}


def perturb(learner: Any, seed: int) -> None:
    """Move the policy, so that it differs from the average."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.policy.parameters.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo", "grpo"])
def test_kl_to_the_average_matches_the_formula(
    make_learner: MakeLearner, make_items: MakeItems, algorithm: str
) -> None:
    learner = make_learner(algorithm, learner=AVERAGE)
    learner.policy.follow(decay=0.0)
    perturb(learner, 1)
    double(learner)
    items = [replace(item, reward=0.0) for item in make_items(6)]
    if algorithm in CLIPPED:
        learner.add_gradient(items, proximal_policy(learner.policy, items, learner.training.config))
    else:
        learner.add_gradient(items)
    ours, total = grads_of(learner.policy.parameters), torch.zeros((), dtype=torch.float64)
    for item in items:
        logps = logprobs(learner, item)
        with torch.no_grad(), learner.policy.using("average"):
            reference = logprobs(learner, item).tolist()
        for logp, reference_logp, behaviour in zip(logps, reference, item.logprobs.tolist(), strict=True):
            weight = min(math.exp(logp.item() - behaviour), 2.0)
            total = total + 0.5 * weight * (logp.item() - reference_logp) * logp
    expected = gradient(total / (16 * len(items)), learner.policy.parameters)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-4
    assert largest_difference(ours, expected) < 1e-7


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_average_follows_the_adapter_once_per_update_and_resumes_bit_for_bit(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path, algorithm: str
) -> None:
    learner, resumed = (make_learner(algorithm, has_signal=False, learner=AVERAGE) for _ in range(2))
    expected = averages(learner)
    adapter = {name.replace(".default.", ".average."): p for name, p in learner.policy.parameters.items()}
    assert is_equal(expected, adapter)
    for version in (1, 2, 3):
        metrics = learner.update(make_items(6, seed=version, turns=2), version).metrics
        assert "kl_to_average" in metrics
        assert {"kl_to_base", "kl_to_initial"}.isdisjoint(metrics)
        expected = {name: 0.75 * average + 0.25 * adapter[name] for name, average in expected.items()}
        assert largest_difference(averages(learner), expected) < 1e-6
        assert not is_equal(averages(learner), adapter)
    learner.training.save(tmp_path)
    resumed.training.load(tmp_path)
    states = []
    for each in (learner, resumed):
        torch.manual_seed(5)
        assert each.update(make_items(6, seed=9, turns=2), 4).metrics["kl_to_average"] > 0
        states.append(snapshot(each) | averages(each))
    assert is_equal(*states)
    before = averages(learner)
    assert learner.update([replace(item, reward=math.nan) for item in make_items(3)], 5).skipped is not None
    assert is_equal(before, averages(learner))


def test_average_is_made_only_for_its_penalty(make_learner: MakeLearner, tmp_path: Path) -> None:
    for settings in ({}, {"kl_reference": "average"}, {"kl_coefficient": 0.1}):
        learner = make_learner(learner=settings)
        learner.training.save(tmp_path)
        assert not averages(learner)
        assert not (tmp_path / "average").exists()


# the learning rate and the moments


def test_warmup_comes_before_each_schedule() -> None:
    def rates(schedule: str, warmup: int) -> list[float]:
        return [schedules.factor(schedule, step, 8, warmup) for step in range(9)]

    assert rates("constant", 0) == [1.0] * 9
    assert rates("constant", 3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 6)
    assert rates("linear", 0) == [1 - step / 8 for step in range(9)]
    assert rates("linear", 4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates("cosine", 4) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, *((1 + math.cos(math.pi * part / 4)) / 2 for part in range(5))]
    )
    assert schedules.factor("cosine", 20, 8, 4) == 0.0


def test_learning_rates_of_policy_and_critic_warm_up_together(make_learner: MakeLearner, make_items: MakeItems) -> None:
    settings = {"learning_rate": 8e-3, "critic_learning_rate": 4e-3, "learning_rate_warmup": 1}
    learner = make_learner("a2c", learner=settings)
    for version, factor in ((1, 0.5), (2, 1.0), (3, 1.0)):
        metrics = learner.update(make_items(4, turns=2), version).metrics
        assert (metrics["lr"], metrics["critic_lr"]) == pytest.approx((8e-3 * factor, 4e-3 * factor))
        assert [group["lr"] for group in learner.training.optimizer.param_groups] == [8e-3 * factor, 4e-3 * factor]


def test_adam_uses_the_configured_betas(make_learner: MakeLearner, make_items: MakeItems) -> None:
    learner = make_learner(learner={"adam_betas": [0.5, 0.75], "gradient_clipping": 1e9})
    learner.update(make_items(4), 1)
    items = make_items(4, seed=1)
    first = {name: dict(learner.training.optimizer.state[p]) for name, p in learner.policy.parameters.items()}
    moments = {name: (each["exp_avg"].clone(), each["exp_avg_sq"].clone()) for name, each in first.items()}
    learner.add_gradient(items)
    grads = grads_of(learner.policy.parameters)
    learner.training.optimizer.zero_grad()
    learner.update(items, 2)
    for name, parameter in learner.policy.parameters.items():
        state, (mean, square) = learner.training.optimizer.state[parameter], moments[name]
        assert torch.allclose(state["exp_avg"], 0.5 * mean + 0.5 * grads[name], atol=1e-7)
        assert torch.allclose(state["exp_avg_sq"], 0.75 * square + 0.25 * grads[name] ** 2, atol=1e-9)


def test_keys_that_a_resume_adds_or_changes_take_effect(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    learner = make_learner(learner={"entropy_coefficient": 0.3})
    learner.update(make_items(4), 1)
    learner.training.save(tmp_path)
    for settings, coefficient in (
        ({"entropy_coefficient": 0.1}, 0.1),
        ({"entropy_coefficient": 0.2, "entropy_target": 1.0} | AVERAGE, 0.2),
    ):
        resumed = make_learner(learner=settings)
        resumed.training.load(tmp_path)
        assert resumed.training.entropy_coefficient == coefficient
        adapter = {name.replace(".default.", ".average."): p for name, p in resumed.policy.parameters.items()}
        assert all(torch.equal(average, adapter[name]) for name, average in averages(resumed).items())
    assert averages(resumed)
