"""Weights of steps and of their tokens, which reward transforms may set: their check, and their plain types."""

from __future__ import annotations

import math
from collections.abc import Sized
from numbers import Real

import numpy as np

from unstable_lite.types import Step


def weight_problem(weight: object, token_weights: object, completion: Sized) -> str | None:
    """Return the reason why these cannot be the weights of a step with this completion; None if they can."""
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        return f"the weight {weight!r:.99}; it must be a finite number of at least 0"
    if token_weights is None:
        return None
    try:
        given = np.asarray(token_weights, np.float32)
    except (TypeError, ValueError) as error:
        return f"token_weights that are not numbers: {error}"
    if given.shape != (len(completion),):
        return f"token_weights of shape {given.shape} for a completion of {len(completion)} tokens"
    if not (np.isfinite(given) & (given >= 0)).all():
        return "token_weights that are not all finite numbers of at least 0"
    return None


def make_plain(step: Step) -> None:
    """Give the step's weights the types that a message and a checkpoint hold."""
    step.weight = float(step.weight)
    if step.token_weights is not None:
        step.token_weights = np.asarray(step.token_weights, np.float32)
