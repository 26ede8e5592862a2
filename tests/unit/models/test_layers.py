"""Published forms of config.json, which differ from those that transformers saves, name layers without transformers."""

from __future__ import annotations

from typing import Any

import pytest

from unstable_lite.errors import ModelError
from unstable_lite.models.layers import check_layers


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            {"text_config": {"attention_chunk_size": 8192, "no_rope_layers": []}},
            r"M: layer 0 .* chunks of 8192 .*; lower engine\.max_model_len to 8192, .* engine\.kind = 'vllm'",
        ),
        ({"linear_num_value_heads": 32, "full_attention_interval": 4}, "layer 0 is recurrent"),
        (
            {"head_dim": 256, "global_head_dim": 512, "layer_types": ["sliding_attention", "full_attention"]},
            "layer 1 has keys of another size",
        ),
    ],
)
def test_layer_that_is_not_computed_is_named(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        check_layers("M", model, 16_384)


@pytest.mark.parametrize(
    "model",
    [
        {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
        {"text_config": {"sliding_window": 1024, "sliding_window_pattern": 6}},
        {"attention_chunk_size": 8192, "max_position_embeddings": 8192},
        {"mamba_d_state": 256, "layer_types": ["attention", "attention"]},  # a hybrid model without recurrent layers
        {"attn_logit_softcapping": None, "head_dim": 128},
    ],
)
def test_model_of_other_layers_is_not_refused(model: dict[str, Any]) -> None:
    check_layers("M", model, 16_384)
