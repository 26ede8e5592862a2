"""The policy: a frozen base, a LoRA adapter in float32, and log-probabilities of completion tokens.

Owns loading, precision, checkpointing and the language model head. Knows nothing of rewards, losses, optimisers or
text. Works with any stock causal LM of transformers; one whose head it does not reproduce is refused at load.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unstable_lite.config import Config, LoraConfig
from unstable_lite.errors import ModelError
from unstable_lite.learners import adapter_files, batching
from unstable_lite.models import resolve_model
from unstable_lite.types import Logprobs, TokenIds, TrainItem

_ADAPTER = "default"


class Policy:
    """π: what the learner trains and scores with. The base never changes; the adapter is never merged into it."""

    def __init__(self, config: Config, device: str) -> None:
        torch.manual_seed(config.run.seed)
        self.device = torch.device(device)
        self.dtype = _choose_dtype(config.learner.dtype, self.device)
        self._temperature = config.engine.temperature
        self._chunk_tokens = config.learner.logits_chunk_tokens
        self._use_cache = config.learner.use_trainer_cache
        path = resolve_model(config.model_name)
        self._base = _load_base(path, self.dtype).to(self.device)
        self.num_base_parameters = sum(parameter.numel() for parameter in self._base.parameters())
        self.model = _add_lora(self._base, config.lora, path)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        if config.lora.initial_lora_path is not None:
            self.load_adapter(config.lora.initial_lora_path)
        if config.learner.gradient_checkpointing or config.learner.activation_checkpointing:
            self._base.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.eval()
        self._check_head()
        # transformers checkpoints only in training mode, and loads in evaluation mode.
        self.model.train()

    @property
    def vocab_size(self) -> int:
        return int(self._base.get_input_embeddings().weight.shape[0])

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self._base.config.get_text_config(), "max_position_embeddings", None)

    def logprobs(self, batch: batching.MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability of each trained token, and the entropy (without gradient) of what it was drawn from."""
        with self._autocast():
            hidden_ND = self._hidden(batch.tokens_BT).flatten(0, 1)[batch.source_N]
            logps, entropies = [], []
            for hidden_KD, target_K in zip(
                hidden_ND.split(self._chunk_tokens), batch.target_N.split(self._chunk_tokens), strict=True
            ):
                # Recomputed in the backward pass: one chunk's logits exist at a time, not the batch's.
                logp_K, entropy_K = checkpoint(self._token_logprobs, hidden_KD, target_K, use_reentrant=False)
                logps.append(logp_K)
                entropies.append(entropy_K)
        return torch.cat(logps), torch.cat(entropies)

    @torch.no_grad()
    def score(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> tuple[Logprobs, Logprobs]:
        """Log-probabilities of given completion tokens under the adapter, and under the base alone."""
        unused = np.zeros(len(completion_ids), np.float32)
        item = TrainItem(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=unused,
            advantage=0.0,
            adapter_version=0,
        )
        batching.check([item], self.vocab_size)
        batch = batching.pad([item]).to(self.device)
        self.model.eval()
        try:
            adapter_logp_N, _ = self.logprobs(batch)
            with self.model.disable_adapter():
                base_logp_N, _ = self.logprobs(batch)
        finally:
            self.model.train()
        return adapter_logp_N.float().cpu().numpy(), base_logp_N.float().cpu().numpy()

    def adapter_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and config as PEFT saves them: names without the adapter's, float32, plain lists."""
        # save_embedding_layers="auto" would ask the hub whether the vocabulary was resized.
        state = peft.get_peft_model_state_dict(self.model, adapter_name=_ADAPTER, save_embedding_layers=False)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        config = self.model.peft_config[_ADAPTER].to_dict() | {"inference_mode": True}
        return tensors, {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}

    def load_adapter(self, directory: Path) -> None:
        """Go on from a PEFT directory. Raises ModelError if it is not of this run's rank, targets and scale."""
        tensors, stored = adapter_files.read(directory)
        own_tensors, own = self.adapter_state()
        for key in ("r", "lora_alpha", "target_modules", "bias", "use_rslora", "use_dora", "rank_pattern"):
            theirs, ours = _comparable(stored.get(key)), _comparable(own.get(key))
            if theirs != ours:
                raise ModelError(f"{directory}: {key} is {theirs}, but this run's adapter has {ours}; set [lora] alike")
        theirs, ours = _shapes(tensors), _shapes(own_tensors)
        if theirs != ours:
            example = min(theirs.items() ^ ours.items())
            raise ModelError(f"{directory} does not fit the base: {example[0]} {example[1]} is on one side only")
        peft.set_peft_model_state_dict(self.model, tensors, adapter_name=_ADAPTER)

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        decoder = self._base.get_decoder()
        return decoder(input_ids=tokens_BT, use_cache=self._use_cache).last_hidden_state  # type: ignore[no-any-return]

    def _logits(self, hidden_KD: Tensor) -> Tensor:
        """The model's own head: projection, scale, soft cap; at least float32."""
        logits_KV = self._base.get_output_embeddings()(hidden_KD)
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
        logits_KV = self._logits(hidden_KD) / self._temperature
        normaliser_K = logits_KV.logsumexp(-1)
        logp_K = logits_KV.gather(-1, target_K[:, None]).squeeze(-1) - normaliser_K
        with torch.no_grad():
            probability_KV = (logits_KV - normaliser_K[:, None]).exp_()
            entropy_K = normaliser_K - probability_KV.mul_(logits_KV).sum(-1)
        return logp_K, entropy_K

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bfloat16 base: the float32 adapter is multiplied in bfloat16, as engines do, and keeps float32 gradients."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Our logits must be the model's own: an architecture with another head would train in silence on wrong ones."""
        tokens_BT = torch.arange(8, device=self.device)[None] % self.vocab_size
        with self._autocast():
            theirs = self._base(input_ids=tokens_BT).logits.float()
            ours = self._logits(self._hidden(tokens_BT)).float()
        # bfloat16 models round once more than we do.
        tolerance = (0.02 if self.dtype == torch.bfloat16 else 1e-4) * theirs.abs().max().item()
        if not torch.allclose(ours, theirs, rtol=0, atol=tolerance):
            raise ModelError(
                f"{type(self._base).__name__}: the learner does not reproduce this architecture's logits "
                f"(off by {(ours - theirs).abs().max().item():.3g}); it would train on wrong probabilities"
            )


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _load_base(path: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        # Training mode serves checkpointing alone: with dropout the base would be another distribution than the one
        # that was sampled from.
        for part in (config, config.get_text_config()):
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        return transformers.AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: transformers cannot load it as a causal language model: {error}") from error


def _comparable(value: Any) -> Any:
    """PEFT writes one thing in many ways: sets and lists in any order, nothing as None, false or {}."""
    return sorted(value) if isinstance(value, (set, list, tuple)) else value or None


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _add_lora(base: transformers.PreTrainedModel, lora: LoraConfig, path: str) -> peft.PeftModel:
    """`base` with a fresh adapter, which changes nothing yet."""
    leaves = {name.rpartition(".")[2]: module for name, module in base.named_modules() if not list(module.children())}
    has_weight = sorted(name for name, module in leaves.items() if getattr(module, "weight", None) is not None)
    for target in lora.target_modules:
        if not any(f".{name}".endswith(f".{target}") for name, _ in base.named_modules()):
            raise ModelError(
                f"lora.target_modules: no module of {type(base).__name__} is called {target!r}; it has {', '.join(has_weight)}"
            )
    peft_config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
    )
    try:
        model = peft.get_peft_model(base, peft_config, adapter_name=_ADAPTER, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ModelError(f"lora: {error}") from error
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # autocast decides; a cast to float32 and back is lost time
    return model
