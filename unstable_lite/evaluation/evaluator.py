"""Play what an evaluation consists of: engines and no learner, adapters in the engines' slots as they are needed.

A wrong adapter must be an error, and never the base in silence. A run's canary compares engine and learner; here there
is no learner, so less is known, and this is what is checked of every adapter on every engine before it plays:

- its files are there, have the shapes of this base (the engines refuse others), and are not said to be of another one;
- each answer says that it used this adapter;
- its answers to fixed prompts, sampled with fixed seeds, have other tokens or other log-probabilities than the base's
  and than those of every other adapter that is loaded, unless its B matrices are all zero.

What is not checked: that the numbers are right, or that the adapter is the one that was trained under this name.
An engine that applied every adapter at half its scale would pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.config import Config, LeagueConfig, LearnerConfig, read_config
from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import AdapterError, ConfigError, RequestError, UnstableError
from unstable_lite.evaluation.cells import Cell, game_spec, in_rounds, make_cells, make_tournament
from unstable_lite.evaluation.ladder import Placed, RatedGame, make_ladder
from unstable_lite.evaluation.models import EvaluatedModel, check_base, find_run, find_sides, opponent
from unstable_lite.evaluation.results import CellEvaluation, Results, write_ladder, write_tables
from unstable_lite.games.environments import Environment
from unstable_lite.games.game_runner import GameRunner
from unstable_lite.games.isolation import opened_environments
from unstable_lite.games.seats import Seats
from unstable_lite.games.templates import format_prompt, templates_for
from unstable_lite.plan import Plan, make_plan
from unstable_lite.runtime import cancelled_by_signals, first_reason, log_file
from unstable_lite.trust import run_config
from unstable_lite.types import BASE, EvalEnvSpec, GameSpec, Generation, ModelRef, TrainEnvSpec
from unstable_lite.workers import EngineWorkers, started_engines, while_alive

PROBES = 4
PROBE_TOKENS = 16
PROBE_SEED = 1207
LEAST_GAP = 1e-6
"""In log p: what two answers of the same weights may differ by, if the base does not differ from itself by more."""
ENV_KEYS = tuple(field.name for field in fields(EvalEnvSpec) if field.name != "fixed_opponent")
"""What training and eval envs have in common."""
_ENV_WORD = re.compile(r"((?:[A-Za-z_][\w.]*:(?=[A-Za-z_]))?[^:]+)(?::(\d+)(?::([^:]+))?)?")
"""`env_id[:players[:template]]`, where `env_id` may be a user's `module:id`."""
UNLOAD_RETRIES = 60
UNLOAD_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """An evaluation that can be played."""

    plan: Plan
    cells: tuple[Cell, ...]
    games: int
    """Of each cell."""
    concurrency: int
    output: Path
    is_tournament: bool

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for all games of one output directory."""
        config = self.plan.config
        engine, opponents = config.engine, config.opponents
        return {
            "format": 2,
            "model_name": config.model_name,
            "seed": config.run.seed,
            "engine": engine.kind,
            "dtype": engine.dtype,
            "temperature": engine.temperature,
            "top_p": engine.top_p,
            "max_generation_len": engine.max_generation_len,
            "max_model_len": engine.max_model_len,
            "max_action_chars": config.run.max_action_chars,
            "opponents.base_url": opponents.base_url,
            "opponents.temperature": opponents.temperature,
            "opponents.max_tokens": opponents.max_tokens,
            "templates": config.model_dump(mode="json")["templates"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is left of an evaluation when it is over."""

    evaluations: tuple[CellEvaluation, ...]
    """Of the cells of this call."""
    ladder: tuple[Placed, ...]
    """Of a tournament."""
    played: int
    """Games of this call; the others were there already."""
    output: Path


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
    overrides: Sequence[str] = (),
    trusts_config: bool = False,
) -> EvaluationPlan:
    """Everything that `unstable-lite eval` is told, checked. Raises ConfigError with every reason against it.

    config: a TOML file; default: that of the first run among `models`.
    envs: `env_id`, `env_id:players` or `env_id:players:template`; default: the config's eval envs, else its training
    envs.
    opponents: default: each eval env's own `fixed_opponent`.
    trusts_config: use a run's config although somebody else wrote it; see `trust.run_config`.
    """
    found, others = find_sides(models, opponents)
    run = find_run(models)
    if config is None:
        if run is None:
            raise ConfigError("none of the models stands in a run directory: say with --config what base and envs are")
        config = run_config(run, overrides, trusts_config)
    given, problems = read_config(config, tuple(overrides))
    if problems or given is None:
        raise ConfigError(*problems)
    specs = _env_specs(given, envs)
    if tournament and opponents:
        raise ConfigError("a tournament's models are each other's opponents: leave --opponent out")

    def opponents_of(env: EvalEnvSpec) -> list[EvaluatedModel]:
        return others or [opponent(env.fixed_opponent)]

    if tournament:
        cells = make_tournament(found, _distinct_envs(specs))
    else:
        cells = _without_twins(make_cells(found, opponents_of, specs if not others else _distinct_envs(specs)))
    seated = {model.key: model for cell in cells for model in (cell.model, cell.opponent) if model is not None}
    rank = check_base(list(seated.values()), given)
    plan = _engine_plan(given, cells, rank)
    in_rounds(cells, plan.config.engine.max_loras)  # refuses what does not fit the slots
    return EvaluationPlan(
        plan=plan,
        cells=tuple(cells),
        games=games,
        concurrency=concurrency or given.run.num_collection_workers,
        output=output,
        is_tournament=tournament,
    )


