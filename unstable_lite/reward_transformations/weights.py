"""Weights of steps and of their tokens, which reward transforms may set: their check, and their plain types."""

from __future__ import annotations

import math
from collections.abc import Sized
from numbers import Real

import numpy as np

from unstable_lite.types import Step, Weights


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


def plain_weights(step: Step) -> tuple[float, Weights | None]:
    """Return the weights of a step and of its tokens in the types that a message and a checkpoint hold."""
    of_tokens = step.token_weights
    return float(step.weight), None if of_tokens is None else np.asarray(of_tokens, np.float32)
