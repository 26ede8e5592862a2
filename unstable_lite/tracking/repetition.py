"""Repetition of token ids within and between the completions of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from unstable_lite.types import Step

GRAM = 4
_BYTES = 4
"""Bytes per token id."""


def repetition(steps: Iterable[Step]) -> dict[str, float]:
    """Return shares between 0 and 1 and their denominators; a share is 0 if its denominator is 0.

    `repeated_4grams`: share of 4-grams that occurred earlier in the same completion (Welleck et al. 2020,
    arXiv:1908.04319: seq-rep-4, over all completions together). `identical_completions`: share of the most common
    completion.
    """
    completions = [step.generation.completion_ids.astype("<i4").tobytes() for step in steps]
    num_grams = num_distinct = 0
    for ids in completions:
        own = [ids[start : start + GRAM * _BYTES] for start in range(0, len(ids) - (GRAM - 1) * _BYTES, _BYTES)]
        num_grams += len(own)
        num_distinct += len(set(own))
    commonest = max(Counter(completions).values(), default=0)
    return {
        "repeated_4grams": (num_grams - num_distinct) / max(num_grams, 1),
        "num_4grams": num_grams,
        "identical_completions": commonest / max(len(completions), 1),
        "num_completions": len(completions),
    }
