"""Parameters of the newest adapters, in the CPU's memory, to measure the mismatch on stale steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
from torch import Tensor

from unstable_lite.adapters import peft_files
from unstable_lite.learner import distributed
from unstable_lite.learner.model import Policy
from unstable_lite.types import TrainItem

PAST_ADAPTERS = "past_adapters.safetensors"
"""File in a saved state, with a sync schedule."""
MISMATCH_STEPS = 64
"""Most steps of an update on which the mismatch of engines and learner is measured."""


class PastAdapters(dict[int, dict[str, Tensor]]):
    """Parameters of the newest max_staleness + 1 adapters by version."""

    def __init__(self, policy: Policy, max_staleness: int) -> None:
        super().__init__()
        self._policy = policy
        self._max_staleness = max_staleness

    def hold(self, version: int) -> None:
        """Keep the policy's parameters as adapter `version`, and drop those too old to be trained on."""
        if distributed.rank() and not self._policy.is_sharded:
            return
        self[version] = {name: p.detach().to("cpu", copy=True) for name, p in self._policy.parameters.items()}
        for past in [past for past in self if past < version - self._max_staleness]:
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
        if (directory / PAST_ADAPTERS).is_file():
            for name, value in peft_files.read_tensors(directory / PAST_ADAPTERS).items():
                version, _, parameter = name.partition(" ")
                self.setdefault(int(version), {})[parameter] = value
