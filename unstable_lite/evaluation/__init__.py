"""Evaluation of checkpoints on disk without a learner: models × opponents × envs, and ladders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unstable_lite.evaluation.scoring import action_distribution

__all__ = ["action_distribution"]


def __getattr__(name: str) -> Any:
    """Load `action_distribution` when it is first used, because its module loads torch."""
    if name != "action_distribution":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unstable_lite.evaluation.scoring import action_distribution

    return action_distribution
