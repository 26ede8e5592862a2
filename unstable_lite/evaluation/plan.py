"""Turn the arguments of an evaluation into cells of games and a plan for its engines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import copies_of
from unstable_lite.config import Config
from unstable_lite.config.env_ids import canonical_env_id, is_openspiel, is_questions
from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, TrainEnvSpec, eval_temperature
from unstable_lite.config.training import LearnerConfig
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.absolute_ladder import ANCHOR, RUNGS
from unstable_lite.evaluation.cells import Cell, in_rounds, make_cells, make_ladder_cells, make_tournament
from unstable_lite.evaluation.models import EvaluatedModel, check_base, find_run, find_sides, opponent
from unstable_lite.planning.plan import Plan, checked_config, make_engine_plan
from unstable_lite.planning.trust import run_config
from unstable_lite.planning.validation import why_not_seated
from unstable_lite.types import BASE

_ENV_WORD = re.compile(r"((?:questions:|[A-Za-z_][\w.]*:(?=[A-Za-z_]))?[^:]+)(?::(\d+)(?::([^:]+))?)?")
"""Pattern of `env_id[:players[:template]]`, where `env_id` may be `module:id`, `openspiel:game` or
`questions:path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """Evaluation that can be played."""

    plan: Plan
    cells: tuple[Cell, ...]
    games: int
    """Number of games of each cell."""
    concurrency: int
    output: Path
    is_tournament: bool
    is_ladder: bool = False
    """Whether the opponents are the rungs of `absolute_ladder`."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that all games of one output directory share."""
        config = self.plan.config
        sampling = ("dtype", "temperature", "top_p", "max_generation_len", "max_model_len")
        answers = ("base_url", "temperature", "max_tokens")
        return {
            "format": 2,
            "model_name": config.model_name,
            "seed": config.run.seed,
            "engine": config.engine.kind,
            **{key: getattr(config.engine, key) for key in sampling},
            **({"thinking_tokens": config.engine.thinking_tokens} if config.engine.thinking_tokens else {}),
            "max_action_chars": config.run.max_action_chars,
            **{f"opponents.{key}": getattr(config.opponents, key) for key in answers},
            "templates": config.model_dump(mode="json")["templates"],
        }


def plan_evaluation(
    models: Sequence[str],
    *,
    output: Path,
    config: Path | None = None,
    envs: Sequence[str] = (),
    opponents: Sequence[str] = (),
    games: int = 200,
    concurrency: int | None = None,
    tournament: bool = False,
    ladder: bool = False,
    temperature: float | None = None,
    overrides: Sequence[str] = (),
    trusts_config: bool = False,
) -> EvaluationPlan:
    """Return a checked evaluation, for the arguments of `unstable-lite eval`. Raises ConfigError with every problem.

    config: a TOML file; default: that of the first run among `models`.
    envs: `env_id`, `env_id:players` or `env_id:players:template`; default: the config's eval envs, else its training
    envs.
    opponents: default: each eval env's own `fixed_opponent`.
    temperature: sampling temperature in every env, 0 for greedy; default: each eval env's, else the config's.
    ladder: rate the models and the base against the rungs of `absolute_ladder`.
    trusts_config: use a run's config although another user wrote it; see `trust.run_config`.
    """
    if (tournament or ladder) and opponents:
        who = "the rungs of a ladder are its opponents" if ladder else "the models of a tournament play each other"
        raise ConfigError(f"{who}: leave out --opponent")
    if tournament and ladder:
        raise ConfigError("--tournament and --ladder are two evaluations: name one of them")
    found, others = find_sides([*models, BASE] if ladder else models, RUNGS if ladder else opponents)
    run = find_run(models)
    if config is None:
        if run is None:
            raise ConfigError("none of the models is in a run directory: name base and envs with --config")
        config = run_config(run, overrides, trusts_config)
    given = checked_config(config, overrides)
    specs = _env_specs(given, envs)
    if temperature is not None:
        try:
            specs = [spec.model_copy(update={"temperature": eval_temperature(temperature)}) for spec in specs]
        except ValueError as error:
            raise ConfigError(f"--temperature {temperature:g}: {error}") from None
    if tournament or others:
        specs = _distinct_envs(specs)
    if ladder and (problems := [*_ladder_problems(specs, given)]):
        raise ConfigError(*problems)

    own = {} if tournament or others else _own_opponents(specs, copies_of(config))

    def opponents_of(env: EvalEnvSpec) -> list[EvaluatedModel]:
        return others or [own[env.fixed_opponent]]

    if tournament:
        cells = make_tournament(found, specs)
    elif ladder:
        cells = make_ladder_cells(found, others, specs)
    else:
        cells = list({cell.key: cell for cell in make_cells(found, opponents_of, specs)}.values())
    seated = {model.key: model for cell in cells for model in cell.models}
    plan = _engine_plan(given, cells, check_base(list(seated.values()), given))
    in_rounds(cells, plan.config.engine.max_loras)  # refuses adapters that do not fit the slots
    return EvaluationPlan(
        plan=plan,
        cells=tuple(cells),
        games=games,
        concurrency=concurrency or given.run.num_collection_workers,
        output=output,
        is_tournament=tournament,
        is_ladder=ladder,
    )


def _ladder_problems(specs: Sequence[EvalEnvSpec], config: Config) -> Iterator[str]:
    """Yield the reason for each env that has no ladder."""
    for spec in specs:
        if spec.num_players != 2:
            yield f"--ladder rates players of two-player games, and {spec.env_id} has {spec.num_players}; leave it out"
        elif (reason := why_not_seated(ANCHOR, spec, config.opponents)) is not None:
            yield f"--ladder: {reason}; name a game that it can play with --env openspiel:NAME"
    for env_id, times in Counter(spec.env_id for spec in specs).items():
        if times > 1:
            yield (
                f"--ladder: {env_id} is given with {times} templates or settings; name one: --env env_id:2:template, "
                "--temperature"
            )


def _env_specs(config: Config, words: Sequence[str]) -> list[EvalEnvSpec]:
    """Return an eval spec for each env and each of its opponents in the config. Raises ConfigError."""
    known: dict[str, list[EvalEnvSpec]] = {}
    for spec in config.eval_envs:
        known.setdefault(spec.env_id, []).append(spec)
    for train in config.train_envs:
        if train.env_id not in known:
            known[train.env_id] = [_as_eval(train, config.league)]
    if not words:
        return list(config.eval_envs) or [spec for specs in known.values() for spec in specs]
    specs: list[EvalEnvSpec] = []
    for word in words:
        match = _ENV_WORD.fullmatch(word)
        if match is None:
            raise ConfigError(f"--env {word}: write env_id, env_id:players or env_id:players:template")
        spelled, players, template = match.groups()
        try:
            env_id = canonical_env_id(spelled)
        except ValueError as error:
            raise ConfigError(f"--env {word}: {error}") from None
        given: dict[str, Any] = {"env_id": env_id}
        given |= {"num_players": int(players)} if players else {}
        given |= {"prompt_template": template} if template else {}
        like = known.get(env_id) or [_as_eval(config.train_envs[0], config.league)]
        if env_id not in known:  # another game: keep only the way of asking
            given |= {"reward_scale": None, "env_kwargs": (), "error_allowance": 0}
            given |= {"observation": "env"} if is_openspiel(env_id) else {}
            given = {"observation": "env", "num_players": 1} | given if is_questions(env_id) else given
        specs += [spec.model_copy(update=given) for spec in like]
    return specs


def _as_eval(train: TrainEnvSpec, league: LeagueConfig) -> EvalEnvSpec:
    opponent = next(iter(league.opponents_in(train)), "scripted:random")
    return EvalEnvSpec(fixed_opponent=opponent, **train.model_dump(exclude={"num_actors", "fixed_opponents"}))


def _distinct_envs(specs: Sequence[EvalEnvSpec]) -> list[EvalEnvSpec]:
    """Return each env once, regardless of its opponents."""
    return list({spec.model_copy(update={"fixed_opponent": ""}): spec for spec in specs}.values())


def _own_opponents(specs: Sequence[EvalEnvSpec], copies: Path | None) -> dict[str, EvaluatedModel]:
    """Return the model of each `fixed_opponent` by its name, read once. Raises ConfigError with every problem."""
    found: dict[str, EvaluatedModel] = {}
    problems: list[str] = []
    for name in dict.fromkeys(spec.fixed_opponent for spec in specs if spec.num_players > 1):
        try:
            found[name] = opponent(name, copies)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return found


def _engine_plan(config: Config, cells: Sequence[Cell], rank: int) -> Plan:
    """Return a plan of engines for the envs and models of `cells`; see `plan_engines`."""
    played = dict.fromkeys(
        cell.env.model_copy(update={"fixed_opponent": name})
        for cell in cells
        for name in [model.name for model in cell.models if model.is_fixed] or [BASE]
    )
    first = cells[0].env
    train_env = TrainEnvSpec(
        num_actors=first.num_players, **first.model_dump(exclude={"fixed_opponent", "temperature", "top_p"})
    )
    return plan_engines(config, rank, train_env, tuple(played))


def plan_engines(config: Config, rank: int, train_env: TrainEnvSpec, eval_envs: tuple[EvalEnvSpec, ...] = ()) -> Plan:
    """Return a plan of engines for adapters up to `rank`, on every device that the config gives to engines or learner.

    Raises ConfigError with every problem of the envs, their templates and opponents, the engine and the devices.
    """
    return make_engine_plan(
        config.model_copy(
            update={
                "engine": config.engine.model_copy(update={"when_shared": "split"}),
                "learner": LearnerConfig(devices=config.learner.devices),  # the other keys may not fit this machine
                "lora": config.lora.model_copy(update={"lora_rank": rank, "initial_lora_path": None}),
                "train_envs": (train_env,),  # a config has at least one
                "eval_envs": eval_envs,
            }
        )
    )
