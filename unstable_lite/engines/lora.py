"""Many adapters in one batch: rows are grouped by adapter version, and each linear layer serves every group.

Owns reading PEFT directories and the arithmetic of LoRA. Knows no requests and no cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from unstable_lite.adapters import peft_files
from unstable_lite.errors import AdapterError, ModelError


@dataclass(frozen=True, slots=True)
class Group:
    """Adjacent tokens of one adapter version."""

    start: int
    stop: int
    version: int


class LoraLinear(nn.Module):
    """Linear layer with a low-rank pair for each adapter version that has one: W x + (x a) b."""

    def __init__(self, base: Any, groups: list[Group]) -> None:
        super().__init__()
        self.base: Any = base  # nn.Linear or Conv1D
        self._groups = groups
        """Groups of the current forward pass, in a list that all layers share."""
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        """Factors (a, b) of each adapter version that changes this layer."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        x_NI, out_NO = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(x_NI) != self._groups[-1].stop:
            raise ModelError(
                f"an adapted layer receives {len(x_NI)} of {self._groups[-1].stop} tokens, as experts do, so "
                "that their adapters are unknown. Leave such layers out of lora.target_modules, or use "
                "engine.kind = 'vllm'"
            )
        for group in self._groups:
            if (pair := self.pairs.get(group.version)) is not None:
                a_IR, b_RO = pair
                low_NR = x_NI[group.start : group.stop] @ a_IR
                out_NO[group.start : group.stop].addmm_(low_NR, b_RO)
        return out

    def load(self, version: int, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
        weight = self.base.weight
        self.pairs[version] = (
            a_RI.t().to(weight.device, weight.dtype).contiguous(),
            (scale * b_OR.float().t()).to(weight.device, weight.dtype).contiguous(),
        )


def neighbours(versions: Sequence[int], stop_R: npt.NDArray[np.int64]) -> list[Group]:
    """Return the groups of a pass whose row i ends before token `stop_R[i]`; equal `versions` are adjacent."""
    groups: list[Group] = []
    start = 0
    for index, version in enumerate(versions):
        if index + 1 == len(versions) or versions[index + 1] != version:
            stop = int(stop_R[index])
            groups.append(Group(start, stop, version))
            start = stop
    return groups


class LoraModel:
    """Stock model with low-rank pairs beside the linear layers that adapters change."""

    def __init__(self, model: Any) -> None:
        self._groups: list[Group] = []
        self._model = model
        self._layers: dict[str, LoraLinear] = {}

    def __call__(self, id_N: Tensor, position_N: Tensor, groups: list[Group], last_B: Tensor) -> Tensor:
        """Return the logits after tokens `last_B` of a pass of N, B × V."""
        self._groups[:] = groups
        output = self._model(
            input_ids=id_N[None], position_ids=position_N[None], use_cache=False, logits_to_keep=last_B
        )
        logits_BV: Tensor = output.logits[0]
        return logits_BV

    def load(self, version: int, directory: Path, max_rank: int) -> str:
        """Load an adapter and return its digest.

        Raises AdapterError unless it is a LoRA adapter of this base; the model is then as before.
        """
        pairs, scale, digest = read_adapter(directory, max_rank)
        check_fits(self._model, pairs, directory)
        for name, (a_RI, b_OR) in pairs.items():
            if name not in self._layers:
                base = self._model.get_submodule(name)
                self._layers[name] = LoraLinear(base, self._groups)
                self._model.set_submodule(name, self._layers[name])
            self._layers[name].load(version, a_RI, b_OR, scale)
        return digest

    def checksum(self, version: int) -> int:
        """Return a checksum of the weights that the model holds for an adapter version."""
        return checksum(tensor for layer in self._layers.values() for tensor in layer.pairs.get(version, ()))

    def unload(self, version: int) -> None:
        for layer in self._layers.values():
            layer.pairs.pop(version, None)

    def move(self, device: torch.device) -> None:
        """Move model and adapters to `device`."""
        self._model.to(device)
        for layer in self._layers.values():
            layer.pairs = {version: (a.to(device), b.to(device)) for version, (a, b) in layer.pairs.items()}


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number that changes if a bit of `tensors`, or their order, changes. Costs one pass over them."""
    total = 0
    for tensor in tensors:
        bits = tensor.t() if tensor.t().is_contiguous() else tensor.contiguous()
        words = bits.view({2: torch.int16, 4: torch.int32}[bits.element_size()])
        total = (31 * total + int(words.sum(dtype=torch.int64))) % (1 << 64)
    return total


def read_adapter(directory: Path, max_rank: int) -> tuple[dict[str, tuple[Tensor, Tensor]], float, str]:
    """Return the pairs (A, B) of a PEFT directory by module name, their scale, and the adapter's digest.

    Raises AdapterError.
    """
    tensors, config, digest = peft_files.read_adapter(directory, max_rank)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, half = key.removeprefix("base_model.model.").rpartition(".lora_")
        pairs.setdefault(name, {})[half[0]] = tensor
    scale = peft_files.lora_scale(config)
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}, scale, digest


def check_fits(model: Any, pairs: Mapping[str, tuple[Tensor, Tensor]], directory: Path) -> None:
    """Raise AdapterError if a pair has no linear layer in `model`, or another shape."""
    for name, (a_RI, b_OR) in pairs.items():
        try:
            layer: Any = model.get_submodule(name)
        except AttributeError:
            raise AdapterError(f"{directory}: adapts {name}, which the base does not have") from None
        layer = layer.base if isinstance(layer, LoraLinear) else layer
        if not isinstance(layer, nn.Linear | Conv1D) or layer is model.get_output_embeddings():
            raise AdapterError(f"{directory}: adapts {name}; only linear layers below the model's head can be adapted")
        fan_in, fan_out = layer.weight.shape if isinstance(layer, Conv1D) else reversed(layer.weight.shape)
        if a_RI.shape[1] != fan_in or b_OR.shape[0] != fan_out or a_RI.shape[0] != b_OR.shape[1]:
            raise AdapterError(
                f"{directory} does not fit the base: {name} has {fan_in} inputs and {fan_out} outputs, "
                f"lora_A is {tuple(a_RI.shape)}, lora_B {tuple(b_OR.shape)}"
            )
