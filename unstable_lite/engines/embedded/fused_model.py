"""Small models in few operations, because half of a pass of milliseconds is spent between its operations.

This is the decoder of Llama and Qwen: queries, keys and values are one product, gate and up another, and after its
attention the last layer computes only the needed tokens. Every adapter version has its own weights that include its
low-rank terms: one product instead of three. Models with another structure, or other results (the engine compares), run
unchanged (`lora.LoraModel`).

Shapes: `N` tokens of the pass, `B` of them needed, `I` inputs and `O` outputs of a product, `H` heads, `D` head
width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstable_lite.engines.adapter_slots import BASE
from unstable_lite.engines.embedded.attention import CachedAttention
from unstable_lite.engines.lora import Group, check_fits, checksum, read_adapter

LARGEST_BYTES = 16 << 20
"""Largest size of a base, because each adapter version is a copy."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUT = "self_attn.o_proj"
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = "mlp.down_proj"
_QK_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
_PROJECTIONS = {*_QKV, _OUT, *_GATE_UP, _DOWN}
_PARTS = _PROJECTIONS | {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "mlp.act_fn"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}


def fuse(model: Any, attention: CachedAttention, max_len: int) -> FusedModel | None:
    """Return a fused model; None unless it is small, in float32, on the CPU, and of the known structure.

    16 bits would round the added adapter terms.
    """
    is_small = sum(parameter.nbytes for parameter in model.parameters()) <= LARGEST_BYTES
    if not (is_small and model.dtype == torch.float32 and model.device.type == "cpu"):
        return None
    if {name for name, _ in getattr(model, "model", model).named_children()} != _DECODER:
        return None
    rotated = 2 * len(model.model.rotary_emb.inv_freq)
    if not all(_is_known(layer) and layer.self_attn.head_dim == rotated for layer in model.model.layers):
        return None
    return FusedModel(model, attention, max_len)


