"""Merge an adapter into its base, and check that the result answers as base and adapter do.

The one module of this package that loads torch. Works on the CPU in float32: four bytes for each parameter.
"""

from __future__ import annotations

from pathlib import Path

import peft
import torch
import transformers
from torch import Tensor

from unstable_lite.adapters.frozen import FrozenAdapter
from unstable_lite.adapters.peft_files import read_adapter
from unstable_lite.errors import ModelError
from unstable_lite.models import model_errors, resolve_model
from unstable_lite.models.loading import EVENT, load_model

EXACT = 1e-3
"""Largest difference of a log-probability between base with adapter and the merged model, both in float32."""
PROBE = "You play a game. Think it through step by step first. Then write the move you choose inside \\boxed{}."


def write_merged(adapter: FrozenAdapter, model_name: str, trust_remote_code: bool, directory: Path) -> float:
    """Write the merged model, with its tokenizer, in the base's own type; return the largest |Δ log p| by rounding.

    Raises ModelError if the base cannot be loaded, does not fit the adapter, or does not keep its answers.
    """
    path = resolve_model(model_name)
    advice = "download it, or push the adapter without --merge"
    with model_errors(model_name, EVENT, advice):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    base = load_model(path, trust_remote_code, advice, dtype=torch.float32)
    adapted = _adapted(base, adapter, model_name).eval()
    ids_BT = torch.tensor([tokenizer.encode(PROBE)])
    expected = _logprobs(adapted, ids_BT)
    merged = adapted.merge_and_unload()
    if not (gap := float((_logprobs(merged, ids_BT) - expected).abs().max())) <= EXACT:
        raise ModelError(
            f"{adapter.path}: merged into {model_name}, a log-probability differs by {gap:.2g} not at most {EXACT:g}; "
            "push the adapter without --merge"
        )
    merged.to(config.dtype or torch.float32)
    rounded = _logprobs(merged, ids_BT)
    merged.config._name_or_path = ""  # else the base's place on this machine
    merged.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return float((rounded - expected).abs().max())


def _adapted(base: transformers.PreTrainedModel, adapter: FrozenAdapter, model_name: str) -> peft.PeftModel:
    tensors, stored, _ = read_adapter(adapter.path)
    scale = {"r": adapter.rank, "lora_alpha": stored["lora_alpha"], "use_rslora": bool(stored.get("use_rslora"))}
    try:
        model = peft.PeftModel(base, peft.LoraConfig(**scale, target_modules=sorted(adapter.sizes)))
        unknown = peft.set_peft_model_state_dict(model, tensors).unexpected_keys
        if unknown:
            raise ValueError(f"it has no {unknown[0]}")
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{adapter.path} does not fit the base {model_name}: {error}") from error
    return model


@torch.inference_mode()
def _logprobs(model: torch.nn.Module, ids_BT: Tensor) -> Tensor:
    logits_BTV: Tensor = model(input_ids=ids_BT).logits
    return logits_BTV.float().log_softmax(-1)
