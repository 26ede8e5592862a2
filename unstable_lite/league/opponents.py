"""Fixed opponents of a config: which of them each env may meet, and how they enter the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unstable_lite.adapters.frozen import members
from unstable_lite.config import Config
from unstable_lite.config.games import LeagueConfig, parse_player
from unstable_lite.league.model_registry import ModelRegistry


def strategies(league: LeagueConfig) -> dict[str, dict[str, Any]]:
    """Return the options of each sampler in `opponent_sampling_strategy` by its name, always with a `weight`."""
    strategy = league.opponent_sampling_strategy
    given = {strategy: {}} if isinstance(strategy, str) else strategy
    tables = {name: options if isinstance(options, Mapping) else {"weight": options} for name, options in given.items()}
    return {name: {"weight": 1.0, **options} for name, options in tables.items()}


def describe_strategy(league: LeagueConfig) -> str:
    """Return the name of the sampler, or those of a mixture with their weights and options."""
    if isinstance(league.opponent_sampling_strategy, str):
        return league.opponent_sampling_strategy
    return ", ".join(
        " ".join([name, *(f"{value}" if key == "weight" else f"{key}={value}" for key, value in options.items())])
        for name, options in strategies(league).items()
    )


def uses_fixed(league: LeagueConfig) -> bool:
    """Return whether `fixed_opponents` may be drawn; a custom sampler may draw any model of the registry."""
    return any(name not in ("none", "mirror", "lagged", "uniform") for name in strategies(league))


def uses_checkpoints(league: LeagueConfig) -> bool:
    """Return whether checkpoints before the current one may be drawn."""
    return any(name not in ("none", "mirror", "fixed") for name in strategies(league))


def training_opponents(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the fixed opponents that the strategy may draw, by the id of each training env that has opponents."""
    if not uses_fixed(config.league):
        return {}
    met = [env for env in config.train_envs if env.num_actors < env.num_players]
    return {env.env_id: config.league.opponents_in(env) for env in met}


def met_opponents(config: Config) -> list[str]:
    """Return the names of the fixed opponents that a run may meet."""
    trained = [name for names in training_opponents(config).values() for name in names]
    evaluated = [env.fixed_opponent for env in config.eval_envs if env.num_players > 1]
    return list(dict.fromkeys([*trained, *evaluated]))


def frozen_adapters(config: Config) -> list[str]:
    """Return the names of the frozen players with an adapter that a run may meet, one for each adapter."""
    return [member for name in met_opponents(config) if parse_player(name).has_adapter for member in members(name)]


def anchors(config: Config) -> dict[str, str]:
    """Return the fixed opponent that each env's ratings are relative to, by env id.

    `scripted:random` if the env has it, else another opponent that is not a frozen player, else a frozen one; among
    several the first opponent of an evaluation, else the first that may be drawn in training. An env without fixed
    opponents has no anchor.
    """
    met: dict[str, list[str]] = {}
    for spec in config.eval_envs:
        if spec.num_players > 1:
            met.setdefault(spec.env_id, []).append(spec.fixed_opponent)
    for env_id, opponents in training_opponents(config).items():
        met.setdefault(env_id, []).extend(opponents)
    return {
        env_id: min(names, key=lambda name: (name != "scripted:random", parse_player(name).is_frozen))
        for env_id, names in met.items()
        if names
    }


def add_training_opponents(config: Config, registry: ModelRegistry) -> None:
    """Register the fixed opponents of each training env, if the strategy may draw them."""
    for env_id, names in training_opponents(config).items():
        for name in names:
            registry.add_fixed(name, env_id=env_id)


def add_other_opponents(config: Config, registry: ModelRegistry) -> None:
    """Register the opponents of evaluations, and set each env's anchor."""
    for env in config.eval_envs:
        if env.num_players > 1:
            registry.eval_opponent(env.fixed_opponent)
    for env_id, name in anchors(config).items():
        registry.set_anchor(env_id, registry.add_fixed(name, active=False).uid)
