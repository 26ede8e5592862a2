"""Choose the opponent of the next training game among the registry's active models. Knows nothing of envs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.rng import restore, state_of
from unstable_lite.types import ModelRef


class BaseModelSampler:
    """Override `sample_opponent`, and `update` to learn from results."""

    def __init__(self, registry: ModelRegistry, rng: random.Random) -> None:
        self.registry = registry
        self._rng = rng

    def get_current_ckpt(self) -> str:
        return self.registry.get_current_ckpt()

    def sample_opponent(self) -> ModelRef:
        raise NotImplementedError

    def update(self, uids: Mapping[int, str], scores: Mapping[int, float], env_id: str) -> None:
        """After each game that was not void; the registry has rated it already."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": state_of(self._rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._rng, state["rng"])


class NoOpponentModelSampler(BaseModelSampler):
    """For envs whose seats are all the current policy's."""

    def sample_opponent(self) -> ModelRef:
        raise ConfigError(
            "opponent_sampling_strategy is 'none', but a training env has num_actors < num_players: "
            "choose a strategy, or give every seat to the current policy"
        )


class MirrorModelSampler(BaseModelSampler):
    """The current policy."""

    def sample_opponent(self) -> ModelRef:
        return self.registry.current


class FixedOpponentModelSampler(BaseModelSampler):
    """Uniform over the fixed opponents."""

    def sample_opponent(self) -> ModelRef:
        fixed = self.registry.fixed()
        if not fixed:
            raise ConfigError("a fixed opponent was asked for, and fixed_opponents is empty")
        return self._rng.choice(fixed).ref


class LaggedModelSampler(BaseModelSampler):
    """Uniform over the checkpoints that are so many updates back; the oldest one while none is that old."""

    def __init__(self, registry: ModelRegistry, rng: random.Random, lag_range: tuple[int, int] = (1, 7)) -> None:
        super().__init__(registry, rng)
        least, most = lag_range
        if not 0 <= least <= most:
            raise ConfigError(f"opponent_lag = {list(lag_range)}: must be [least, most] with 0 <= least <= most")
        self.lag_range = lag_range

    def sample_opponent(self) -> ModelRef:
        current = self.registry.current
        checkpoints = [meta.ref for meta in self.registry.checkpoints()] or [current]
        least, most = self.lag_range
        lagged = [ref for ref in checkpoints if least <= _version(current) - _version(ref) <= most]
        return self._rng.choice(lagged or checkpoints[:1])


class MixtureModelSampler(BaseModelSampler):
    """One of several samplers for each game, with probabilities in proportion to the weights."""

    def __init__(
        self,
        registry: ModelRegistry,
        rng: random.Random,
        samplers: Sequence[BaseModelSampler],
        weights: Sequence[float],
    ) -> None:
        super().__init__(registry, rng)
        if not samplers or len(samplers) != len(weights) or min(weights) <= 0:
            raise ConfigError(f"a mixture needs one positive weight for each sampler, got {list(weights)}")
        self.samplers = list(samplers)
        self.weights = list(weights)

    def sample_opponent(self) -> ModelRef:
        (sampler,) = self._rng.choices(self.samplers, self.weights)
        return sampler.sample_opponent()

    def update(self, uids: Mapping[int, str], scores: Mapping[int, float], env_id: str) -> None:
        for sampler in self.samplers:
            sampler.update(uids, scores, env_id)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"samplers": [sampler.state_dict() for sampler in self.samplers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for sampler, saved in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(saved)
        super().load_state_dict(state)


def _version(ref: ModelRef) -> int:
    assert ref.adapter_version is not None
    return ref.adapter_version
