"""Learners that run out of memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from unstable_lite.config import Config
from unstable_lite.learner import distributed
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner

MORE_MB = 100
TOO_MUCH = 1 << 60
"""Number of bytes beyond any allocator."""


class Starved(REINFORCELearner):
    """May allocate MORE_MB more than it has after its start."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_MB * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class OneRankStarved(REINFORCELearner):
    """Runs out of memory on rank 1 in the middle of every update."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)

        def allocate(layer: Any, _: object) -> None:
            if layer.training:
                torch.empty(TOO_MUCH)

        if distributed.rank() == 1:
            self.policy._base.model.layers[-1].register_forward_pre_hook(allocate)
