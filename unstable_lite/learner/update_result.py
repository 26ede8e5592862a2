"""Check of the results that algorithms return."""

from __future__ import annotations

from dataclasses import replace

from unstable_lite.errors import ConfigError
from unstable_lite.learner import UpdateResult


def checked(algorithm: str, result: object) -> UpdateResult:
    """Return the result with plain numbers as metrics, for messages and files."""
    if not isinstance(result, UpdateResult):
        raise ConfigError(f"{algorithm}.update must return an UpdateResult; it returned {result!r:.99}")
    metrics = {}
    for name, value in result.metrics.items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{algorithm}.update: the metric {name!r} is {value!r:.99}, which is not a number"
            ) from error
    return replace(result, metrics=metrics)
