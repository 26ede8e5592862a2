"""Settings of the loss and of the learning rate that contradict each other, the algorithm, or the run's length."""

from __future__ import annotations

import math
from collections.abc import Iterator

from unstable_lite.config import Config
from unstable_lite.errors import ModelError
from unstable_lite.learner import LEARNERS
from unstable_lite.planning.algorithm_defaults import dropout_problems
from unstable_lite.planning.memory import shape_of


def objective_problems(config: Config) -> Iterator[str]:
    """Yield each reason why the learner's loss or schedule cannot be as these keys say."""
    yield from dropout_problems(config)
    learner, steps = config.learner, config.run.learning_steps
    if learner.learning_rate_warmup >= steps:
        yield (
            f"learner.learning_rate_warmup = {learner.learning_rate_warmup}: the run ends after run.learning_steps = "
            f"{steps} updates, before the learning rate is reached"
        )
    yield from _entropy_problems(config)
    algorithm = LEARNERS.get(config.algorithm)
    if learner.clip_range_high is not None and algorithm is not None and not algorithm.is_clipped:
        yield f"learner.clip_range_high: {config.algorithm} does not clip; only ppo and grpo do"
    if learner.importance_weight_mode == "mask" and learner.importance_weight_cap <= 1:
        yield (
            f"learner.importance_weight_mode = 'mask' with importance_weight_cap = {learner.importance_weight_cap:g} "
            "would leave out tokens of the newest policy, whose ratio is 1; set a cap above 1"
        )


def _entropy_problems(config: Config) -> Iterator[str]:
    target, coefficient = config.learner.entropy_target, config.learner.entropy_coefficient
    if target is None:
        return
    if not coefficient:
        yield (
            "learner.entropy_target: the coefficient is adapted by factors, so learner.entropy_coefficient must be "
            "above 0 (0.001 is a start)"
        )
    try:
        shape = shape_of(config.model_name)
    except ModelError:  # reported with the other problems of the model
        return
    if shape is not None and target > math.log(shape.vocab_size):
        yield (
            f"learner.entropy_target = {target:g}: a token of {shape.vocab_size} has an entropy of at most "
            f"{math.log(shape.vocab_size):.2f} nats"
        )
