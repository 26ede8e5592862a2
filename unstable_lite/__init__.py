"""Asynchronous, LoRA-first reinforcement learning of language models on multi-agent text games.

Public names are loaded when they are first used, so importing this package is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unstable_lite.api import build
    from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
    from unstable_lite.dashboards.terminal import TerminalInterface
    from unstable_lite.league.game_scheduler import GameScheduler
    from unstable_lite.league.model_registry import ModelRegistry
    from unstable_lite.learner.algorithms.a2c import A2CLearner
    from unstable_lite.learner.algorithms.grpo import GRPOLearner
    from unstable_lite.learner.algorithms.ppo import PPOLearner
    from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
    from unstable_lite.orchestrator.run import Run
    from unstable_lite.rollout.collector import Collector
    from unstable_lite.rollout.episode_buffer import EpisodeBuffer
    from unstable_lite.rollout.step_buffer import StepBuffer
    from unstable_lite.tracking.tracker import Tracker

_HOMES = {
    "A2CLearner": "learner.algorithms.a2c",
    "Collector": "rollout.collector",
    "EpisodeBuffer": "rollout.episode_buffer",
    "EvalEnvSpec": "config.games",
    "GRPOLearner": "learner.algorithms.grpo",
    "GameScheduler": "league.game_scheduler",
    "ModelRegistry": "league.model_registry",
    "PPOLearner": "learner.algorithms.ppo",
    "REINFORCELearner": "learner.algorithms.reinforce",
    "Run": "orchestrator.run",
    "StepBuffer": "rollout.step_buffer",
    "TerminalInterface": "dashboards.terminal",
    "Tracker": "tracking.tracker",
    "TrainEnvSpec": "config.games",
    "build": "api",
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
    """Return all names, those not yet loaded included, for a notebook's completion."""
    return sorted({*globals(), *_HOMES, *_MODULES})
