"""Reward transforms for a game's outcome (final), a turn (step) and a batch (sampling)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from unstable_lite import plugins
from unstable_lite.config.training import RewardConfig, Transformation
from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.group import *  # noqa: F403
from unstable_lite.reward_transformations.transforms import *  # noqa: F403
from unstable_lite.reward_transformations.transforms import (
    FINAL,
    SAMPLING,
    STEP,
    ComposeFinalRewardTransforms,
    ComposeSamplingRewardTransforms,
    ComposeStepRewardTransforms,
    takes_context,
)

T = TypeVar("T")

BASELINES = {"RoleAdvantageFormatter", "RoleAdvantageByEnvFormatter", "NormalizeRewards", "NormalizeRewardsByEnv"}
"""Transforms that subtract a baseline to centre rewards; one of them is enough."""


def build_transforms(
    config_entries: Iterable[Transformation | str], registry: Mapping[str, Callable[..., T]], arguments: Sequence[str]
) -> list[T]:
    """Create one transform per entry: a name in `registry` or `module:Class`, with its keyword arguments.

    arguments: names of the parameters of its calls. Raises ConfigError with every problem of every entry.
    """
    transforms: list[T] = []
    problems: list[str] = []
    for entry in config_entries:
        name, keywords = (entry, {}) if isinstance(entry, str) else (entry.name, entry.model_extra or {})
        what = f"reward transformation {name!r}"
        try:
            transform = plugins.find("reward transformation", name, registry)
            if inspect.isfunction(transform) and _can_take(transform, arguments):
                raise ConfigError(f"{what} is a function: name a class with this function as its __call__")
            made = plugins.call("reward transformation", name, transform, keywords)
            if not _can_take(made, arguments):
                raise ConfigError(f"{what} creates {made!r}, which cannot be called as ({', '.join(arguments)})")
            if hasattr(made, "state_dict") != hasattr(made, "load_state_dict"):
                raise ConfigError(
                    f"{what} has one of state_dict and load_state_dict, but needs both to survive a restart"
                )
            transforms.append(made)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return transforms


def build_reward_transformations(
    rewards: RewardConfig,
) -> tuple[ComposeFinalRewardTransforms, ComposeStepRewardTransforms, ComposeSamplingRewardTransforms]:
    """Create a buffer's three transforms. Raises ConfigError as `build_transforms` does."""
    final, step, sampling = ComposeFinalRewardTransforms, ComposeStepRewardTransforms, ComposeSamplingRewardTransforms
    return (
        final(build_transforms(rewards.final_reward_transformation or (), FINAL, final.ARGUMENTS)),
        step(build_transforms(rewards.step_reward_transformation or (), STEP, step.ARGUMENTS)),
        sampling(build_transforms(rewards.sampling_reward_transformation or (), SAMPLING, sampling.ARGUMENTS)),
    )


def _can_take(transform: object, arguments: Sequence[str]) -> bool:
    """Return whether `transform` can be called with `arguments`, and with a `context` if it has such a parameter."""
    if not callable(transform):
        return False
    with contextlib.suppress(ValueError):  # some callables written in C have no signature: the first game checks them
        signature = inspect.signature(transform)
        context = {"context": None} if takes_context(transform) else {}
        try:
            signature.bind(*arguments, **context)
        except TypeError:
            return False
    return True
