"""The algorithms by their formulas: one sequence at a time, the model's own logits, plain autograd.

Slow on purpose, and independent of the code under test. Computes in float64 if the learner does.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstable_lite.types import TrainItem

TEMPERATURE, MAX_GENERATION_LEN = 0.7, 16


def double(learner: Any) -> None:
    learner.policy.model.double()
    if learner.training.critic is not None:
        learner.training.critic.head.double()


def logprobs(learner: Any, item: TrainItem) -> Tensor:
    """Return the log-probabilities of the completion's tokens under the active adapter."""
    return torch.stack([row_V[x] for row_V, x in zip(_rows(learner, item), item.completion_ids.tolist(), strict=True)])


def _rows(learner: Any, item: TrainItem) -> list[Tensor]:
    """Return the log-probabilities of all tokens at each of the completion's places."""
    num_prompt = len(item.prompt_ids)
    tokens = torch.tensor(np.concatenate([item.prompt_ids, item.completion_ids]))[None].long()
    logits_TV = learner.policy.model(input_ids=tokens).logits[0] / TEMPERATURE
    return [torch.log_softmax(logits_TV[num_prompt + t - 1], -1) for t in range(len(item.completion_ids))]


def value(learner: Any, item: TrainItem) -> Tensor:
    """Return the critic's value of the prompt; leaves the critic's adapter active."""
    learner.policy.model.set_adapter("critic")
    tokens = torch.tensor(item.prompt_ids)[None].long()
    hidden_D = learner.policy.model(input_ids=tokens, output_hidden_states=True).hidden_states[-1][0, -1]
    return (learner.training.critic.head.weight[0] * hidden_D).sum() + learner.training.critic.head.bias[0]


def policy_loss(
    learner: Any,
    items: Sequence[TrainItem],
    advantages: Sequence[float],
    old: Sequence[Tensor] | None = None,
    length: float = MAX_GENERATION_LEN,
    factor: float = 1.0,
) -> Tensor:
    """Return the policy's loss as the learner's config says, token by token.

    old: log-probabilities at the start of a clipped update. length: divisor of each step, by default the largest length
    of a completion. factor: of the coefficients, by their schedule. The KL term is a scalar whose gradient is that of
    the KL at the sampled prefixes (score function).
    """
    config, total = learner.training.config, torch.zeros((), dtype=torch.float64)
    bonus, penalty = config.entropy_coefficient * factor, config.kl_coefficient * factor
    learner.policy.model.set_adapter("default")
    for index, (item, advantage) in enumerate(zip(items, advantages, strict=True)):
        rows, behaviour = _rows(learner, item), item.logprobs.tolist()
        logps = torch.stack([row_V[x] for row_V, x in zip(rows, item.completion_ids.tolist(), strict=True)])
        now = logps.tolist()
        start = now if old is None else old[index].tolist()
        reference = _reference_logprobs(learner, item) if config.kl_coefficient else now
        gains = advantage * logps if old is None else _clipped(logps, old[index], advantage, item, config)
        bonuses = [-(row_V.exp() * row_V).sum() if bonus else 0.0 for row_V in rows]
        weights = np.ones(len(now)) if item.token_weights is None else item.token_weights
        for t, weight in enumerate(weights.tolist()):
            kl = importance(now, behaviour, t, config) * (now[t] - reference[t]) * logps[t]
            gained = importance(start, behaviour, t, config) * gains[t] + bonus * bonuses[t]
            total = total - item.weight * weight * (gained - penalty * kl)
    return total / (length * len(items))


def importance(logps: Sequence[float], behaviour: Sequence[float], t: int, config: Any) -> float:
    ratios = [math.exp(a - b) for a, b in zip(logps, behaviour, strict=True)]
    ratio = ratios[t]
    if config.importance_weight_level == "sequence":
        ratio = math.prod(ratios) ** (1 / len(ratios))
    cap = config.importance_weight_cap
    return ratio if ratio <= cap else (cap if config.importance_weight_mode == "truncate" else 0.0)


def _clipped(logps: Tensor, old: Tensor, advantage: float, item: TrainItem, config: Any) -> list[Tensor]:
    """Return the clipped gain of each token.

    At the level of sequences every token changes its sequence's ratio (GSPO), or only its own gradient if the tokens
    have weights (GSPO-token).
    """
    ratios = torch.exp(logps - old)
    if config.importance_weight_level == "sequence":
        of_sequence = torch.exp((logps - old).mean()).expand(len(logps))
        ratios = of_sequence if item.token_weights is None else of_sequence.detach() * torch.exp(logps - logps.detach())
    high = config.clip_range if config.clip_range_high is None else config.clip_range_high
    gains = []
    for ratio in ratios:
        is_past = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - config.clip_range)
        limit = 1 + high if advantage > 0 else 1 - config.clip_range
        gains.append(torch.tensor(limit * advantage) if is_past else ratio * advantage)
    return gains


@torch.no_grad()
def _reference_logprobs(learner: Any, item: TrainItem) -> list[float]:
    """Return the log-probabilities under the reference of the KL penalty."""
    name = learner.policy.kl_metric.removeprefix("kl_to_")
    with learner.policy.model.disable_adapter() if name == "base" else learner.policy.using(name):
        found: list[float] = logprobs(learner, item).tolist()
    return found


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
