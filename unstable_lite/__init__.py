"""Reinforcement learning of language models on multi-agent text games, asynchronous, LoRA first.

Public names are loaded when they are first used: importing this package loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unstable_lite.buffers import EpisodeBuffer, StepBuffer
    from unstable_lite.build import build
    from unstable_lite.collector import Collector
    from unstable_lite.league.game_scheduler import GameScheduler
    from unstable_lite.league.model_registry import ModelRegistry
    from unstable_lite.learners.a2c import A2CLearner
    from unstable_lite.learners.grpo import GRPOLearner
    from unstable_lite.learners.ppo import PPOLearner
    from unstable_lite.learners.reinforce import REINFORCELearner
    from unstable_lite.runtime import Run
    from unstable_lite.trackers.terminal import TerminalInterface
    from unstable_lite.trackers.tracker import Tracker
    from unstable_lite.types import EvalEnvSpec, TrainEnvSpec

_HOMES = {
    "A2CLearner": "learners.a2c",
    "Collector": "collector",
    "EpisodeBuffer": "buffers",
    "EvalEnvSpec": "types",
    "GRPOLearner": "learners.grpo",
    "GameScheduler": "league.game_scheduler",
    "ModelRegistry": "league.model_registry",
    "PPOLearner": "learners.ppo",
    "REINFORCELearner": "learners.reinforce",
    "Run": "runtime",
    "StepBuffer": "buffers",
    "TerminalInterface": "trackers.terminal",
    "Tracker": "trackers.tracker",
    "TrainEnvSpec": "types",
    "build": "build",
}
_MODULES = {
    "errors": "errors",
    "reward_transformations": "reward_transformations",
    "samplers": "league.samplers",
}

__all__ = [
    "A2CLearner",
    "Collector",
    "EpisodeBuffer",
    "EvalEnvSpec",
    "GRPOLearner",
    "GameScheduler",
    "ModelRegistry",
    "PPOLearner",
    "REINFORCELearner",
    "Run",
    "StepBuffer",
    "TerminalInterface",
    "Tracker",
    "TrainEnvSpec",
    "build",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """With what is not loaded yet, for a notebook's completion."""
    return sorted({*globals(), *_HOMES, *_MODULES})