async def evaluate(evaluation: EvaluationPlan, say: Callable[[str], None]) -> Evaluated:
    """Play the games that are not there yet, and write every table.

    Raises AdapterError for an adapter that does not fit or does not seem to be in use, EnvError for an env that keeps
    breaking, WorkerDied. What was played until then is kept.
    """
    output = evaluation.output
    results = Results(output, evaluation.settings)
    try:
        todo = {cell.key: results.missing(cell, evaluation.games) for cell in evaluation.cells}
        num_missing = sum(map(len, todo.values()))
        there = evaluation.games * len(evaluation.cells) - num_missing
        say(
            f"{len(evaluation.cells)} cells of {evaluation.games} games; {there} games are there, {num_missing} to play"
        )
        if num_missing:
            (output / "logs").mkdir(exist_ok=True)
            with log_file(output / "logs" / "evaluation.log"), cancelled_by_signals():
                await _play_all(evaluation, todo, results, say)
        evaluations = write_tables(results, evaluation.cells, evaluation.games)
        ladder: list[Placed] = []
        if evaluation.is_tournament:
            ladder = make_ladder(_rated_games(evaluation, results), evaluation.plan.config.league.trueskill_beta)
            write_ladder(output, ladder, evaluations)
    except BaseExceptionGroup as group:
        raise first_reason(group) from group
    except OSError as error:
        raise UnstableError(f"{output}: {error.strerror}; what was played is in results.jsonl") from error
    finally:
        results.close()
    return Evaluated(evaluations=tuple(evaluations), ladder=tuple(ladder), played=num_missing, output=output)


@contextlib.asynccontextmanager
async def opened(
    evaluation: EvaluationPlan, logs: Path, say: Callable[[str], None], goes_on: bool = False
) -> AsyncIterator[tuple[EngineWorkers, Seats, AdapterSlots]]:
    """Engines, seats for players, and slots for adapters. `goes_on`: with games that others began."""
    plan = evaluation.plan
    async with started_engines(plan, logs, say, goes_on) as workers:
        templates = templates_for(plan.config, workers.prompts)
        async with Seats(workers.engines.generate, templates, plan.config.opponents, say) as seats:
            env = evaluation.cells[0].env
            _, observation = Environment(env.env_id, env.num_players, seed=0).observe()
            prompt = format_prompt(env.prompt_template, observation, env.num_players, templates)
            yield workers, seats, AdapterSlots(workers, prompt)


async def _play_all(
    evaluation: EvaluationPlan, todo: dict[str, list[int]], results: Results, say: Callable[[str], None]
) -> None:
    logs, config = evaluation.output / "logs", evaluation.plan.config.run
    goes_on = sum(map(len, todo.values())) < evaluation.games * len(evaluation.cells)
    async with (
        opened_environments(logs, config.env_timeout_s) as environments,
        opened(evaluation, logs, say, goes_on) as (workers, seats, slots),
    ):
        runner = GameRunner(seats, config, environments)
        await while_alive(workers.processes, _play_rounds(evaluation, todo, slots, runner, results, say))


async def _play_rounds(
    evaluation: EvaluationPlan,
    todo: dict[str, list[int]],
    slots: AdapterSlots,
    runner: GameRunner,
    results: Results,
    say: Callable[[str], None],
) -> None:
    config = evaluation.plan.config
    cells = [cell for cell in evaluation.cells if todo[cell.key]]
    for round_ in in_rounds(cells, config.engine.max_loras):
        await slots.hold({model.key: model for cell in round_ for model in adapters_of(cell)})
        say(f"playing {_describe(round_)}")
        games = (
            (cell, game_spec(cell, number, config.run.seed, slots.ref)) for cell in round_ for number in todo[cell.key]
        )
        await _play(games, runner, results, evaluation.concurrency)


