"""Choose the layout of a model's micro-batches: a forest, if it computes one as it computes rows.

Results are compared, not names, because some models take a mask of their own instead, in silence.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.errors import ModelError
from unstable_lite.learner import distributed
from unstable_lite.learner.batching import Layout, make_micro_batches, unsampled
from unstable_lite.learner.forest import of_blocks
from unstable_lite.models import model_errors
from unstable_lite.models.layers import WINDOWS, no_forest
from unstable_lite.types import TokenIds, TrainItem

if TYPE_CHECKING:
    from unstable_lite.learner.model import Policy

SHORT = 8
"""Window of the comparison, and its queries of a block, so that few tokens are enough."""
GPU_ROOT = 300
"""Tokens of a prefix for which a GPU takes the kernel of long sequences."""


def choose(policy: Policy, config: Config) -> str | None:
    """Set the policy's layout to a forest if rows and forest agree; return a warning if that was expected in vain."""
    base, problem = policy.base.config, None
    if no_forest(base.to_dict(), config.trust_remote_code):
        return None
    longest = min(config.learner.max_train_len or config.engine.max_model_len, policy.position_limit)
    root = min(max(1, longest - 8), 20 if policy.device.type == "cpu" else GPU_ROOT)
    items = _two_trees(policy.vocab_size, root)
    with _short_windows(base.get_text_config()), of_blocks(SHORT):
        rows = _results(policy, items, "rows")
        try:
            with model_errors(config.model_name, "does not compute forests"):
                forest = _results(policy, items, "forest")
        except ModelError as error:
            problem = str(error)
        else:
            of_logp, of_gradient = (
                float((of_forest - of_rows).norm() / of_rows.norm())
                for of_forest, of_rows in zip(forest, rows, strict=True)
            )
            most = 0.1 if policy.dtype == torch.bfloat16 else 1e-3
            if not (of_logp < most and of_gradient < most):  # NaN does not agree
                problem = (
                    f"in a forest {config.model_name} has log-probabilities that differ by {of_logp:.2g} of their "
                    f"size, and gradients that differ by {of_gradient:.2g}"
                )
    agreeing = distributed.sum_metrics(np.array([float(problem is None)]))[0]
    if agreeing == distributed.num_ranks():  # ranks divide a batch by their layout
        policy.layout = "forest"
    return problem and f"the learner computes shared prefixes again for each step: {problem}"


@contextlib.contextmanager
def _short_windows(text: Any) -> Iterator[None]:
    """Shorten the windows of a model's layers in the body, because each pass makes its masks."""
    windows = {key: window for key in WINDOWS if (window := getattr(text, key, None))}
    try:
        for key, window in windows.items():
            setattr(text, key, min(window, SHORT))
        yield
    finally:
        for key, window in windows.items():
            setattr(text, key, window)


def _results(policy: Policy, items: Sequence[TrainItem], layout: Layout) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the items, about their mean, and the adapter's gradient of a weighted sum of them."""
    logp: list[Tensor] = [torch.empty(0)] * len(items)
    parameters = list(policy.parameters.values())
    gradient = torch.zeros(sum(parameter.numel() for parameter in parameters), device=policy.device)
    limit, device = policy.max_tokens_per_micro_batch, policy.device
    with policy.evaluating() if policy.has_dropout else contextlib.nullcontext():
        for batch in make_micro_batches(items, limit, None, device=device.type, layout=layout):
            logp_N, _ = policy.logprobs(batch.to(device))
            weight_N = torch.cos(batch.target_U[batch.index_N].to(device).float())
            of_batch = torch.autograd.grad(logp_N @ weight_N, parameters, allow_unused=True, materialize_grads=True)
            gradient += torch.cat([each.flatten() for each in of_batch])
            batch.scatter(logp_N.detach(), logp)
    whole_N = torch.cat(logp)
    return whole_N - whole_N.mean(), gradient


def _two_trees(vocab_size: int, root: int) -> list[TrainItem]:
    """Return the items of two trees of three levels. root: number of tokens with which those of the first begin."""
    numbers = itertools.count(11, 7919)

    def some(num: int) -> TokenIds:
        return np.array([next(numbers) % vocab_size for _ in range(num)], np.int32)

    items = []
    for beginning in (some(root), some(min(root, 5))):
        for branch in (some(2), some(3)):
            prompt = np.concatenate([beginning, branch])
            items += [unsampled(prompt, some(3)), unsampled(prompt, some(2))]
    return items
