"""How far a model's positions reach, told from its config by whoever has loaded one."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

NO_LIMIT = 1 << 62


def position_limit(config: Any) -> int:
    """Tokens of the longest sequence that the model knows positions for, and rotates alike in any company."""
    config = config.get_text_config()
    return min(getattr(config, "max_position_embeddings", None) or NO_LIMIT, longrope_limit(config))


def longrope_limit(config: Any) -> int:
    """Of a model with LongRoPE, the tokens that it rotates by its short factors; NO_LIMIT for any other.

    Past it every token is rotated by the long ones, earlier tokens too: transformers decides for a whole pass by its
    longest row, and vLLM for a whole run by its max_model_len. What engine and learner compute alike is what is within.
    """
    config = config.get_text_config()
    table = getattr(config, "rope_parameters", None) or {}
    # Some models have a table for each kind of layer.
    ropes = [table, *(rope for rope in table.values() if isinstance(rope, dict))]
    limits = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(limits, default=NO_LIMIT)


def longest_sequence(wanted: int, config: Any) -> int:
    """`engine.max_model_len`, or less where the model's positions do not reach so far."""
    limit = position_limit(config)
    if wanted > limit == longrope_limit(config):
        log.warning(
            "engine.max_model_len = %d is cut to %d: past it the model's LongRoPE rotates by other factors, and "
            "engines and learner would not do so at the same moment",
            wanted,
            limit,
        )
    return min(wanted, limit)
