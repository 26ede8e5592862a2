"""Samplers by their names in a config, and the checks of that config."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from unstable_lite import plugins
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import add_training_opponents, strategies, training_opponents, uses_fixed
from unstable_lite.league.samplers.env_samplers import (
    BaseEnvSampler,
    LearningProgressEnvSampler,
    RoundRobinEnvSampler,
    UniformRandomEnvSampler,
    WeightedEnvSampler,
)
from unstable_lite.league.samplers.model_samplers import (
    BaseModelSampler,
    BiasedRatingDistanceModelSampler,
    FixedOpponentModelSampler,
    LaggedModelSampler,
    MatchQualityModelSampler,
    MirrorModelSampler,
    MixtureModelSampler,
    NoOpponentModelSampler,
    PrioritizedFictitiousModelSampler,
    RandomModelSampler,
    RatingDistanceModelSampler,
    UniformModelSampler,
    WeightedModelSampler,
)
from unstable_lite.rng import derive_seed

T = TypeVar("T")

__all__ = [
    "ENV_SAMPLERS",
    "MODEL_SAMPLERS",
    "BaseEnvSampler",
    "BaseModelSampler",
    "BiasedRatingDistanceModelSampler",
    "FixedOpponentModelSampler",
    "LaggedModelSampler",
    "LearningProgressEnvSampler",
    "MatchQualityModelSampler",
    "MirrorModelSampler",
    "MixtureModelSampler",
    "NoOpponentModelSampler",
    "PrioritizedFictitiousModelSampler",
    "RandomModelSampler",
    "RatingDistanceModelSampler",
    "RoundRobinEnvSampler",
    "UniformModelSampler",
    "UniformRandomEnvSampler",
    "WeightedEnvSampler",
    "WeightedModelSampler",
    "build_env_sampler",
    "build_model_sampler",
    "check_league",
]

ENV_SAMPLERS: dict[str, Callable[..., BaseEnvSampler]] = {
    "random": UniformRandomEnvSampler,
    "weighted": WeightedEnvSampler,
    "round-robin": RoundRobinEnvSampler,
    "learning-progress": LearningProgressEnvSampler,
}
MODEL_SAMPLERS: dict[str, Callable[..., BaseModelSampler]] = {
    "none": NoOpponentModelSampler,
    "mirror": MirrorModelSampler,
    "fixed": FixedOpponentModelSampler,
    "lagged": LaggedModelSampler,
    "uniform": UniformModelSampler,
    "random": RandomModelSampler,
    "match-quality": MatchQualityModelSampler,
    "ts-dist": RatingDistanceModelSampler,
    "ts-dist-biased": BiasedRatingDistanceModelSampler,
    "pfsp": PrioritizedFictitiousModelSampler,
}


def build_env_sampler(config: Config) -> BaseEnvSampler:
    """Build the sampler of envs. Raises ConfigError for an unknown name or option."""
    strategy = config.league.env_sampling_strategy
    ((name, options),) = [(strategy, {})] if isinstance(strategy, str) else strategy.items()
    sampler = plugins.find("env_sampling_strategy", name, ENV_SAMPLERS)
    rng_seed = derive_seed(config.run.seed, "env_sampler")
    with_envs = partial(sampler, config.train_envs, config.eval_envs, rng_seed=rng_seed)
    return _made("env_sampling_strategy", name, with_envs, options, BaseEnvSampler)


def build_model_sampler(config: Config, registry: ModelRegistry, rng: random.Random) -> BaseModelSampler:
    """Build the sampler of opponents, and register the fixed opponents of each env if the strategy may use them.

    A custom class gets `(registry, rng)` and its options. Raises ConfigError for a wrong name, weight or option.
    """

    league = config.league

    def build(name: str, options: Mapping[str, Any]) -> BaseModelSampler:
        sampler = plugins.find("opponent_sampling_strategy", name, MODEL_SAMPLERS)
        given = {"lag_range": league.opponent_lag} if sampler is LaggedModelSampler else {}
        with_registry = partial(sampler, registry, rng, **given)
        return _made("opponent_sampling_strategy", name, with_registry, options, BaseModelSampler)

    add_training_opponents(config, registry)
    if isinstance(league.opponent_sampling_strategy, str):
        return build(league.opponent_sampling_strategy, {})
    samplers, weights = [], []
    problems: list[str] = []
    for name, options in strategies(league).items():
        weight = options.pop("weight")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            problems.append(
                f"opponent_sampling_strategy: the weight of {name!r} is {weight!r}; set a finite number above 0"
            )
        try:
            samplers.append(build(name, options))
            weights.append(weight)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return MixtureModelSampler(registry, rng, samplers, weights)


def _made(key: str, name: str, sampler: Callable[..., T], options: Mapping[str, Any], base: type[T]) -> T:
    made = plugins.call(key, name, sampler, options)
    if not isinstance(made, base):
        raise ConfigError(f"{key} {name!r} must be a class that extends unstable_lite.samplers.{base.__name__}")
    return made


def check_league(config: Config) -> list[str]:
    """Return every problem of opponents and envs that would stop or mislead the run."""
    problems = [*_opponent_problems(config), *_sampler_problems(config), *_env_problems(config)]
    return list(dict.fromkeys(problems))


def _opponent_problems(config: Config) -> Iterator[str]:
    league, names = config.league, strategies(config.league)
    if not names:
        yield "opponent_sampling_strategy is an empty table: give at least one strategy a weight"
    if "none" in names and league.opponent_sampling_strategy != "none":
        yield "opponent_sampling_strategy: 'none' is not an opponent and cannot be part of a mixture"
    least, most = league.opponent_lag
    if not 0 <= least <= most:
        yield f"opponent_lag = [{least}, {most}]: must be [least, most] with 0 <= least <= most"
    if "fixed" in names:
        for env_id, opponents in training_opponents(config).items():
            if not opponents:
                yield f"opponent_sampling_strategy uses 'fixed', but fixed_opponents of train env {env_id!r} is empty"


def _sampler_problems(config: Config) -> Iterator[str]:
    """Yield the problems of both strategies; build and try the samplers of those whose form is right."""
    for key, try_out in (
        ("env_sampling_strategy", _try_env_sampler),
        ("opponent_sampling_strategy", _try_model_sampler),
    ):
        strategy = getattr(config.league, key)
        problems = _shape_problems(key, strategy)
        if not problems and strategy != {}:
            try:
                try_out(config)
            except ConfigError as error:
                problems = list(error.problems)
        yield from problems


def _env_problems(config: Config) -> Iterator[str]:
    for spec in config.train_envs:
        if not 1 <= spec.num_actors <= spec.num_players:
            yield (
                f"train env {spec.env_id!r}: num_actors = {spec.num_actors} must be between 1 and "
                f"num_players = {spec.num_players}"
            )
        elif spec.fixed_opponents is not None and spec.num_actors == spec.num_players:
            yield (
                f"train env {spec.env_id!r}: fixed_opponents are never met, because num_actors = num_players gives "
                "every seat to the current policy; leave them out, or lower num_actors"
            )
        elif config.league.opponent_sampling_strategy == "none" and spec.num_actors < spec.num_players:
            yield (
                f"train env {spec.env_id!r}: num_actors = {spec.num_actors} of {spec.num_players} players, "
                "but opponent_sampling_strategy is 'none'; choose another, or set num_actors = num_players"
            )
        elif spec.fixed_opponents is not None and not uses_fixed(config.league):
            yield (
                f"train env {spec.env_id!r}: fixed_opponents are never met, because opponent_sampling_strategy = "
                f"{config.league.opponent_sampling_strategy!r} draws none of them; leave them out, or use 'fixed', too"
            )
    for eval_spec in config.eval_envs:
        if eval_spec.num_players < 1:
            yield f"eval env {eval_spec.env_id!r}: num_players = {eval_spec.num_players} must be at least 1"


def _shape_problems(what: str, strategy: str | Mapping[str, Any]) -> list[str]:
    """Return the problem of a strategy whose form is wrong for any sampler."""
    if isinstance(strategy, str):
        return []
    if isinstance(name := strategy.get("name"), str):
        return [f"{what}: write the options under the sampler's name: {{ {name} = {{ … }} }}"]
    if what == "env_sampling_strategy" and len(strategy) != 1:
        return [f"{what}: a table must hold one name with its options: {{ weighted = {{ … }} }}"]
    if what == "env_sampling_strategy" and not all(isinstance(options, Mapping) for options in strategy.values()):
        return [f"{what}: the options must be a table: {{ {next(iter(strategy))} = {{ … }} }}"]
    return []


def _try_env_sampler(config: Config) -> None:
    """Build the sampler of envs and draw once."""
    sampler = build_env_sampler(config)
    if config.train_envs:
        plugins.call("env_sampling_strategy", sampler.kind, partial(sampler.sample, "train"), {})


def _try_model_sampler(config: Config) -> None:
    """Build the sampler of opponents; draw once from each custom one in each env, as at a run's start."""
    sampler = build_model_sampler(config, ModelRegistry(), random.Random(0))
    for each in sampler.samplers if isinstance(sampler, MixtureModelSampler) else [sampler]:
        for spec in config.train_envs:
            if type(each) not in MODEL_SAMPLERS.values() and spec.num_actors < spec.num_players:
                draw = partial(each.sample_opponent, spec.env_id)
                plugins.call("opponent_sampling_strategy", each.kind, draw, {})