async def _play(games: Iterator[tuple[Cell, GameSpec]], runner: GameRunner, results: Results, concurrency: int) -> None:
    async def play() -> None:
        for cell, spec in games:  # shared by all
            results.add(cell, await runner.play(spec))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(play())


class AdapterSlots:
    """Which adapters the engines hold. A version is never used again: an adapter that returns gets a new one."""

    def __init__(self, workers: EngineWorkers, prompt: str) -> None:
        self._engines = workers.engines
        self._prompt = prompt
        self._has_model = workers.facts.get("model") is not None
        """The scripted engine has none, and answers the same whoever is asked."""
        self._versions: dict[str, int] = {}
        """By the model's key."""
        self._names: dict[str, str] = {}
        self._zeros = {BASE}
        """Keys of those that answer as the base does."""
        self._answers: dict[tuple[str, str], list[Generation]] = {}
        """By engine and the model's key."""
        self._gaps: dict[str, float] = {}
        """By engine: what two answers of the same weights may differ by in log p."""
        self._last_version = 0

    def ref(self, model: EvaluatedModel) -> ModelRef:
        if model.is_fixed:
            return ModelRef(uid=f"fixed-{model.name}", kind="fixed", name=model.name)
        version = 0 if model.path is None else self._versions[model.key]
        return ModelRef(uid=model.name, kind="checkpoint", adapter_version=version)

    async def hold(self, models: dict[str, EvaluatedModel]) -> None:
        """Load these adapters and try them; the others leave. Raises AdapterError."""
        for key in [key for key in self._versions if key not in models]:
            await self._unload(key)
        for key, model in models.items():
            if key not in self._versions:
                await self._load(model)
                await self._try(model)

    async def _load(self, model: EvaluatedModel) -> None:
        assert model.path is not None
        version = self._last_version = self._last_version + 1
        try:
            await self._engines.load_adapter(version, model.path)
        except* RequestError as errors:
            raise AdapterError(f"{model.name} ({model.path}): {first_reason(errors)}") from errors
        self._versions[model.key] = version
        self._names[model.key] = model.name
        if model.is_zero:
            self._zeros.add(model.key)

    async def _unload(self, key: str) -> None:
        version = self._versions.pop(key)
        self._answers = {of: answers for of, answers in self._answers.items() if of[1] != key}
        for attempt in range(UNLOAD_RETRIES):
            try:
                await self._engines.unload_adapter(version)
                return
            except* RequestError as errors:
                # A game that was given up may still have a request in an engine.
                if attempt + 1 == UNLOAD_RETRIES:
                    raise AdapterError(f"{self._names[key]} cannot be unloaded: {first_reason(errors)}") from errors
            await asyncio.sleep(UNLOAD_RETRY_S)

    async def _try(self, model: EvaluatedModel) -> None:
        """Does it answer otherwise than the base, and than the other adapters?"""
        if not self._has_model:
            return
        for engine in self._engines.engines:
            name = engine.peer.name
            if (name, BASE) not in self._answers:
                self._answers[name, BASE] = await self._ask(engine, 0)
                again = await self._ask(engine, 0)
                self._gaps[name] = max(LEAST_GAP, 4 * _gap(self._answers[name, BASE], again))
            answers = await self._ask(engine, self._versions[model.key])
            for (of, key), others in self._answers.items():
                is_other = of == name and not (model.is_zero and key in self._zeros)
                if is_other and _gap(answers, others) <= self._gaps[name]:
                    raise AdapterError(
                        f"{name} answers as {self._names.get(key, 'the base model')} where {model.name} "
                        f"({model.path}) is asked for, over {PROBES} answers. Either it serves the wrong weights, "
                        "or the two are too alike to be told apart at this precision; engine.dtype = 'float32' tells "
                        "which"
                    )
            self._answers[name, model.key] = answers

    async def _ask(self, engine: EngineClient, version: int) -> list[Generation]:
        asked = [
            engine.generate(self._prompt, version, seed=PROBE_SEED + index, max_tokens=PROBE_TOKENS)
            for index in range(PROBES)
        ]
        return list(await asyncio.gather(*asked))


def _gap(some: Sequence[Generation], others: Sequence[Generation]) -> float:
    """Largest |Δ log p| between the same answers; infinite where they are not the same tokens."""
    gap = 0.0
    for one, other in zip(some, others, strict=True):
        if not np.array_equal(one.completion_ids, other.completion_ids):
            return float("inf")
        gap = max(gap, float(np.abs(one.logprobs - other.logprobs).max()))
    return gap


