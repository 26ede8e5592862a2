"""The algorithms by their formulas: one sequence at a time, the model's own logits, plain autograd.

Slow on purpose, and independent of the code under test. Computes in float64 if the learner does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstable_lite.types import TrainItem

TEMPERATURE, MAX_GENERATION_LEN, CAP = 0.7, 16, 2.0


def double(learner: Any) -> None:
    learner.policy.model.double()
    if learner.training.critic is not None:
        learner.training.critic.head.double()


def logprobs(learner: Any, item: TrainItem) -> Tensor:
    """Return the log-probabilities of the completion's tokens under the active adapter."""
    num_prompt = len(item.prompt_ids)
    tokens = torch.tensor(np.concatenate([item.prompt_ids, item.completion_ids]))[None].long()
    logits_TV = learner.policy.model(input_ids=tokens).logits[0] / TEMPERATURE
    rows = [torch.log_softmax(logits_TV[num_prompt + t - 1], -1)[x] for t, x in enumerate(item.completion_ids.tolist())]
    return torch.stack(rows)


def value(learner: Any, item: TrainItem) -> Tensor:
    """Return the critic's value of the prompt; leaves the critic's adapter active."""
    learner.policy.model.set_adapter("critic")
    tokens = torch.tensor(item.prompt_ids)[None].long()
    hidden_D = learner.policy.model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0, -1]
    return (learner.training.critic.head.weight[0] * hidden_D).sum() + learner.training.critic.head.bias[0]


def policy_loss(
    learner: Any, items: Sequence[TrainItem], advantages: Sequence[float], length: float = MAX_GENERATION_LEN
) -> Tensor:
    """Return the policy-gradient loss; `length` divides each step, by default by the largest length of a completion."""
    learner.policy.model.set_adapter("default")
    total = torch.zeros((), dtype=torch.float64)
    for item, advantage in zip(items, advantages, strict=True):
        for logp, behaviour in zip(logprobs(learner, item), item.logprobs.tolist(), strict=True):
            total = total - min(math.exp(logp.item() - behaviour), CAP) * advantage * logp
    return total / (length * len(items))


def clipped_loss(
    learner: Any,
    items: Sequence[TrainItem],
    advantages: Sequence[float],
    old_logprobs: Sequence[Tensor],
    clip_range: float,
    length: float = MAX_GENERATION_LEN,
) -> Tensor:
    learner.policy.model.set_adapter("default")
    total = torch.zeros((), dtype=torch.float64)
    for item, advantage, old in zip(items, advantages, old_logprobs, strict=True):
        for logp, old_logp, behaviour in zip(
            logprobs(learner, item), old.tolist(), item.logprobs.tolist(), strict=True
        ):
            ratio = torch.exp(logp - old_logp)
            is_past = (advantage > 0 and ratio > 1 + clip_range) or (advantage < 0 and ratio < 1 - clip_range)
            limit = 1 + clip_range if advantage > 0 else 1 - clip_range
            gained = limit * advantage if is_past else ratio * advantage
            total = total - min(math.exp(old_logp - behaviour), CAP) * gained
    return total / (length * len(items))


def kl_to_base(learner: Any, items: Sequence[TrainItem]) -> Tensor:
    """Return a scalar whose gradient is that of KL(policy ‖ base) at the sampled prefixes, by the score function."""
    learner.policy.model.set_adapter("default")
    total = torch.zeros((), dtype=torch.float64)
    for item in items:
        ours = logprobs(learner, item)
        with torch.no_grad(), learner.policy.model.disable_adapter():
            base = logprobs(learner, item)
        for logp, base_logp, behaviour in zip(ours, base.tolist(), item.logprobs.tolist(), strict=True):
            weight = min(math.exp(logp.item() - behaviour), CAP)
            total = total + weight * (logp.item() - base_logp) * logp
    return total / (MAX_GENERATION_LEN * len(items))


def value_loss(learner: Any, items: Sequence[TrainItem], targets: Sequence[float]) -> Tensor:
    errors = [value(learner, item) - target for item, target in zip(items, targets, strict=True)]
    return torch.stack([error**2 for error in errors]).mean() / 2


def returns(items: Sequence[TrainItem], values: Sequence[float], gamma: float, gae_lambda: float) -> list[float]:
    """Return the GAE advantages by definition: the discounted sum of all later TD errors in the trajectory."""
    advantages = []
    for i, item in enumerate(items):
        rest = [j for j in range(i, len(items)) if items[j].trajectory == item.trajectory]
        total = 0.0
        for j in rest:
            following = values[j + 1] if j + 1 in rest else 0.0
            td_error = items[j].reward + gamma * following - values[j]
            total += (gamma * gae_lambda) ** (j - i) * td_error
        advantages.append(total)
    return advantages


def mean_length(items: Sequence[TrainItem]) -> float:
    """Return the mean number of tokens in a completion."""
    return sum(len(item.completion_ids) for item in items) / len(items)


def z_scores(numbers: Sequence[float]) -> list[float]:
    mean = sum(numbers) / len(numbers)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    return [(x - mean) / deviation for x in numbers]


def gradient(loss: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients by name; call it while the adapter of the loss is active."""
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def grads_of(parameters: dict[str, Any]) -> dict[str, Tensor]:
    """Return copies of the gradients that an `add_gradient` has left."""
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def snapshot(learner: Any) -> dict[str, Tensor]:
    """Return everything that an update may change: parameters and optimizer states of policy and critic."""
    parts = [(learner.policy.parameters, learner.training.optimizer)]
    if learner.training.critic is not None:
        parts.append((learner.training.critic.parameters, learner.training.optimizer))
    state = {}
    for parameters, optimizer in parts:
        for name, parameter in parameters.items():
            state[name] = parameter.detach().clone()
            for key, tensor in optimizer.state.get(parameter, {}).items():
                state[f"{key}/{name}"] = tensor.clone()
    return state


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
