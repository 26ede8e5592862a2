"""Longest sequence that a model's positions support, read from its loaded config."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

NO_LIMIT = 1 << 62


def position_limit(config: Any) -> int:
    """Return the number of tokens of the longest sequence that the model rotates alike in any batch."""
    config = config.get_text_config()
    return min(getattr(config, "max_position_embeddings", None) or NO_LIMIT, longrope_limit(config))


def longrope_limit(config: Any) -> int:
    """Return the number of tokens that a LongRoPE model rotates by its short factors; NO_LIMIT for other models.

    Beyond it every token is rotated by the long factors, also earlier tokens: transformers decides for a whole pass by
    its longest row, vLLM for a whole run by its max_model_len. Engine and learner agree only within this limit.
    """
    config = config.get_text_config()
    table = getattr(config, "rope_parameters", None) or {}
    # Some models have a table for each kind of layer.
    ropes = [table, *(rope for rope in table.values() if isinstance(rope, dict))]
    limits = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(limits, default=NO_LIMIT)


def longest_sequence(wanted: int, config: Any) -> int:
    """Return `engine.max_model_len`, or less if the model's positions support less."""
    limit = position_limit(config)
    if wanted > limit == longrope_limit(config):
        log.warning(
            "engine.max_model_len = %d is reduced to %d: beyond it the model's LongRoPE rotates by other factors, "
            "and engines and learner would not switch at the same token",
            wanted,
            limit,
        )
    return min(wanted, limit)
