"""Asynchronous, LoRA-first reinforcement learning of language models on multi-agent text games.

Public names are loaded when they are first used, so importing this package is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unstable_lite.version import __version__ as __version__

if TYPE_CHECKING:  # `X as X` makes X public for type checkers
    from unstable_lite.api import build as build
    from unstable_lite.config.games import EvalEnvSpec as EvalEnvSpec
    from unstable_lite.config.games import TrainEnvSpec as TrainEnvSpec
    from unstable_lite.dashboards.terminal import TerminalInterface as TerminalInterface
    from unstable_lite.evaluation.calls import evaluate as evaluate
    from unstable_lite.evaluation.calls import exploitability as exploitability
    from unstable_lite.league.game_scheduler import GameScheduler as GameScheduler
    from unstable_lite.league.model_registry import ModelRegistry as ModelRegistry
    from unstable_lite.learner.algorithms.ppo import GRPOLearner as GRPOLearner
    from unstable_lite.learner.algorithms.ppo import PPOLearner as PPOLearner
    from unstable_lite.learner.algorithms.reinforce import A2CLearner as A2CLearner
    from unstable_lite.learner.algorithms.reinforce import REINFORCELearner as REINFORCELearner
    from unstable_lite.orchestrator.run import Run as Run
    from unstable_lite.rollout.buffer import EpisodeBuffer as EpisodeBuffer
    from unstable_lite.rollout.buffer import StepBuffer as StepBuffer
    from unstable_lite.rollout.collector import Collector as Collector
    from unstable_lite.tracking.tracker import Tracker as Tracker

_HOMES = {
    "A2CLearner": "learner.algorithms.reinforce",
    "Collector": "rollout.collector",
    "EpisodeBuffer": "rollout.buffer",
    "EvalEnvSpec": "config.games",
    "GRPOLearner": "learner.algorithms.ppo",
    "GameScheduler": "league.game_scheduler",
    "ModelRegistry": "league.model_registry",
    "PPOLearner": "learner.algorithms.ppo",
    "REINFORCELearner": "learner.algorithms.reinforce",
    "Run": "orchestrator.run",
    "StepBuffer": "rollout.buffer",
    "TerminalInterface": "dashboards.terminal",
    "Tracker": "tracking.tracker",
    "TrainEnvSpec": "config.games",
    "build": "api",
    "evaluate": "evaluation.calls",
    "exploitability": "evaluation.calls",
}
_MODULES = {
    "errors": "errors",
    "reward_transformations": "reward_transformations",
    "samplers": "league.samplers",
}

__all__ = list(_HOMES)


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
