"""Load a stock causal language model of transformers, and check that this engine computes the same.

The check compares results, not names: the model runs unchanged, then through the engine's cache and attention, and is
refused if the two disagree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from unstable_lite.engines.embedded.kv_cache import CacheShape
from unstable_lite.errors import ModelError
from unstable_lite.models import model_errors
from unstable_lite.models.layers import ADVICE, check_layers, refusal
from unstable_lite.models.loading import EVENT, load_model

_PROBE = "unstable_lite_probe"

RunLogits = Callable[[list[int], list[list[int]], list[int], list[bool]], Tensor]


def load(path: str, dtype: str, device: torch.device, max_len: int, trust_remote_code: bool = False) -> Any:
    """Load a model for inference. Raises ModelError if it cannot be loaded, or not served up to `max_len` tokens."""
    with model_errors(path, EVENT, ADVICE):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        check_layers(path, config.to_dict(), max_len)
        chosen = choose_dtype(dtype, device, config.hidden_size)
    try:
        model = load_model(path, trust_remote_code, ADVICE, dtype=chosen, attn_implementation="sdpa")
        model = model.eval().requires_grad_(False).to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{path} does not fit the memory of {device}: {error}") from error
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{path}: {type(model).__name__} always computes the logits of all tokens; {ADVICE}")
    return model


def choose_dtype(dtype: str, device: torch.device, width: int) -> torch.dtype:
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # Measured on a Zen 4 core: narrow models are 15 % faster in float32 (the sums are short, the conversions are not),
    # at a width of 256 bfloat16 is 20 to 45 % faster; emulated, it is slower.
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cpu" and has_bfloat16 and width >= 256 else torch.float32


def measure_layers(model: Any, max_len: int) -> tuple[CacheShape, list[int]]:
    """Return the size of a token's keys and values in a layer, and each layer's window, found by running one token.

    The window of a layer that attends to all earlier tokens is `max_len`. Raises ModelError if layers differ in size,
    or if one attends to other tokens than the last ones, or with a soft cap.
    """
    sizes, windows = _run_one_token(model, max_len)
    num_layers = model.config.get_text_config().num_hidden_layers
    for layer in range(num_layers):
        if layer not in sizes:
            reason = "does not use transformers' attention interface"
        elif sizes[layer] != sizes[0]:
            reason = "has keys or values of another size than layer 0"
        elif not windows[layer]:
            reason = "attends to other tokens than the last ones, or with a soft cap"
        else:
            continue
        raise ModelError(refusal(model.name_or_path, f"layer {layer} {reason}"))
    num_heads, key_width, value_width = sizes[0]
    shape = CacheShape(
        num_layers=num_layers,
        num_heads=num_heads,
        key_width=key_width,
        value_width=value_width,
        dtype=model.dtype,
        device=model.device,
    )
    return shape, [windows[layer] for layer in range(num_layers)]


def _run_one_token(model: Any, max_len: int) -> tuple[dict[int, tuple[int, int, int]], dict[int, int]]:
    """Return (heads, key width, value width) and window, or 0, of each layer that uses the attention interface.

    The window is read from the mask, because some models have it nowhere else, and this engine makes its own masks.
    """
    sizes: dict[int, tuple[int, int, int]] = {}
    windows: dict[int, int] = {}

    def window_of(*_: Any, mask_function: Callable[..., Any], **__: Any) -> Tensor:
        """Return, instead of the mask of one token, the window of the last of `max_len` tokens; 0 if it has none."""
        first = torch.tensor(0, device=model.device)
        key_T = torch.arange(max_len, device=model.device)
        query_Q1 = key_T[-2:, None]  # to the last query alone, a chunk looks like a window
        sees_QT: Tensor = mask_function(first, first, query_Q1, key_T)
        window = sees_QT[-1].sum()
        is_window = sees_QT == (key_T <= query_Q1) & (key_T > query_Q1 - window)
        return (window * is_window.all()).view(1, 1, 1, 1)

    def look(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        sizes[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])
        if attention_mask is not None and attention_mask.dtype == torch.int64:
            window = int(attention_mask)
        else:  # the model makes its masks itself
            window = max_len if (kwargs.get("sliding_window") or max_len) >= max_len else 0
        windows[module.layer_idx] = window if kwargs.pop("softcap", None) is None else 0
        return sdpa_attention_forward(module, query, key, value, None, *args, **kwargs)

    transformers.AttentionInterface.register(_PROBE, look)
    transformers.AttentionMaskInterface.register(_PROBE, window_of)
    model.set_attn_implementation(_PROBE)
    _stock_logits(model, [0])
    return sizes, windows


@torch.inference_mode()
def check_same(model: Any, attention: str, run: RunLogits, num_slots: int) -> None:
    """Let `model` use `attention`; raise ModelError if the logits of `run` then differ by more than rounding.

    Two sequences run in one pass, one of them in pieces: a leak from one to the other, or a loss between the pieces,
    changes the logits. The slots must be empty.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    long, short = (((np.arange(size) * 7919 + 11 * size) % vocab_size).tolist() for size in (13, 6))
    model.set_attn_implementation("sdpa")
    expected_BV = torch.cat([_stock_logits(model, ids) for ids in (long, short)])
    model.set_attn_implementation(attention)
    run([0], [long[:5]], [0], [True])
    got = run([0, 1][:num_slots], [long[5:12], short][:num_slots], [0, 0][:num_slots], [True] * min(num_slots, 2))
    got = torch.cat([run([0], [long[12:]], [0], [True]), got[1:]])
    wanted = expected_BV[: len(got)]
    error = float((got - wanted).norm() / (wanted - wanted.mean(-1, keepdim=True)).norm())
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    if not error < tolerance:
        raise ModelError(
            f"{type(model).__name__}: the embedded engine's logits differ from the stock model's by {error:.2g} "
            f"({tolerance:g} is allowed): the model has parts that this engine does not support; {ADVICE}"
        )


@torch.inference_mode()
def _stock_logits(model: Any, ids: list[int]) -> Tensor:
    input_ids = torch.tensor([ids], device=model.device)
    logits: Tensor = model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[0].float()
    return logits
