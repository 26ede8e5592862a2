"""What turns steps into a better adapter. This page knows the learners' names, not their libraries."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.types import TrainItem

LEARNERS = {"reinforce": "unstable_lite.learners.reinforce:REINFORCELearner"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    metrics: dict[str, float]
    """Without prefix; the tracker adds `learner/`."""
    skipped: str | None
    """Why the step was not taken, or None."""


class Learner(Protocol):
    """What the worker asks of an algorithm; made by calling its class with the config and a torch device."""

    policy: Any
    """A `learners.model.Policy`."""

    version: int
    """Of the adapter that the policy now holds; 0 is the base without one."""

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """One optimiser step, which makes adapter `version`; or none, and the reason."""

    def save(self, directory: Path) -> None:
        """Everything that `load` needs to go on as if nothing had happened."""

    def load(self, directory: Path) -> None: ...


def load_learner(config: Config, device: str) -> Learner:
    """The learner that `config.algorithm` names: a registered name, or `module:Class`."""
    target = LEARNERS.get(config.algorithm, config.algorithm)
    module_name, _, class_name = target.partition(":")
    try:
        learner_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(LEARNERS)
        raise ConfigError(f"algorithm = {config.algorithm!r}: use {known}, or module:Class ({error})") from error
    learner: Learner = learner_class(config, device)
    return learner
