"""Weights of steps and tokens: their factor in every algorithm's loss, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.unrolled import double, gradient, grads_of, is_equal, largest_difference, logprobs, snapshot
from unstable_lite.errors import RequestError
from unstable_lite.learner.batching import pad
from unstable_lite.learner.old_policy import OldPolicy, proximal_policy
from unstable_lite.types import TrainItem

MakeLearner = Callable[..., Any]
MakeItems = Callable[..., list[TrainItem]]

ALGORITHMS = ["reinforce", "a2c", "ppo", "grpo"]
REGULARISED = {"entropy_coefficient": 0.3, "kl_coefficient": 0.5}


def add_gradient(learner: Any, items: list[TrainItem], moved_by: float = 0.0) -> None:
    """Leave the gradient of one step; a clipped one starts from a policy that differs by `moved_by` nats."""
    if type(learner).__name__ in ("PPOLearner", "GRPOLearner"):
        now = proximal_policy(learner.policy, items, learner.training.config)
        old = OldPolicy([logp - moved_by for logp in now.logp], now.reference_logp, now.trained)
        learner.add_gradient(items, old)
    else:
        learner.add_gradient(items)


def weighted(items: list[TrainItem]) -> list[TrainItem]:
    """Give the items weights of all kinds: of the step, of its tokens, both, 0, and none."""
    rng = np.random.default_rng(5)
    of_tokens = [rng.uniform(0, 2, len(item.completion_ids)).astype(np.float32) for item in items]
    of_tokens[1][0] = 0.0
    weighted = [replace(item, weight=float(rng.uniform(0, 3))) for item in items]
    weighted = [replace(item, token_weights=each) for item, each in zip(weighted, of_tokens, strict=True)]
    weighted[2] = replace(items[2], weight=0.0)
    weighted[3] = items[3]
    return weighted


def formula(learner: Any, items: list[TrainItem], is_clipped: bool, moved_by: float) -> torch.Tensor:
    """Return the loss token by token: each token's weight times all of its terms."""
    policy, total = learner.policy, torch.zeros((), dtype=torch.float64)
    for item in items:
        tokens = torch.tensor(np.concatenate([item.prompt_ids, item.completion_ids]))[None].long()
        start = len(item.prompt_ids) - 1
        logp_CV = torch.log_softmax(policy.model(input_ids=tokens).logits[0] / 0.7, -1)[start:-1]
        with torch.no_grad(), policy.model.disable_adapter():
            base = logprobs(learner, item).tolist()
        for t, token in enumerate(item.completion_ids.tolist()):
            weight = item.weight * (1.0 if item.token_weights is None else float(item.token_weights[t]))
            logp, advantage = logp_CV[t, token], float(np.float32(item.reward))
            now = logp.item()
            old = now - moved_by if is_clipped else now
            importance = min(math.exp(old - float(item.logprobs[t])), 2.0)
            if is_clipped:
                ratio = torch.exp(logp - old)
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            else:
                gain = advantage * logp
            entropy = -(logp_CV[t].exp() * logp_CV[t]).sum()
            kl = min(math.exp(now - float(item.logprobs[t])), 2.0) * (now - base[t]) * logp
            total = total + weight * (-importance * gain - 0.3 * entropy + 0.5 * kl)
    return total / (16 * len(items))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weight_multiplies_every_term_of_a_tokens_loss(
    make_learner: MakeLearner, make_items: MakeItems, algorithm: str
) -> None:
    learner = make_learner(algorithm, learner={"max_tokens_per_micro_batch": 60, **REGULARISED})
    double(learner)
    items, is_clipped = weighted(make_items(7)), algorithm in ("ppo", "grpo")
    add_gradient(learner, items, moved_by=0.1)
    ours = grads_of(learner.policy.parameters)
    expected = gradient(formula(learner, items, is_clipped, 0.1), learner.policy.parameters)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-2
    assert largest_difference(ours, expected) < 1e-7


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_of_one_change_no_bit(make_learner: MakeLearner, make_items: MakeItems, algorithm: str) -> None:
    plain, ones = (make_learner(algorithm, learner=REGULARISED) for _ in range(2))
    items = make_items(6, turns=2)
    with_ones = [replace(x, weight=1.0, token_weights=np.ones(len(x.completion_ids), np.float32)) for x in items]
    torch.manual_seed(3)
    first = plain.update(items, 1).metrics
    torch.manual_seed(3)
    second = ones.update(with_ones, 1).metrics
    assert is_equal(snapshot(plain), snapshot(ones))
    assert {**first, "seconds": 0, "tokens_per_s": 0} == {**second, "seconds": 0, "tokens_per_s": 0}
    assert (first["weight_mean"], first["weight_zero"]) == (1.0, 0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weight_zero_has_no_gradient_but_the_critic_still_learns(
    make_learner: MakeLearner, make_items: MakeItems, algorithm: str
) -> None:
    learner = make_learner(algorithm, learner=REGULARISED)
    before = snapshot(learner)
    result = learner.update([replace(item, weight=0.0) for item in make_items(6, turns=2)], 1)
    after = snapshot(learner)
    assert result.skipped is None
    assert result.metrics["policy_grad_norm"] == 0.0
    assert (result.metrics["weight_mean"], result.metrics["weight_zero"]) == (0.0, 1.0)
    of_policy = set(learner.policy.parameters)
    assert all(torch.equal(before[name], after[name]) for name in of_policy)
    if learner.training.critic is not None:
        assert not is_equal(before, after)


def test_critic_does_not_depend_on_weights(make_learner: MakeLearner, make_items: MakeItems) -> None:
    plain, other = (make_learner("a2c") for _ in range(2))
    items = make_items(6, turns=2)
    plain.update(items, 1)
    other.update(weighted(items), 1)
    critics = plain.training.critic.parameters, other.training.critic.parameters
    assert largest_difference(*critics) == 0.0
    assert largest_difference(plain.policy.parameters, other.policy.parameters) > 0.0


def test_padded_tokens_keep_their_own_weights(make_items: MakeItems) -> None:
    items = weighted(make_items(5))
    expected = [
        np.float32(item.weight * (1.0 if item.token_weights is None else item.token_weights[t]))
        for item in items
        for t in range(len(item.completion_ids))
    ]
    assert pad(items).weight_N.tolist() == pytest.approx(expected)
    assert pad(items).weight_N.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": -1.0}, "weight -1.0"),
        ({"weight": math.nan}, "weight nan"),
        ({"weight": math.inf}, "weight inf"),
        ({"token_weights": np.ones(99, np.float32)}, r"\(99,\) for a completion of"),
        ({"token_weights": np.float32([-1.0])}, "token_weights"),
    ],
)
def test_learner_refuses_bad_weights_by_item(
    make_learner: MakeLearner, make_items: MakeItems, change: dict[str, Any], says: str
) -> None:
    items = make_items(3)
    item = replace(items[1], completion_ids=items[1].completion_ids[:1], logprobs=items[1].logprobs[:1])
    with pytest.raises(RequestError, match=f"item 1 has .*{says}"):
        make_learner().update([items[0], replace(item, **change)], 1)
