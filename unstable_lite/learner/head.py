"""Head of a language model: log-probabilities and entropies of tokens from the decoder's output, chunk by chunk.

Knows nothing of adapters, batches or losses. `K` counts the tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Head:
    def __init__(self, base: PreTrainedModel, temperature: float, chunk_tokens: int, has_bonus: bool) -> None:
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
