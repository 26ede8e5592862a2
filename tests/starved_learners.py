"""Learners whose memory runs out."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from unstable_lite.config import Config
from unstable_lite.learners import ranks
from unstable_lite.learners.reinforce import REINFORCELearner

MORE_MB = 100
TOO_MUCH = 1 << 60
"""Bytes that no allocator has."""


class Starved(REINFORCELearner):
    """Its process may take so much more memory than it has once it is up, and no more."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_MB * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class OneRankStarved(REINFORCELearner):
    """Rank 1 asks the allocator for too much in the middle of every update."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)

        def allocate(layer: Any, _: object) -> None:
            if layer.training:
                torch.empty(TOO_MUCH)

        if ranks.rank() == 1:
            self.policy._base.model.layers[-1].register_forward_pre_hook(allocate)
