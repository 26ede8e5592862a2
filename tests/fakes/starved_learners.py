"""A learner that runs out of memory."""

import resource
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner

MORE_MB = 100


class Starved(REINFORCELearner):
    """May allocate MORE_MB more than it has after its start."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_MB * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
