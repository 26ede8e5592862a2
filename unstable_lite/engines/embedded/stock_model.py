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

_PROBE = "unstable_lite_probe"
_ADVICE = "take another model, or engine.kind = 'vllm'"

RunLogits = Callable[[list[int], list[list[int]], list[int], list[bool]], Tensor]


def load(path: str, dtype: str, device: torch.device, trust_remote_code: bool = False) -> Any:
    """Load a model for inference. Raises ModelError if it cannot be loaded."""
    try:
        trust = {"trust_remote_code": trust_remote_code}
        width = transformers.AutoConfig.from_pretrained(path, **trust).get_text_config().hidden_size
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=choose_dtype(dtype, device, width), attn_implementation="sdpa", use_safetensors=True, **trust
        )
        model = model.eval().requires_grad_(False).to(device)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        raise ModelError(f"{path} cannot be loaded as a causal language model: {error}\n({_ADVICE})") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{path} does not fit the memory of {device}: {error}") from error
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{path}: {type(model).__name__} always computes the logits of all tokens; {_ADVICE}")
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


def cache_shape(model: Any, max_len: int) -> CacheShape:
    """Return the size of a token's keys and values in all layers, measured by running one.

    Raises ModelError if layers differ, or if in one of them the last of `max_len` tokens cannot attend to the first,
    or does so with a soft cap. Some layers have their window in the mask alone, and this engine makes its own masks.
    """
    seen: dict[int, tuple[int, int, int]] = {}
    not_plain: list[int] = []

    def reach(*_: Any, mask_function: Callable[..., Any], **__: Any) -> Tensor:
        """Return, instead of the mask of one token, whether the last token would see the first."""
        at = torch.tensor(0, device=model.device)
        return torch.as_tensor(mask_function(at, at, at + max_len - 1, at)).view(1, 1, 1, 1)

    def look(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        seen[module.layer_idx] = (key.shape[1], key.shape[3], value.shape[3])
        window = kwargs.get("sliding_window")
        is_windowed = window is not None and window < max_len
        is_masked = mask is not None and mask.dtype == torch.bool and not mask.all()
        if is_windowed or is_masked or kwargs.get("softcap") is not None:
            not_plain.append(module.layer_idx)
        return sdpa_attention_forward(module, query, key, value, None, *args, **kwargs)

    transformers.AttentionInterface.register(_PROBE, look)
    transformers.AttentionMaskInterface.register(_PROBE, reach)
    model.set_attn_implementation(_PROBE)
    _stock_logits(model, [0])
    if not seen or sorted(seen) != list(range(len(seen))) or len(set(seen.values())) != 1:
        raise ModelError(
            f"{type(model).__name__}: not all its layers attend alike through transformers' attention "
            f"interface; {_ADVICE}"
        )
    if not_plain:
        raise ModelError(
            f"{type(model).__name__}: layer {not_plain[0]} attends within a sliding window or chunks of fewer than "
            f"{max_len} tokens, or with a soft cap, which the embedded engine does not compute; lower "
            f"engine.max_model_len to the window, {_ADVICE}"
        )
    num_heads, key_width, value_width = seen[0]
    return CacheShape(
        num_layers=len(seen),
        num_heads=num_heads,
        key_width=key_width,
        value_width=value_width,
        dtype=model.dtype,
        device=model.device,
    )


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
            f"({tolerance:g} is allowed): the model has parts that this engine does not support; {_ADVICE}"
        )


@torch.inference_mode()
def _stock_logits(model: Any, ids: list[int]) -> Tensor:
    input_ids = torch.tensor([ids], device=model.device)
    logits: Tensor = model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits[0].float()
    return logits
