"""Weights of the policy's gradient and targets of the critic, for one update. `I` counts the items that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unstable_lite.learner.advantages import Floats, estimate_advantages, is_judged, policy_weights, value_metrics
from unstable_lite.learner.training import Training, Update
from unstable_lite.types import TrainItem


def weigh(training: Training, update: Update, items: Sequence[TrainItem]) -> tuple[list[TrainItem], Floats]:
    """Return the update's items with their advantages as rewards, and the critic's targets.

    All of `items` take part: a step that is too long to train on still passes later rewards on to earlier ones.
    """
    assert training.critic is not None
    config, kept = training.config, update.fitted.kept
    value_I = training.critic.estimate(items)
    advantage_I, target_I = estimate_advantages(items, value_I, config.gamma, config.gae_lambda)
    weight_I = policy_weights(items, advantage_I, config.gamma, config.normalize_adv, training.spread)
    is_judged_I = is_judged(items)[kept]
    value_I, weight_I, target_I = value_I[kept], weight_I[kept], target_I[kept]
    update.metrics |= value_metrics(value_I[is_judged_I], target_I[is_judged_I])
    update.advantages_of_critic = tuple(weight_I.tolist())
    weighed = [replace(item, reward=float(weight)) for item, weight in zip(update.items, weight_I, strict=True)]
    return weighed, target_I