def _env_specs(config: Config, words: Sequence[str]) -> list[EvalEnvSpec]:
    """One for each env and each opponent that the config gives it. Raises ConfigError."""
    known: dict[str, list[EvalEnvSpec]] = {}
    for spec in config.eval_envs:
        known.setdefault(spec.env_id, []).append(spec)
    for train in config.train_envs:
        if train.env_id not in known:
            known[train.env_id] = [_as_eval(train, config.league.fixed_opponents)]
    if not words:
        return list(config.eval_envs) or [spec for specs in known.values() for spec in specs]
    specs: list[EvalEnvSpec] = []
    for word in words:
        match = _ENV_WORD.fullmatch(word)
        if match is None:
            raise ConfigError(f"--env {word}: write env_id, env_id:players or env_id:players:template")
        env_id, players, template = match.groups()
        like = known.get(env_id) or [
            replace(_as_eval(config.train_envs[0], config.league.fixed_opponents), env_id=env_id)
        ]
        for spec in like:
            num_players = int(players) if players else spec.num_players
            specs.append(replace(spec, num_players=num_players, prompt_template=template or spec.prompt_template))
    return specs


def _as_eval(train: TrainEnvSpec, fixed_opponents: Sequence[str]) -> EvalEnvSpec:
    opponent = fixed_opponents[0] if fixed_opponents else "scripted:random"
    return EvalEnvSpec(fixed_opponent=opponent, **{name: getattr(train, name) for name in ENV_KEYS})


def _distinct_envs(specs: Sequence[EvalEnvSpec]) -> list[EvalEnvSpec]:
    """Once each, whoever the opponents were."""
    return list({replace(spec, fixed_opponent=""): spec for spec in specs}.values())


def _without_twins(cells: Sequence[Cell]) -> list[Cell]:
    return list({cell.key: cell for cell in cells}.values())


def _engine_plan(config: Config, cells: Sequence[Cell], rank: int) -> Plan:
    """The part of a config that an evaluation needs, with the engines on every device that training would use.

    Raises ConfigError with every problem of its envs, templates, opponents, engine and devices.
    """
    envs = list(dict.fromkeys(replace(cell.env, fixed_opponent="") for cell in cells))
    fixed = dict.fromkeys(
        replace(cell.env, fixed_opponent=model.name)
        for cell in cells
        for model in (cell.model, cell.opponent)
        if model is not None and model.is_fixed
    )
    mirror = tuple(
        TrainEnvSpec(num_actors=env.num_players, **{name: getattr(env, name) for name in ENV_KEYS}) for env in envs
    )
    mode = "sync" if config.run.mode == "sync" else "auto"  # the others are about a learner
    run = {
        "mode": mode,
        "group_size": 1,
        "eval_games": 0,
        "eval_every": None,
        "num_eval_workers": 1,
        "max_eval_games_per_ckpt": None,
    }
    lora = {"lora_rank": rank, "initial_lora_path": None, "initial_critic_path": None}
    plan = make_plan(
        # What concerns learning alone is left at its defaults: it may fit no other algorithm, or not this machine.
        Config(
            model_name=config.model_name,
            trust_remote_code=config.trust_remote_code,
            run=config.run.model_copy(update=run),
            engine=config.engine,
            learner=LearnerConfig(devices=("cpu",)),
            lora=config.lora.model_copy(update=lora),
            league=LeagueConfig(fixed_opponents=(), trueskill_beta=config.league.trueskill_beta),
            opponents=config.opponents,
            templates=config.templates,
            train_envs=mirror,
            eval_envs=tuple(fixed),
        ),
        side_by_side=False,
    )
    if config.engine.threads or "cpu" not in plan.engine_devices:
        return plan
    # No learner takes its share of the cores.
    return replace(plan, engine_threads=max(1, len(os.sched_getaffinity(0)) // plan.engine_devices.count("cpu")))


def adapters_of(cell: Cell) -> list[EvaluatedModel]:
    return [model for model in (cell.model, cell.opponent) if model is not None and model.path is not None]


def _rated_games(evaluation: EvaluationPlan, results: Results) -> list[RatedGame]:
    return [
        RatedGame(cell.env.env_id, cell.model.name, cell.opponent_name, row["outcome"])
        for cell in evaluation.cells
        for row in results.rows(cell, evaluation.games)
        if row["end"] != "void"
    ]


def _describe(cells: Sequence[Cell]) -> str:
    names = [f"{cell.model.name} against {cell.opponent_name} in {cell.env.env_id}" for cell in cells]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
