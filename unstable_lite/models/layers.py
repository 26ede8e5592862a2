"""Layers that the embedded engine does not compute, and the longest sequence that a model's positions support.

Both are read from its config. Loads neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from unstable_lite.errors import ModelError

log = logging.getLogger(__name__)

ADVICE = "take another model, or engine.kind = 'vllm'"

LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
"""Keys with the type of each layer, or of the first ones if they repeat."""
OTHER_TYPES = frozenset(
    {
        *("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"),
        *("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse"),
        *("compressed_sparse_attention", "heavily_compressed_attention", "reference_sliding_attention"),
    }
)
"""Types of layers that keep anything else than a key and a value of each token."""
RECURRENT_KEYS = ("state_size", "ssm_state_size", "mamba_d_state", "linear_num_value_heads")
"""Keys of models whose first layer is recurrent if they list no types."""
INDEXED = ("gpt_neo", "openai-gpt", "bloom", "mpt")
"""Types of models that hide or weigh tokens by their index, and not by their position."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Keys with the number of tokens to which layers of some type attend."""
NO_LIMIT = 1 << 62


def check_layers(path: str, model: Mapping[str, Any], max_len: int) -> None:
    """Raise ModelError if the embedded engine does not compute a layer in sequences of `max_len` tokens.

    `model`: content of the config.json in `path`, or transformers' config, which has defaults for missing keys.
    """
    text = model.get("text_config") or model
    for layer, remedy in _unsupported(text, min(max_len, text.get("max_position_embeddings") or max_len)):
        raise ModelError(refusal(path, layer, remedy))


def refusal(path: str, layer: str, remedy: str = "") -> str:
    """Return the message to a person. `layer`: its number, and its property that is not supported."""
    return f"{path}: {layer}, which the embedded engine does not compute; {remedy}{ADVICE}"


def no_forest(model: Mapping[str, Any], has_own_code: bool) -> str:
    """Return why a learner computes each sequence by itself, and not a forest of their prefixes; "" if it does not.

    `model`: content of config.json. has_own_code: whether code of the model's directory may run. A learner also
    compares forest and sequences when it starts, but of few tokens.
    """
    text = model.get("text_config") or model
    if model.get("auto_map") and has_own_code:
        return "its code comes with the model"
    if text.get("alibi") or text.get("attn_temperature_tuning") or text.get("model_type") in INDEXED:
        return "its attention depends on the index of a token"
    if text.get("index_topk"):
        return "its attention chooses the tokens that it sees"
    return next((layer for layer, _ in _recurrent(text)), "")


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    return next((text[key] for key in LAYER_LISTS if text.get(key)), [])


def _recurrent(text: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each layer in which a token depends on others than by attention, and no remedy."""
    types = _layer_types(text)
    for index, kind in enumerate(types):
        if kind in OTHER_TYPES:
            yield f"layer {index} is of type {kind!r}", ""
    if not types and (keys := [key for key in RECURRENT_KEYS if text.get(key)]):
        yield f"layer 0 is recurrent ({keys[0]} = {text[keys[0]]})", ""


def _unsupported(text: Mapping[str, Any], max_len: int) -> Iterator[tuple[str, str]]:
    """Yield number and property of each layer that is not supported, and the remedy that it alone has."""
    yield from _recurrent(text)
    types = _layer_types(text)
    if (chunk := text.get("attention_chunk_size") or max_len) < max_len:
        # Llama 4 attends within chunks in the layers that rotate.
        is_chunked = [kind == "chunked_attention" for kind in types] or text.get("no_rope_layers") or [True]
        for index in (index for index, is_one in enumerate(is_chunked) if is_one):
            yield f"layer {index} attends within chunks of {chunk} tokens", f"lower engine.max_model_len to {chunk}, "
    if (cap := text.get("attn_logit_softcapping")) is not None:
        yield f"layer 0 limits its attention logits by a soft cap of {cap:g}", ""
    if text.get("model_type") == "gpt_oss":
        yield "layer 0 attends to sinks", ""
    others = dict(text.get("per_layer_config") or {})
    if (head_dim := text.get("global_head_dim")) and "full_attention" in types:
        others[types.index("full_attention")] = {"head_dim": head_dim}
    for index, layer in others.items():
        if any(layer.get(key, text.get(key)) != text.get(key) for key in ("head_dim", "num_key_value_heads")):
            yield f"layer {int(index)} has keys of another size than others", ""


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
