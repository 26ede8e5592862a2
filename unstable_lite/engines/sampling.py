"""Draw one token per row, and return its log-probability.

The randomness of a row is a function of its seed and of the number of tokens it has drawn; other rows do not change it.
Knows no requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperature below which the most probable token is taken, with its probability at temperature 1, as in vLLM."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample(
    logits_BV: Tensor, temperature_B: npt.NDArray[Any], top_p_B: npt.NDArray[Any], uniform_B: npt.NDArray[Any]
) -> tuple[list[int], list[float]]:
    """Return token ids and their log-probabilities after temperature and top_p. Overwrites `logits_BV`."""
    device = logits_BV.device
    is_greedy_B = temperature_B < GREEDY_BELOW
    temperature = torch.from_numpy(np.where(is_greedy_B, 1.0, temperature_B).astype(np.float32)).to(device)
    scaled_BV = logits_BV.float().div_(temperature[:, None])
    top_p_B = np.where(is_greedy_B, 1.0, top_p_B).astype(np.float32)
    if (top_p_B < 1).any():
        scaled_BV = _keep_top_p(scaled_BV, torch.from_numpy(top_p_B).to(device))
    prob_BV = scaled_BV.softmax(-1)
    id_B1 = draw(prob_BV, prob_BV.cumsum(-1), torch.from_numpy(uniform_B).to(device)[:, None])
    if is_greedy_B.any():
        greedy_B1 = torch.from_numpy(is_greedy_B).to(device)[:, None]
        id_B1 = torch.where(greedy_B1, scaled_BV.argmax(-1, keepdim=True), id_B1)
    return id_B1[:, 0].tolist(), prob_BV.gather(-1, id_B1)[:, 0].log().tolist()


def draw(prob_BV: Tensor, cumulative_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds u × total, and never one of weight 0."""
    target_B1 = uniform_B1 * cumulative_BV[:, -1:]
    id_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True).clamp_(max=prob_BV.shape[-1] - 1)
    if (prob_BV.gather(-1, id_B1) > 0).all():
        return id_B1
    # A GPU adds in parallel, so a sum may differ from the previous one although 0 was added.
    at_V = torch.arange(prob_BV.shape[-1], device=prob_BV.device)
    return torch.where((prob_BV > 0) & (at_V <= id_B1), at_V, 0).amax(-1, keepdim=True)


def _keep_top_p(scaled_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Set all but the smallest set of most probable tokens whose probabilities reach `top_p` to -inf."""
    ascending_BV, order_BV = scaled_BV.sort(-1)
    is_cut_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p_B[:, None]
    is_cut_BV[:, -1] = False
    return scaled_BV.masked_fill(torch.zeros_like(is_cut_BV).scatter_(-1, order_BV, is_cut_BV), -torch.inf)


def uniforms(seed_B: npt.NDArray[np.uint64], count_B: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return one number in [0, 1) for the `count`-th draw of each stream, exact in float32."""
    bits = _mix(_mix(seed_B) + count_B * _GOLDEN)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash with SplitMix64, so that neighbouring numbers give unrelated bits."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