def _is_known(layer: Any) -> bool:
    parts = {name: part for name, part in layer.named_modules() if name}
    if parts.keys() - _QK_NORMS != _PARTS:
        return False
    width = layer.self_attn.head_dim
    norms = [part for name, part in parts.items() if name.endswith("norm")]
    return (
        all(hasattr(norm, "variance_epsilon") for norm in norms)
        and all(parts[name].weight.shape == (width,) for name in parts.keys() & _QK_NORMS)
        and all(getattr(parts[name], "bias", None) is None for name in (_OUT, *_GATE_UP, _DOWN))
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one layer's products, for one adapter version."""

    qkv_IO: Tensor
    out_IO: Tensor
    gate_up_IO: Tensor
    down_IO: Tensor


class FusedModel:
    """Model with every loaded adapter version, with the interface of `lora.LoraModel`."""

    def __init__(self, model: Any, attention: CachedAttention, max_len: int) -> None:
        self._model = model
        self._attention = attention
        self._layers = [FusedLayer(*one, attention) for one in enumerate(model.model.layers)]
        self._embedding_VI: Tensor = model.get_input_embeddings().weight
        self._head_IV: Tensor = model.get_output_embeddings().weight.t()
        self._norm = RMSNorm(model.model.norm)
        self._weights: dict[int, list[Weights]] = {BASE: self._weights_with({})}
        cos_1TD, sin_1TD = model.model.rotary_emb(self._embedding_VI, torch.arange(max_len)[None])
        self._cos_T1D = cos_1TD[0, :, None]
        first_TD, second_TD = sin_1TD[0].chunk(2, -1)
        self._sin_T1D = torch.cat((-first_TD, second_TD), -1)[:, None]

    def __call__(self, id_N: Tensor, position_N: Tensor, groups: Sequence[Group], last_B: Tensor) -> Tensor:
        """Return the logits after tokens `last_B`, B × V."""
        hidden_NI = self._embedding_VI[id_N]
        cos_N1D, sin_N1D = self._cos_T1D[position_N], self._sin_T1D[position_N]
        sizes = [group.stop - group.start for group in groups]
        for index, layer in enumerate(self._layers):
            is_last = layer is self._layers[-1]
            weights = [self._weights[group.version][index] for group in groups]
            attended_NI = layer.attend(hidden_NI, cos_N1D, sin_N1D, weights, sizes, is_last)
            if is_last and len(last_B) < len(hidden_NI):
                if not len(last_B):
                    return hidden_NI.new_empty(0, self._head_IV.shape[1])
                hidden_NI = hidden_NI.index_select(0, last_B)
                sizes = np.diff(np.searchsorted(last_B.numpy(), [0, *(group.stop for group in groups)])).tolist()
            layer.add(hidden_NI, attended_NI, weights, sizes)
        return self._norm(hidden_NI) @ self._head_IV

    def load(self, version: int, directory: Path, max_rank: int) -> str:
        """Load an adapter and return its digest.

        Raises AdapterError unless it is a LoRA adapter of this base; the model is then as before.
        """
        pairs, scale, digest = read_adapter(directory, max_rank)
        check_fits(self._model, pairs, directory)
        self._weights[version] = self._weights_with(
            {name: scale * b_OR.float() @ a_RI.float() for name, (a_RI, b_OR) in pairs.items()}
        )
        return digest

    def checksum(self, version: int) -> int:
        """Return a checksum of the weights that the model holds for an adapter version."""
        return checksum(
            tensor
            for layer in self._weights[version]
            for tensor in (layer.qkv_IO, layer.out_IO, layer.gate_up_IO, layer.down_IO)
        )

    def unload(self, version: int) -> None:
        del self._weights[version]

    def move(self, device: torch.device) -> None:
        """Do nothing, because the model runs only on the CPU."""

    def _weights_with(self, terms: Mapping[str, Tensor]) -> list[Weights]:
        def joined(prefix: str, *names: str) -> Tensor:
            whole = (prefix + name for name in names)
            weights = (self._model.get_submodule(name).weight + terms.get(name, 0.0) for name in whole)
            return torch.cat(tuple(weights)).t()

        prefixes = [f"model.layers.{index}." for index in range(len(self._layers))]
        return [
            Weights(joined(at, *_QKV), joined(at, _OUT), joined(at, *_GATE_UP), joined(at, _DOWN)) for at in prefixes
        ]


class FusedLayer:
    """Parts of a layer that all adapter versions share, and its computation with the weights of each."""

    def __init__(self, index: int, layer: Any, attention: CachedAttention) -> None:
        attend = layer.self_attn
        self._index = index
        self._attention = attention
        self._width = attend.head_dim
        self._scaling = attend.scaling
        self._num_heads, num_key_heads = (proj.out_features // self._width for proj in (attend.q_proj, attend.k_proj))
        self._num_qk_heads = self._num_heads + num_key_heads
        biases = [proj.bias for proj in (attend.q_proj, attend.k_proj, attend.v_proj)]
        self._qkv_bias = torch.cat(biases) if all(bias is not None for bias in biases) else None
        self._norm, self._mlp_norm = RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)
        self._qk_norm: RMSNorm | None = None
        if hasattr(attend, "q_norm"):
            self._qk_norm = RMSNorm(*[attend.q_norm] * self._num_heads, *[attend.k_norm] * num_key_heads)
        self._activate = layer.mlp.act_fn

    def attend(
        self,
        hidden_NI: Tensor,
        cos_N1D: Tensor,
        sin_N1D: Tensor,
        weights: Sequence[Weights],
        sizes: list[int],
        is_last: bool,
    ) -> Tensor:
        """Return the outputs of the heads side by side; in the last layer, of the needed tokens."""
        qkv_NO = _product(self._norm(hidden_NI), [one.qkv_IO for one in weights], sizes)
        if self._qkv_bias is not None:
            qkv_NO += self._qkv_bias
        qkv_NHD = qkv_NO.view(len(qkv_NO), -1, self._width)
        qk_NHD, value_NHD = qkv_NHD[:, : self._num_qk_heads], qkv_NHD[:, self._num_qk_heads :]
        if self._qk_norm is not None:
            qk_NHD = self._qk_norm(qk_NHD)
        qk_NHD = torch.addcmul(qk_NHD * cos_N1D, qk_NHD.roll(self._width // 2, -1), sin_N1D)
        query_NHD, key_NHD = qk_NHD[:, : self._num_heads], qk_NHD[:, self._num_heads :]
        return self._attention.attend(self._index, query_NHD, key_NHD, value_NHD, self._scaling, is_last).flatten(1)

    def add(self, hidden_NI: Tensor, attended_NI: Tensor, weights: Sequence[Weights], sizes: list[int]) -> None:
        """Add output projection and MLP to the hidden state, given the outputs of the heads."""
        _add_product(hidden_NI, attended_NI, [one.out_IO for one in weights], sizes)
        gate_up_NO = _product(self._mlp_norm(hidden_NI), [one.gate_up_IO for one in weights], sizes)
        gate_NO, up_NO = gate_up_NO.chunk(2, -1)
        _add_product(hidden_NI, self._activate(gate_NO).mul_(up_NO), [one.down_IO for one in weights], sizes)


class RMSNorm:
    """RMS norm over the last dimension; with several norms, each head has its own."""

    def __init__(self, *norms: Any) -> None:
        self._weight = torch.stack([norm.weight for norm in norms]) if len(norms) > 1 else norms[0].weight
        self._epsilon = torch.tensor(norms[0].variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(torch.addcmul(self._epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()).mul_(self._weight)


def _product(x_NI: Tensor, weights: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """Multiply adjacent groups of tokens, of the given sizes, each by its weights."""
    if len(weights) == 1:
        return x_NI @ weights[0]
    out_NO = x_NI.new_empty(len(x_NI), weights[0].shape[1])
    for out, x, weight_IO in zip(torch.split(out_NO, sizes), torch.split(x_NI, sizes), weights, strict=True):
        torch.mm(x, weight_IO, out=out)
    return out_NO


def _add_product(out_NO: Tensor, x_NI: Tensor, weights: Sequence[Tensor], sizes: list[int]) -> None:
    for out, x, weight_IO in zip(torch.split(out_NO, sizes), torch.split(x_NI, sizes), weights, strict=True):
        out.addmm_(x, weight_IO)
