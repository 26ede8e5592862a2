"""How much a batch's completions repeat themselves, and each other. Of token ids, as they were sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from unstable_lite.types import Step

GRAM = 4
_BYTES = 4
"""Of one token id."""


def repetition(steps: Iterable[Step]) -> dict[str, float]:
    """Shares between 0 and 1, and what they are of; 0 of nothing.

    `repeated_4grams`: of all 4-grams, those that stood in the same completion before (Welleck et al. 2020,
    arXiv:1908.04319: seq-rep-4, over all completions together). `identical_completions`: of all completions, those
    that are the commonest one.
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
