"""Advantages and value targets from the rewards and values of whole trajectories.

Numbers in, numbers out, in float64: knows nothing of models, tokens or losses. `I` counts the steps of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unstable_lite.errors import RequestError
from unstable_lite.reward_transformations.spread import Spread, cell_of
from unstable_lite.types import StepContext, TrainItem

Floats = npt.NDArray[np.float64]

ROUNDING = 1e-6
"""Largest advantage that counts as 0, in the loss and in `zero_advantage` alike."""


def estimate_advantages(
    items: Sequence[TrainItem], value_I: Floats, gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Return advantages, by generalised advantage estimation over each player's turns, and the critic's targets.

    The value after a trajectory's last step is 0. If the turn cap ended the game, the trajectory ends before that step
    instead, and its value stands for the rest of the game; the step itself has advantage 0.
    Raises RequestError if the steps of a trajectory are not adjacent, because their returns would be wrong.
    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16; Pardo et al. 2018, arXiv:1712.00378 (turn cap).
    """
    advantage_I, is_judged_I = np.zeros(len(items)), is_judged(items)
    following, next_value, next_advantage = None, 0.0, 0.0
    seen: set[int] = set()
    for i in range(len(items) - 1, -1, -1):
        if items[i].trajectory != following:
            following, next_value, next_advantage = items[i].trajectory, 0.0, 0.0
            if following in seen:
                raise RequestError(f"item {i}: the steps of trajectory {following} are not adjacent")
            seen.add(following)
            if not is_judged_I[i]:
                next_value = value_I[i]
                continue
        surprise = items[i].reward + gamma * next_value - value_I[i]
        advantage_I[i] = surprise + gamma * gae_lambda * next_advantage
        next_value, next_advantage = value_I[i], advantage_I[i]
    return advantage_I, advantage_I + value_I


def is_judged(items: Sequence[TrainItem]) -> npt.NDArray[np.bool_]:
    """Return False for a trajectory's last step if the turn cap ended the game while its player could still move."""
    following = [*(item.trajectory for item in items[1:]), None]
    rows = zip(items, following, strict=True)
    return np.array([item.trajectory == after or not _is_capped(item.context) for item, after in rows], np.bool_)


def _is_capped(context: StepContext | None) -> bool:
    return context is not None and context.end == "truncated" and bool(context.opponents) and not context.is_out


def policy_weights(
    items: Sequence[TrainItem], advantage_I: Floats, gamma: float, is_normalized: bool, spread: Spread
) -> Floats:
    """Return the weight of each item in the policy gradient.

    An advantage is 0 if its cell's returns are all alike, because it would be the critic's error alone, and if
    `is_judged` is False. If `is_normalized` the others get mean 0 and standard deviation 1, or less if they vary far
    less than in earlier batches. `spread` remembers those and is updated.
    """
    return_I, _ = estimate_advantages(items, np.zeros(len(items)), gamma, 1.0)
    cells = [
        cell_of(item.context.env_id, item.context.pid, item.context) if item.context is not None else ""
        for item in items
    ]
    has_signal_I = spread.tells_apart(return_I, cells) & is_judged(items)
    weight_I = np.where(has_signal_I, advantage_I, 0.0)
    if is_normalized:
        weight_I[has_signal_I] = spread.standardized("", advantage_I[has_signal_I])
    return weight_I


def zero_share(advantages: Sequence[float] | Floats) -> float:
    """Return the share of steps whose advantage is 0 up to rounding; 0 without a step."""
    return float((np.abs(advantages) <= ROUNDING).mean()) if len(advantages) else 0.0


def value_metrics(value_I: Floats, target_I: Floats) -> dict[str, float]:
    """Return how well the critic predicted the returns before it learnt from them. Empty without a step.

    `value_dir_acc`: share of the `value_dir_n` targets other than 0 whose sign the value has.
    `explained_variance`: 1 is perfect, 0 no better than the mean; 0 also if all targets are equal.
    """
    if not len(value_I):
        return {}
    has_sign_I = target_I != 0
    num_signed = int(has_sign_I.sum())
    is_right_I = np.sign(value_I[has_sign_I]) == np.sign(target_I[has_sign_I])
    variance = float(target_I.var())
    return {
        "value_mae": float(np.abs(value_I - target_I).mean()),
        "value_dir_acc": float(is_right_I.mean()) if num_signed else 0.0,
        "value_dir_n": float(num_signed),
        "value_mean": float(value_I.mean()),
        "return_mean": float(target_I.mean()),
        "explained_variance": 1 - float((target_I - value_I).var()) / variance if variance else 0.0,
        "num_steps": float(len(value_I)),
    }
