"""Names and interface of the learners; imports none of their libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

from unstable_lite import plugins
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.types import Logprobs, TrainItem

CRITIC_HEAD = "value_head.safetensors"
"""File of the value head, beside a critic's adapter."""
LOGITS_CHUNK_TOKENS = {True: 1024, False: 128}
"""Number of completion tokens whose logits exist at once, on a GPU or not; each takes 10 bytes per entry of the
vocabulary."""
BLOCK_QUERIES = 256
"""Queries that attend together in a forest on a CPU: more need fewer calls, and share fewer of their keys."""
MOST_COPIES = 4
"""Copies of keys and values that these blocks may keep for the backward pass, which otherwise copies them again."""
UPDATE_TIMEOUT_S = 3600.0
"""Time after which an update counts as stuck."""
UPDATED = "updated.json"
"""File of the metrics of the update that made a learner's state; a process that replaces the learner reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Facts about an algorithm for processes that do not load torch."""

    target: str
    """Class, as `module:Class`."""
    batches: Literal["steps", "episodes"] = "steps"
    """Content of a batch: single steps, each with the whole reward, or whole trajectories with the reward on the last
    step."""
    has_critic: bool = False
    is_clipped: bool = False
    """Whether an update makes several steps, clipped around its first policy."""


LEARNERS = {
    "reinforce": Algorithm(target="unstable_lite.learner.algorithms.reinforce:REINFORCELearner"),
    "a2c": Algorithm(
        target="unstable_lite.learner.algorithms.reinforce:A2CLearner", batches="episodes", has_critic=True
    ),
    "ppo": Algorithm(
        target="unstable_lite.learner.algorithms.ppo:PPOLearner", batches="episodes", has_critic=True, is_clipped=True
    ),
    "grpo": Algorithm(target="unstable_lite.learner.algorithms.ppo:GRPOLearner", is_clipped=True),
    # Leave-one-out is the baseline of the group's rewards; the update is that of REINFORCE.
    "rloo": Algorithm(target="unstable_lite.learner.algorithms.reinforce:REINFORCELearner"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    metrics: dict[str, float]
    """Metrics by name, without the prefix `learner/`, which the tracker adds."""
    skipped: str | None
    """Reason why the update was skipped, or None."""
    logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of each item's trained tokens before the step; may be empty."""
    advantages: tuple[float, ...] = ()
    """Advantages of the trained items; empty if they are the items' rewards."""


class Learner(Protocol):
    """Algorithm; its class is called with the config and a torch device.

    A custom class that learns from whole trajectories needs `buffer.kind = "episodes"` in its config.
    """

    training: Any
    """Policy, optimiser and counters, which the worker saves and loads: a `learner.training.Training`."""

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """Make adapter `version`, or return the reason to skip the update: the worker then restores the old state."""


def find_learner(config: Config) -> Callable[[Config, str], Learner]:
    """Return the class of `config.algorithm`, a registered name or `module:Class`, with `learner.options` filled in.

    Imports its module, and torch with it. Raises ConfigError.
    """
    known_one = LEARNERS.get(config.algorithm)
    target = known_one.target if known_one else config.algorithm
    learner_class: Callable[..., Learner] = plugins.find("algorithm", target, cast(Any, LEARNERS))
    is_class = isinstance(learner_class, type)  # and not a function that makes a learner
    if is_class and (problems := plugins.interface_problems("algorithm", learner_class, ["update"])):
        raise ConfigError(*problems)
    plugins.check_keywords("algorithm", target, partial(learner_class, config, "cpu"), config.learner.options)
    return partial(learner_class, **config.learner.options)


def load_learner(config: Config, device: str) -> Learner:
    """Return the learner of `config.algorithm`. Raises ConfigError."""
    learner = find_learner(config)(config, device)
    if problems := plugins.interface_problems("algorithm", learner, ("training", "update")):
        raise ConfigError(*problems)
    return learner
