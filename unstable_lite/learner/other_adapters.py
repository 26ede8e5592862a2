"""Adapters that the learner computes with and does not train: frozen players', and the newest ones that it made.

An adapter of another origin may have a lower rank, another scale and fewer layers than the policy's: its pairs are
filled up with zeros, and the scales' ratio is multiplied into B, which changes log-probabilities by rounding only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from unstable_lite.adapters import peft_files
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.learner import distributed
from unstable_lite.learner.base_model import ADAPTER
from unstable_lite.learner.model import Policy
from unstable_lite.types import TrainItem

PAST_ADAPTERS = "past_adapters.safetensors"
"""File in a saved state, with a sync schedule."""
MISMATCH_STEPS = 64
"""Most steps of an update on which the mismatch of engines and learner is measured."""


def read_parameters(directory: Path, policy: Policy) -> dict[str, Tensor]:
    """Return parameters for `Policy.logprobs_with` that compute as the adapter in a PEFT directory does.

    Raises RequestError if it cannot be read, adapts other layers, or has a higher rank or other sizes than the policy.
    """
    try:
        tensors, config, _ = peft_files.read_adapter(directory)
    except AdapterError as error:
        raise RequestError(str(error)) from error
    ratio = peft_files.lora_scale(config) / peft_files.lora_scale(policy.model.peft_config[ADAPTER].to_dict())
    filled = {name: torch.zeros_like(parameter, device="cpu") for name, parameter in policy.parameters.items()}
    for key, tensor in policy.of_text(tensors).items():
        name = key.removesuffix(".weight") + f".{ADAPTER}.weight"
        if (place := filled.get(name)) is None:
            raise RequestError(f"{directory} adapts {key}, which the learner's adapter does not")
        rank_dim = 0 if ".lora_A." in key else 1
        rank, other = tensor.shape[rank_dim], tensor.shape[1 - rank_dim]
        if rank > place.shape[rank_dim] or other != place.shape[1 - rank_dim]:
            raise RequestError(
                f"{directory}: {key} has shape {tuple(tensor.shape)}, which does not fit into {tuple(place.shape)} of "
                "the learner's adapter"
            )
        place.narrow(rank_dim, 0, rank).copy_(tensor.float() if rank_dim == 0 else tensor.float() * ratio)
    return filled


class PastAdapters(dict[int, dict[str, Tensor]]):
    """Parameters of the policy's newest adapters by version, in the CPU's memory, to measure the mismatch."""

    def __init__(self, policy: Policy, num_kept: int) -> None:
        super().__init__()
        self._policy = policy
        self._num_kept = num_kept
        self._is_held = distributed.rank() == 0
        """Whether this rank measures, so that it needs them."""

    def hold(self, version: int) -> None:
        """Keep the policy's parameters as adapter `version`, and drop the oldest."""
        if not self._is_held:
            return
        self[version] = {name: p.detach().to("cpu", copy=True) for name, p in self._policy.parameters.items()}
        for past in [past for past in self if past <= version - self._num_kept]:
            del self[past]

    def sample(self, items: Sequence[TrainItem], seed: int) -> dict[int, list[TrainItem]]:
        """Return a random sample of the items whose adapters are held, by adapter version in ascending order."""
        known = [item for item in items if item.adapter_version in self]
        sample = random.Random(seed).sample(known, min(MISMATCH_STEPS, len(known)))
        versions = sorted({item.adapter_version for item in sample})
        return {version: [item for item in sample if item.adapter_version == version] for version in versions}

    def save(self, directory: Path) -> None:
        tensors = {f"{version} {name}": value for version, kept in self.items() for name, value in kept.items()}
        peft_files.write_file(directory / PAST_ADAPTERS, safetensors.torch.save(tensors))

    def load(self, directory: Path) -> None:
        """Replace all by those that `save` wrote, if it did."""
        self.clear()
        if self._is_held and (directory / PAST_ADAPTERS).is_file():
            for name, value in peft_files.read_tensors(directory / PAST_ADAPTERS).items():
                version, _, parameter = name.partition(" ")
                self.setdefault(int(version), {})[parameter] = value
