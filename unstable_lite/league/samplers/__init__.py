"""Samplers by their names in a config, and the checks of that config."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from unstable_lite import plugins
from unstable_lite.config import Config
from unstable_lite.config.games import is_policy, parse_player
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import add_training_opponents, by_policy, strategies, training_opponents, uses_fixed
from unstable_lite.league.samplers.env_samplers import *  # noqa: F403
from unstable_lite.league.samplers.env_samplers import ENV_SAMPLERS, BaseEnvSampler, is_weight
from unstable_lite.league.samplers.model_samplers import *  # noqa: F403
from unstable_lite.league.samplers.model_samplers import (
    MODEL_SAMPLERS,
    BaseModelSampler,
    LaggedModelSampler,
    MixtureModelSampler,
    OtherPolicyModelSampler,
)
from unstable_lite.rng import derive_seed

T = TypeVar("T")
ENV, OPPONENT = "env_sampling_strategy", "opponent_sampling_strategy"


def build_env_sampler(config: Config) -> BaseEnvSampler:
    """Build the sampler of envs. Raises ConfigError for an unknown name or option."""
    strategy = config.league.env_sampling_strategy
    ((name, options),) = [(strategy, {})] if isinstance(strategy, str) else strategy.items()
    sampler = plugins.find(ENV, name, ENV_SAMPLERS)
    rng_seed = derive_seed(config.run.seed, "env_sampler")
    with_envs = partial(sampler, config.train_envs, config.eval_envs, rng_seed=rng_seed)
    return _made(ENV, name, with_envs, options, BaseEnvSampler)


def build_model_sampler(config: Config, registry: ModelRegistry, rng: random.Random) -> BaseModelSampler:
    """Build the sampler of opponents, and register the fixed opponents of each env if the strategy may use them.

    A custom class gets `(registry, rng)` and its options. Raises ConfigError for a wrong name, weight or option.
    """
    league, problems = config.league, list[str]()
    samplers, weights = [], []
    add_training_opponents(config, registry)
    for name, options in strategies(league).items():
        weight = options.pop("weight")
        if not is_weight(weight):
            problems.append(f"{OPPONENT}: the weight of {name!r} is {weight!r}; set a finite number above 0")
        try:
            sampler = OtherPolicyModelSampler if is_policy(name) else plugins.find(OPPONENT, name, MODEL_SAMPLERS)
            given: dict[str, Any] = {"lag_range": league.opponent_lag} if sampler is LaggedModelSampler else {}
            given |= {"policy": parse_player(name).rest} if is_policy(name) else {}
            samplers.append(_made(OPPONENT, name, partial(sampler, registry, rng, **given), options, BaseModelSampler))
            weights.append(weight)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    is_mixture = isinstance(league.opponent_sampling_strategy, Mapping)
    return MixtureModelSampler(registry, rng, samplers, weights) if is_mixture else samplers[0]


def _made(key: str, name: str, sampler: Callable[..., T], options: Mapping[str, Any], base: type[T]) -> T:
    made = plugins.call(key, name, sampler, options)
    if not isinstance(made, base):
        raise ConfigError(f"{key} {name!r} must be a class that extends unstable_lite.samplers.{base.__name__}")
    return made


def check_league(config: Config) -> list[str]:
    """Return every problem of opponents and envs that would stop or mislead the run."""
    problems = by_policy(config, _policy_problems) + _strategy_problems(config, ENV, _try_env_sampler)
    for eval_spec in config.eval_envs:
        if eval_spec.num_players < 1:
            problems.append(f"eval env {eval_spec.env_id!r}: num_players = {eval_spec.num_players} must be at least 1")
    return list(dict.fromkeys(problems))


def _policy_problems(config: Config) -> Iterator[str]:
    yield from _opponent_problems(config)
    yield from _strategy_problems(config, OPPONENT, _try_model_sampler)
    yield from _env_problems(config)


def _opponent_problems(config: Config) -> Iterator[str]:
    league, names = config.league, strategies(config.league)
    if not names:
        yield f"{OPPONENT} is an empty table: give at least one strategy a weight"
    if "none" in names and league.opponent_sampling_strategy != "none":
        yield f"{OPPONENT}: 'none' is not an opponent and cannot be part of a mixture"
    try:
        LaggedModelSampler(ModelRegistry(), random.Random(0), league.opponent_lag)
    except ConfigError as error:
        yield from error.problems
    if "fixed" in names:
        for env_id, opponents in training_opponents(config).items():
            if not opponents:
                yield f"{OPPONENT} uses 'fixed', but fixed_opponents of train env {env_id!r} is empty"


def _strategy_problems(config: Config, key: str, try_out: Callable[[Config], None]) -> list[str]:
    """Return the problem of a strategy's form, or else those of building its sampler and drawing from it."""
    strategy = getattr(config.league, key)
    if isinstance(strategy, Mapping):
        if isinstance(name := strategy.get("name"), str):
            return [f"{key}: write the options under the sampler's name: {{ {name} = {{ … }} }}"]
        if key == ENV and (len(strategy) != 1 or not isinstance(next(iter(strategy.values())), Mapping)):
            return [f"{key}: a table must hold one name with the table of its options: {{ weighted = {{ … }} }}"]
        if not strategy:
            return []  # one of the opponents' problems
    try:
        try_out(config)
    except ConfigError as error:
        return list(error.problems)
    return []


def _try_env_sampler(config: Config) -> None:
    sampler = build_env_sampler(config)
    if config.train_envs:
        plugins.call(ENV, sampler.kind, partial(sampler.sample, "train"), {})


def _try_model_sampler(config: Config) -> None:
    """Draw once from each custom sampler in each env, as at a run's start."""
    sampler = build_model_sampler(config, ModelRegistry(), random.Random(0))
    for each in sampler.samplers if isinstance(sampler, MixtureModelSampler) else [sampler]:
        for spec in config.train_envs:
            if type(each) not in MODEL_SAMPLERS.values() and spec.num_drawn:
                plugins.call(OPPONENT, each.kind, partial(each.sample_opponent, spec.env_id), {})


def _env_problems(config: Config) -> Iterator[str]:
    strategy = config.league.opponent_sampling_strategy
    for spec in config.train_envs:
        where, has_own_opponents = f"train env {spec.env_id!r}", spec.fixed_opponents is not None
        if not 1 <= spec.num_actors <= spec.num_players:
            yield (f"{where}: num_actors = {spec.num_actors} must be between 1 and num_players = {spec.num_players}")
        elif has_own_opponents and not spec.num_drawn:
            key = "`seats`" if spec.seats else "num_actors = num_players"
            yield f"{where}: fixed_opponents are never met, because {key} gives every seat to a policy; leave them out"
        elif strategy == "none" and spec.num_drawn:
            yield (
                f"{where}: num_actors = {spec.num_actors} of {spec.num_players} players, but {OPPONENT} is 'none'; "
                "choose another, or set num_actors = num_players"
            )
        elif has_own_opponents and not uses_fixed(config.league):
            yield (
                f"{where}: fixed_opponents are never met, because {OPPONENT} = {strategy!r} draws none of them; leave "
                "them out, or use 'fixed', too"
            )
