"""The frozen base model: its type, its attention, the shards of several ranks, and a fresh LoRA adapter on it.

Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unstable_lite.config.training import LoraConfig, no_adapter_at
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.learner import distributed

ADAPTER = "default"
"""PEFT's name of the adapter that is trained."""


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type of the base. Raises ModelError for a GPU without bfloat16 that is to compute in it."""
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        # Measured on a Zen 4 core: training in bfloat16 is 1.6 times as fast as in float32; emulated, it is slower.
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if name == "auto":
        return torch.bfloat16 if has_bfloat16 else torch.float32
    if name == "bfloat16" and device.type == "cuda" and not has_bfloat16:
        raise ModelError(
            "learner.dtype = 'bfloat16': a GPU older than Ampere, like this one, only emulates it; leave it at 'auto', "
            "which takes float32 here"
        )
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def load_base(
    path: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> transformers.PreTrainedModel:
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        # Checkpointed layers are in training mode: with dropout the base would not be the one that sampled.
        for part in (config, config.get_text_config()):
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        # torch's attention silently omits the soft cap of attention logits (Gemma 2).
        is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        base = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager" if is_capped else None,
            # Straight to the GPU; PEFT would take a CPU in such a map for offloaded layers.
            device_map={"": device} if device.type == "cuda" else None,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: transformers cannot load it as a causal LM: {error}") from error
    if device.type == "cpu" and dtype == torch.bfloat16 and base.config._attn_implementation == "sdpa":
        base.set_attn_implementation(_FLOAT32_ATTENTION)
    return base.to(device)  # type: ignore[arg-type, no-any-return]


def use_liger(base: transformers.PreTrainedModel) -> None:
    """Compute norms, rotary embeddings and gated MLPs by liger-kernel's fused kernels.

    Raises ModelError if it has none for this model.
    """
    # This import takes seconds, and the package is optional.
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if base.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(
            f"learner.kernels = 'liger': liger-kernel has none for models of type {base.config.model_type!r}; set "
            "'torch'"
        )
    # The policy computes its own logits and losses.
    _apply_liger_kernel_to_instance(base, cross_entropy=False, fused_linear_cross_entropy=False)


class Whole(nn.Module):
    """Gather the base's embedding, last norm and head in the body."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)


def shard(base: transformers.PreTrainedModel, device: torch.device) -> Whole:
    """Shard every frozen weight over the ranks; a layer is whole only while it computes. Adapters stay whole.

    Moves the base layer by layer to the device, which need not have room for all of it.
    """
    # This import takes a second, which other learners do not need.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    adapter = {parameter for parameter in base.parameters() if parameter.requires_grad}
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (distributed.num_ranks(),)),
        "reshard_after_forward": True,
        "ignored_params": adapter,
    }
    for layer in base.get_decoder().layers:  # type: ignore[no-untyped-call]
        fully_shard(layer, **settings)
    whole = Whole(base)
    fully_shard(whole, **settings)
    for parameter in adapter:
        parameter.data = parameter.data.to(device)
    return whole


def straight(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


def _sdpa_in_float32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention in float32 on CPUs, where its backward pass in bfloat16 takes five times as long."""
    with torch.autocast(query.device.type, enabled=False):
        output, weights = sdpa_attention_forward(module, query.float(), key.float(), value.float(), *args, **kwargs)
    return output.to(query.dtype), weights


_FLOAT32_ATTENTION = "unstable_lite_sdpa_float32"
transformers.AttentionInterface.register(_FLOAT32_ATTENTION, _sdpa_in_float32)
transformers.AttentionMaskInterface.register(_FLOAT32_ATTENTION, sdpa_mask)


def add_lora(base: transformers.PreTrainedModel, lora: LoraConfig, path: str) -> peft.PeftModel:
    """Return `base` with a fresh adapter, which has no effect yet."""
    names = [name for name, module in base.named_modules() if getattr(module, "weight", None) is not None]
    ends: list[nn.Module] = [base.get_input_embeddings(), base.get_output_embeddings()]  # type: ignore[no-untyped-call]
    for target in lora.target_modules:
        if any(f".{name}".endswith(f".{target}") for name, module in base.named_modules() if module in ends):
            raise ConfigError(no_adapter_at(target))
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ModelError(
                f"lora.target_modules: no module of {type(base).__name__} is named {target!r}; it has {known}"
            )
    try:
        model = peft.get_peft_model(base, peft_config(lora, path), adapter_name=ADAPTER, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ModelError(f"lora: {error}") from error
    if moved := model.peft_config[ADAPTER].target_parameters:
        raise ConfigError(
            f"lora.target_modules: in {type(base).__name__} some of them are fused experts; PEFT would adapt "
            f"{', '.join(sorted(moved))} and leave the dense layers out, and engines cannot serve that. Name only "
            "the projections of attention: ['q_proj', 'k_proj', 'v_proj', 'o_proj']"
        )
    cast_by_autocast_alone(model)
    return model


def peft_config(lora: LoraConfig, path: str) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
    )


def cast_by_autocast_alone(model: peft.PeftModel) -> None:
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # PEFT's own cast to float32 would come on top
