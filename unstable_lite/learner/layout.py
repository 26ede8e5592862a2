"""Choose the layout of a model's micro-batches: a forest, if it computes one as it computes rows.

Results are compared, not names, because some models take a mask of their own instead, in silence.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.errors import ModelError
from unstable_lite.learner.batching import Layout, make_micro_batches, unsampled
from unstable_lite.models import model_errors
from unstable_lite.models.layers import WINDOWS, no_forest
from unstable_lite.types import TokenIds, TrainItem

if TYPE_CHECKING:
    from unstable_lite.learner.model import Policy


def choose(policy: Policy, config: Config) -> str | None:
    """Set the policy's layout to a forest if rows and forest agree; return a warning if that was expected in vain.

    With dropout the layout stays "separate".
    """
    base = policy.base_config
    if policy.layout == "separate" or no_forest(base.to_dict()):
        return None
    longest = min(config.learner.max_train_len or config.engine.max_model_len, policy.position_limit)
    windows = [getattr(base.get_text_config(), key, None) or 0 for key in WINDOWS]
    items = _two_trees(policy.vocab_size, longest, windows)
    rows = _results(policy, items, "rows")
    try:
        with model_errors(config.model_name, "does not compute forests"):
            forest = _results(policy, items, "forest")
    except ModelError as error:
        return f"the learner computes shared prefixes again for each step: {error}"
    # The gradient of a small matrix is compared with its own size, but not with rounding.
    floor = 1e-3 * max(float(of_rows.norm()) for of_rows in rows[1:])
    errors = [
        float((of_forest - of_rows).norm()) / max(float(of_rows.norm()), floor)
        for of_forest, of_rows in zip(forest, rows, strict=True)
    ]
    of_logp, of_gradient = errors[0], max(errors[1:])
    if max(of_logp, of_gradient) < (0.1 if policy.dtype == torch.bfloat16 else 1e-3):
        policy.layout = "forest"
        return None
    return (
        f"the learner computes shared prefixes again for each step: in a forest {config.model_name} has "
        f"log-probabilities that differ by {of_logp:.2g} of their size, and gradients that differ by {of_gradient:.2g}"
    )


def _results(policy: Policy, items: Sequence[TrainItem], layout: Layout) -> list[Tensor]:
    """Return log-probabilities of the items, about their mean, and the adapter's gradient of a sum of them."""
    logp: list[Tensor] = [torch.empty(0)] * len(items)
    with policy.evaluating():
        for batch in make_micro_batches(items, sys.maxsize, None, device=policy.device.type, layout=layout):
            batch.scatter(policy.logprobs(batch.to(policy.device))[0], logp)
    logp_N = torch.cat(logp)
    weight_N = torch.linspace(-1, 2, len(logp_N), device=policy.device)
    gradients = torch.autograd.grad(logp_N @ weight_N, list(policy.parameters.values()), allow_unused=True)
    return [(logp_N - logp_N.mean()).detach(), *(each for each in gradients if each is not None)]


def _two_trees(vocab_size: int, longest: int, windows: Sequence[int]) -> list[TrainItem]:
    """Return the items of two trees of three levels, one of them with paths longer than each window that is in reach.

    longest: most tokens of a sequence. A window beyond it never hides a token.
    """
    reach = max([window for window in windows if window + 4 < longest], default=0) + 4
    numbers = itertools.count(11, 7919)

    def some(num: int) -> TokenIds:
        return np.array([next(numbers) % vocab_size for _ in range(num)], np.int32)

    items = []
    for root in (some(max(1, min(longest - 8, reach))), some(5)):
        for branch in (some(2), some(3)):
            prompt = np.concatenate([root, branch])
            items += [unsampled(prompt, some(3)), unsampled(prompt, some(2))]
    return items
