"""What turns steps into a better adapter. This page knows the learners' names, not their libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from unstable_lite import by_name
from unstable_lite.config import Config
from unstable_lite.types import Logprobs, TrainItem

CRITIC_HEAD = "value_head.safetensors"
"""Beside a critic's adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What has to be known of a learner before it is loaded, by whoever may not load torch."""

    target: str
    """`module:Class`."""
    batches: Literal["steps", "episodes"] = "steps"
    """Single steps, each with the whole reward, or whole trajectories with the final reward on the last step."""
    has_critic: bool = False
    is_clipped: bool = False
    """Several steps an update against the policy that it began with."""


LEARNERS = {
    "reinforce": Algorithm(target="unstable_lite.learners.reinforce:REINFORCELearner"),
    "a2c": Algorithm(target="unstable_lite.learners.a2c:A2CLearner", batches="episodes", has_critic=True),
    "ppo": Algorithm(
        target="unstable_lite.learners.ppo:PPOLearner", batches="episodes", has_critic=True, is_clipped=True
    ),
    "grpo": Algorithm(target="unstable_lite.learners.grpo:GRPOLearner", is_clipped=True),
    # Leave-one-out is how the group's rewards become advantages; what is done with them is REINFORCE.
    "rloo": Algorithm(target="unstable_lite.learners.reinforce:REINFORCELearner"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    metrics: dict[str, float]
    """Without prefix; the tracker adds `learner/`."""
    skipped: str | None
    """Why the step was not taken, or None."""
    logprobs: tuple[Logprobs, ...] = ()
    """For each item, the log-probabilities of its trained tokens before the step; empty where nobody says."""
    advantages: tuple[float, ...] = ()
    """Of the items that were trained on; empty where they are the items' rewards."""


class Learner(Protocol):
    """What the worker asks of an algorithm; made by calling its class with the config and a torch device.

    A class of your own that wants whole trajectories says so in its config: `buffer.kind = "episodes"`.
    """

    policy: Any
    """A `learners.model.Policy`."""

    version: int
    """Of the adapter that the policy now holds; 0 is the base without one."""

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """One update, which makes adapter `version`; or nothing changed, and the reason."""

    def save(self, directory: Path) -> None:
        """Everything that `load` needs to go on as if nothing had happened."""

    def load(self, directory: Path) -> None: ...


def load_learner(config: Config, device: str) -> Learner:
    """The learner that `config.algorithm` names: a registered name, or `module:Class`. Raises ConfigError."""
    known_one = LEARNERS.get(config.algorithm)
    target = known_one.target if known_one else config.algorithm
    learner_class: Callable[..., Learner] = by_name.find("algorithm", target, cast(Any, LEARNERS))
    made = partial(learner_class, config, device)
    by_name.check_keywords("algorithm", target, made, config.learner.options)
    return made(**config.learner.options)
