"""Numbers that change from update to update: the learning rate's factor, and the coefficient of the entropy bonus.

Knows nothing of optimisers or losses.
"""

from __future__ import annotations

import math

RATE = 0.1
"""Logarithm of the largest change of the entropy coefficient after one update."""
RANGE = 100.0
"""Largest factor between the entropy coefficient and its start."""


def factor(schedule: str, step: int, num_steps: int, warmup: int) -> float:
    """Return the factor of the learning rate after `step` of `num_steps` updates.

    It rises by equal amounts in the first `warmup` updates, is 1 in the next one, and then follows the schedule, which
    would reach 0 after `num_steps`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(num_steps - warmup, 1))
    if schedule == "linear":
        return 1 - progress
    return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1.0


def adapted(coefficient: float, entropy: float, start: float, target: float) -> float:
    """Return the next coefficient: larger if the entropy is below its target, smaller if it is above.

    Its logarithm changes by `RATE` times the relative error, which counts as 1 at most.
    """
    error = max(-1.0, min(1.0, (target - entropy) / target))
    return max(start / RANGE, min(start * RANGE, coefficient * math.exp(RATE * error)))
