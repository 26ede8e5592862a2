"""Samplers by the names that a configuration gives them, and what can be wrong with that configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from unstable_lite import by_name
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers.env_samplers import BaseEnvSampler, UniformRandomEnvSampler
from unstable_lite.league.samplers.model_samplers import (
    BaseModelSampler,
    FixedOpponentModelSampler,
    LaggedModelSampler,
    MirrorModelSampler,
    MixtureModelSampler,
    NoOpponentModelSampler,
)
from unstable_lite.rng import derive_seed

if TYPE_CHECKING:
    from unstable_lite.config import Config, LeagueConfig

__all__ = [
    "ENV_SAMPLERS",
    "MODEL_SAMPLERS",
    "BaseEnvSampler",
    "BaseModelSampler",
    "FixedOpponentModelSampler",
    "LaggedModelSampler",
    "MirrorModelSampler",
    "MixtureModelSampler",
    "NoOpponentModelSampler",
    "UniformRandomEnvSampler",
    "build_env_sampler",
    "build_model_sampler",
    "check_league",
]

ENV_SAMPLERS: dict[str, Callable[..., BaseEnvSampler]] = {"random": UniformRandomEnvSampler}
MODEL_SAMPLERS: dict[str, Callable[..., BaseModelSampler]] = {
    "none": NoOpponentModelSampler,
    "mirror": MirrorModelSampler,
    "fixed": FixedOpponentModelSampler,
    "lagged": LaggedModelSampler,
}


def build_env_sampler(config: Config) -> BaseEnvSampler:
    sampler = by_name.find("env_sampling_strategy", config.league.env_sampling_strategy, ENV_SAMPLERS)
    return sampler(config.train_envs, config.eval_envs, rng_seed=derive_seed(config.run.seed, "env_sampler"))


def build_model_sampler(league: LeagueConfig, registry: ModelRegistry, rng: random.Random) -> BaseModelSampler:
    """Registers `fixed_opponents` where the strategy may use them. A user's class gets `(registry, rng)`."""
    strategy = league.opponent_sampling_strategy
    names = [strategy] if isinstance(strategy, str) else list(strategy)
    if _may_use_fixed(names):
        for name in league.fixed_opponents:
            registry.add_fixed(name)
    samplers = [_build_one(name, league, registry, rng) for name in names]
    if isinstance(strategy, str):
        return samplers[0]
    return MixtureModelSampler(registry, rng, samplers, list(strategy.values()))


def check_league(config: Config) -> list[str]:
    """Everything about opponents and envs that would stop or mislead the run; empty if nothing would."""
    league = config.league
    problems = []
    strategy = league.opponent_sampling_strategy
    names = [strategy] if isinstance(strategy, str) else list(strategy)
    if not names:
        problems.append("opponent_sampling_strategy is an empty table: give at least one strategy a weight")
    if isinstance(strategy, dict) and "none" in strategy:
        problems.append("opponent_sampling_strategy: 'none' is not an opponent and cannot be part of a mixture")
    least, most = league.opponent_lag
    if not 0 <= least <= most:
        problems.append(f"opponent_lag = [{least}, {most}]: must be [least, most] with 0 <= least <= most")
    if "fixed" in names and not league.fixed_opponents:
        problems.append("opponent_sampling_strategy uses 'fixed', and fixed_opponents is empty")
    problems += _unknown("env_sampling_strategy", league.env_sampling_strategy, ENV_SAMPLERS)
    for name in names:
        problems += _unknown("opponent_sampling_strategy", name, MODEL_SAMPLERS)
    for spec in config.train_envs:
        if not 1 <= spec.num_actors <= spec.num_players:
            problems.append(
                f"train env {spec.env_id!r}: num_actors = {spec.num_actors} must be between 1 and "
                f"num_players = {spec.num_players}"
            )
        elif strategy == "none" and spec.num_actors < spec.num_players:
            problems.append(
                f"train env {spec.env_id!r}: num_actors = {spec.num_actors} of {spec.num_players} players, "
                "and opponent_sampling_strategy is 'none'; choose another, or set num_actors = num_players"
            )
    for eval_spec in config.eval_envs:
        if eval_spec.num_players < 1:
            problems.append(f"eval env {eval_spec.env_id!r}: num_players = {eval_spec.num_players} must be at least 1")
    return problems


def _build_one(name: str, league: LeagueConfig, registry: ModelRegistry, rng: random.Random) -> BaseModelSampler:
    sampler = by_name.find("opponent_sampling_strategy", name, MODEL_SAMPLERS)
    if sampler is LaggedModelSampler:
        return sampler(registry, rng, lag_range=league.opponent_lag)
    return sampler(registry, rng)


def _may_use_fixed(names: list[str]) -> bool:
    """A user's own sampler may choose any model of the registry."""
    return any(name == "fixed" or name not in MODEL_SAMPLERS for name in names)


def _unknown(what: str, name: str, known: Mapping[str, object]) -> list[str]:
    try:
        by_name.find(what, name, known)
    except ConfigError as error:
        return list(error.problems)
    return []
