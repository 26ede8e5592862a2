"""The frozen base model: type, attention, head, and a fresh LoRA adapter on it.

Knows nothing of training, batches or losses. `K` counts the tokens of a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import peft
import torch
import transformers
from torch import Tensor, nn

from unstable_lite.config import Config
from unstable_lite.config.training import LoraConfig, no_adapter_at
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.learner import forest
from unstable_lite.models import model_errors, resolve_model
from unstable_lite.models.layers import no_forest
from unstable_lite.models.loading import EVENT, load_model, text_part

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
    with model_errors(path, EVENT):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        # Checkpointed layers are in training mode: with dropout the base would not be the one that sampled.
        for part in (config, config.get_text_config()):
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        # torch's attention silently omits the soft cap of attention logits (Gemma 2).
        is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        base = load_model(
            path,
            trust_remote_code,
            config=config,
            dtype=dtype,
            attn_implementation="eager" if is_capped else None,
            # Straight to the GPU; PEFT would take a CPU in such a map for offloaded layers.
            device_map={"": device} if device.type == "cuda" else None,
        )
    is_emulated = device.type == "cpu" and dtype == torch.bfloat16
    if is_emulated or not no_forest(base.config.to_dict(), trust_remote_code):
        forest.attend(base)
    return base.to(device)  # type: ignore[no-any-return]


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


def add_lora(base: transformers.PreTrainedModel, lora: LoraConfig, path: str) -> peft.PeftModel:
    """Return `base` with a fresh adapter below its text decoder, which has no effect yet."""
    part = text_part(base)
    modules = [(name, module) for name, module in base.named_modules() if name.startswith(part)]
    names = [name for name, module in modules if getattr(module, "weight", None) is not None]
    ends: list[nn.Module] = [base.get_input_embeddings(), base.get_output_embeddings()]  # type: ignore[no-untyped-call]
    for target in lora.target_modules:
        if any(f".{name}".endswith(f".{target}") for name, module in base.named_modules() if module in ends):
            raise ConfigError(no_adapter_at(target))
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ModelError(
                f"lora.target_modules: no module of {type(base).__name__}'s text decoder is named {target!r}; it has "
                f"{known}"
            )
    try:
        config = peft_config(lora, path, _outside(base, part, lora.target_modules))
        model = peft.get_peft_model(base, config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
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


def _outside(base: nn.Module, part: str, targets: Iterable[str]) -> str | None:
    """Return a pattern of all modules outside the text decoder if one is a target, such as a vision tower's."""
    others = [f".{name}" for name, _ in base.named_modules() if not name.startswith(part)]
    is_target = any(name.endswith(tuple(f".{target}" for target in targets)) for name in others)
    return rf"(?!{re.escape(part)}).*" if is_target else None


def peft_config(lora: LoraConfig, path: str, outside: str | None) -> peft.LoraConfig:
    """Return PEFT's config of an adapter. `outside`: pattern of the modules that it must leave out."""
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
        exclude_modules=outside,
    )


def cast_by_autocast_alone(model: peft.PeftModel) -> None:
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # PEFT's own cast to float32 would come on top


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random streams."""
    of_cuda = {"rng.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"rng.cpu": torch.get_rng_state(), **of_cuda}


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the states that `random_states` returned, perhaps for another device."""
    torch.set_rng_state(states["rng.cpu"])
    if "rng.cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["rng.cuda"], device)


def load(config: Config, dtype: torch.dtype, device: torch.device) -> peft.PeftModel:
    """Load the base; return it with a fresh adapter."""
    torch.manual_seed(config.run.seed)
    path = resolve_model(config.model_name)
    base = load_base(path, dtype, device, config.trust_remote_code)
    if config.learner.kernels == "liger":
        use_liger(base)
    model = add_lora(base, config.lora, path)
    if config.learner.activation_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    return model


def add_adapter(model: peft.PeftModel, name: str, lora: LoraConfig) -> None:
    """Add a fresh adapter, which is not active."""
    first = model.peft_config[ADAPTER]
    model.add_adapter(name, peft_config(lora, first.base_model_name_or_path, first.exclude_modules))
    cast_by_autocast_alone(model)


class Head:
    """Log-probabilities and entropies of tokens from the decoder's output, chunk by chunk."""

    def __init__(
        self, base: transformers.PreTrainedModel, temperature: float, chunk_tokens: int, has_bonus: bool
    ) -> None:
        """chunk_tokens: number of tokens whose logits exist at once. has_bonus: whether entropies have a gradient."""
        self._base = base
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens
        self._has_bonus = has_bonus

    def logprobs(self, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the targets; only one chunk of logits is in memory at a time."""
        chunks = zip(*(torch.split(given, self._chunk_tokens) for given in (hidden_ND, target_N)), strict=True)
        logps, entropies = zip(*(self._token_logprobs(*chunk) for chunk in chunks), strict=True)
        return torch.cat(logps), torch.cat(entropies)

    def most_likely(self, hidden_ND: Tensor) -> Tensor:
        """Return the token that greedy decoding would choose at each position."""
        chunks = torch.split(hidden_ND, self._chunk_tokens)
        return torch.cat([self.logits(hidden_KD).argmax(-1) for hidden_KD in chunks])

    def logits(self, hidden_KD: Tensor) -> Tensor:
        """Return the logits of the model's head, with its scale and soft cap, in float32 or more."""
        logits_KV: Tensor = self._base.get_output_embeddings()(hidden_KD)  # type: ignore[no-untyped-call]
        logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
        config = self._base.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits_KV = logits_KV * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite
            logits_KV = logits_KV / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits_KV = torch.tanh(logits_KV / cap) * cap
        return logits_KV

    def _token_logprobs(self, hidden_KD: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one chunk's logits once, together with the gradient with respect to the hidden state.

        A token's log-probability depends on its own row only, so every loss needs only this gradient, scaled. Autograd
        covers only the head: through the softmax it would take twice the time and twice the memory.
        """
        leaf_KD = hidden_KD.detach().requires_grad_(hidden_KD.requires_grad)
        logits_KV = self.logits(leaf_KD)
        with torch.no_grad():
            shifted_KV = logits_KV.detach().div_(self._temperature)
            shifted_KV -= shifted_KV.amax(-1, keepdim=True)
            weight_KV = shifted_KV.exp()
            total_K = weight_KV.sum(-1)
            logp_K = shifted_KV.gather(-1, target_K[:, None]).squeeze(-1) - total_K.log()
            product_KV = shifted_KV.mul_(weight_KV)
            entropy_K = total_K.log() - product_KV.sum(-1) / total_K
        if logits_KV.requires_grad:
            # Adds 0, and connects the gradient to the hidden state.
            distance_KD = (hidden_KD - leaf_KD.detach()).to(logp_K.dtype)
            if self._has_bonus:
                # −d entropy / d logits = p (log p + entropy) / temperature, with p = weight / total.
                product_KV.addcmul_(weight_KV, (entropy_K - total_K.log())[:, None])
                (slope_KD,) = torch.autograd.grad(logits_KV, leaf_KD, product_KV, retain_graph=True)
                entropy_K = entropy_K - (distance_KD * slope_KD).sum(-1) / (total_K * self._temperature)
            # −d log p(target) / d logits = (weight / total − one-hot) / temperature; values of a whole row come last.
            weight_KV.scatter_add_(-1, target_K[:, None], -total_K[:, None])
            (slope_KD,) = torch.autograd.grad(logits_KV, leaf_KD, weight_KV)
            logp_K = logp_K - (distance_KD * slope_KD).sum(-1) / (total_K * self._temperature)
        return logp_K, entropy_K
