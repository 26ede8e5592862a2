"""Opponents of a config: which of them each env and policy may meet, and how fixed ones enter the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from unstable_lite.adapters.frozen import members
from unstable_lite.config import Config
from unstable_lite.config.games import LeagueConfig, is_policy, parse_player
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


def draws_fixed(name: str) -> bool:
    """Return whether the sampler may draw `fixed_opponents`; a custom one may draw any model of the registry."""
    return name not in ("none", "mirror", "lagged", "uniform", "population") and not is_policy(name)


def uses_fixed(league: LeagueConfig) -> bool:
    return any(map(draws_fixed, strategies(league)))


def uses_checkpoints(league: LeagueConfig) -> bool:
    """Return whether the policy's own checkpoints before the current one may be drawn."""
    return any(
        name not in ("none", "mirror", "fixed", "population") and not is_policy(name) for name in strategies(league)
    )


def policies_met(config: Config) -> set[str]:
    """Return the policies that strategies may draw: `main`, or `main/past` for its checkpoints."""
    names = (name for own in _drawing(config) for name in filter(is_policy, strategies(own.league)))
    return {parse_player(name).rest for name in names}


def draws_population(config: Config) -> bool:
    """Return whether the strategy of some policy draws players that were kept."""
    return any("population" in strategies(own.league) for own in _drawing(config))


def kept_policies(config: Config) -> set[str]:
    """Return the policies whose last checkpoint of a lineage stays a player, because some policy draws such players."""
    rules = {name: policy.restart for name, policy in config.policies.items()}
    return {name for name, rule in rules.items() if rule is not None and rule.keeps and draws_population(config)}


def _drawing(config: Config) -> Iterator[Config]:
    """Yield the config of each policy that has a training env with opponents."""
    return (own for own in map(config.of_policy, config.shares) if any(env.num_drawn for env in own.train_envs))


def by_policy(config: Config, find: Callable[[Config], Iterable[str]]) -> list[str]:
    """Return the problems that `find` returns for the config of each policy, with the names of the policies.

    A problem that all policies have is reported once, without a name.
    """
    found = dict[str, dict[str, None]]()
    for name in config.shares:
        for text in find(config.of_policy(name)):
            found.setdefault(text, {})[name] = None
    num = len(config.shares)
    return [text if len(of) == num else f"policies.{', '.join(of)}: {text}" for text, of in found.items()]


def training_opponents(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the fixed opponents that a policy's strategy may draw, by the id of each training env with opponents."""
    met = dict[str, tuple[str, ...]]()
    for own in map(config.of_policy, config.shares):
        if uses_fixed(own.league):
            met |= {env.env_id: own.league.opponents_in(env) for env in own.train_envs if env.num_drawn}
    return met


def evaluated_opponents(config: Config) -> Iterator[tuple[str, str]]:
    """Yield env id and name of the fixed opponent of each eval env; policies of the run are left out."""
    for env in config.eval_envs:
        if env.num_players > 1 and not is_policy(env.fixed_opponent):
            yield env.env_id, env.fixed_opponent


def met_opponents(config: Config) -> list[str]:
    """Return the names of the fixed opponents that a run may meet."""
    trained = [name for names in training_opponents(config).values() for name in names]
    return list(dict.fromkeys([*trained, *(name for _, name in evaluated_opponents(config))]))


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
    trained = ((env_id, name) for env_id, names in training_opponents(config).items() for name in names)
    for env_id, name in (*evaluated_opponents(config), *trained):
        met.setdefault(env_id, []).append(name)
    return {
        env_id: min(names, key=lambda name: (name != "scripted:random", parse_player(name).is_frozen))
        for env_id, names in met.items()
    }


def add_training_opponents(config: Config, registry: ModelRegistry) -> None:
    """Register the fixed opponents of each training env, if the strategy may draw them."""
    for env_id, names in training_opponents(config).items():
        for name in names:
            registry.add_fixed(name, env_id=env_id)


def add_other_opponents(config: Config, registry: ModelRegistry) -> None:
    """Register the opponents of evaluations, and set each env's anchor."""
    for _, name in evaluated_opponents(config):
        registry.eval_opponent(name)
    for env_id, name in anchors(config).items():
        registry.set_anchor(env_id, registry.add_fixed(name, active=False).uid)
