"""Turn the arguments of an evaluation into cells (a model, its opponent, an env), their games, and a plan of engines.

Game number k of an env has the same seed and the same seat for every model, and each seed is played from every seat, so
that every model plays the same games. The sampling itself is not seeded here.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import copies_of
from unstable_lite.config import Config
from unstable_lite.config.env_ids import canonical_env_id, content_file, is_built_in, is_judged
from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec, eval_temperature, evaluated_against, parse_player
from unstable_lite.config.training import LearnerConfig
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.models import NO_OPPONENT, EvaluatedModel, check_base, find_run, find_sides, opponent
from unstable_lite.games.questions import read_questions
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.planning.plan import Plan, checked_config, make_engine_plan
from unstable_lite.planning.trust import run_config
from unstable_lite.planning.validation import why_not_seated
from unstable_lite.rng import derive_seed, question_seed
from unstable_lite.rollout.run_game import MAX_ACTION_CHARS
from unstable_lite.types import BASE, GameSpec, ModelRef

_ENV_WORD = re.compile(r"((?:questions:|[A-Za-z_][\w.]*:(?=[A-Za-z_]))?[^:]+)(?::(\d+)(?::([^:]+))?)?")
"""Pattern of `env_id[:players[:template]]`, where `env_id` may be `module:id`, `openspiel:game` or
`questions:path`."""
ANCHOR = "scripted:mcts:10"
"""Player whose rating on the ladder is 0."""
RUNGS = ("scripted:random", ANCHOR, "scripted:mcts:100", "scripted:mcts:1000")
"""Players that a ladder rates models against."""
JOINT = " | "
"""Separator of the parts of a cell's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Contents of a cell's key, for cells known only from their results."""

    model_key: str
    opponent_key: str
    env_id: str
    num_players: int
    prompt_template: str
    other_settings: str
    """All other env settings that differ from their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`model` at one seat of `env`, `opponent` at all others."""

    model: EvaluatedModel
    opponent: EvaluatedModel
    env: EvalEnvSpec

    @property
    def key(self) -> str:
        """Identity of the cell: independent of the models' names, without env settings left at their defaults."""
        shown = self.env.model_dump()
        played_how = [
            f"{name}={shown[name]}"
            for name, field in EvalEnvSpec.model_fields.items()
            if name != "fixed_opponent" and getattr(self.env, name) != field.default
        ]
        if content_file(self.env.env_id):  # a file that changed is another env
            played_how.append(f"sha256={read_questions(self.env.env_id).sha256[:16]}")
        return JOINT.join((self.model.key, self.opponent.key, *played_how))

    @property
    def title(self) -> str:
        return f"{self.model.name} against {self.opponent.name}"

    @property
    def models(self) -> tuple[EvaluatedModel, EvaluatedModel]:
        return self.model, self.opponent

    @property
    def adapters(self) -> dict[str, EvaluatedModel]:
        """Adapters, by key, that must be loaded to play the cell."""
        return self.model.adapters | self.opponent.adapters


def read_key(key: str) -> CellKey:
    """Parse a `Cell.key`."""
    models, _, env = key.partition(f"{JOINT}env_id=")
    model_key, _, opponent_key = models.partition(JOINT)
    env_id, *others = env.split(JOINT)
    settings = dict(setting.partition("=")[::2] for setting in others)
    return CellKey(
        model_key=model_key,
        opponent_key=opponent_key,
        env_id=env_id,
        num_players=int(settings.pop("num_players")),
        prompt_template=settings.pop("prompt_template", EvalEnvSpec(env_id="", num_players=1).prompt_template),
        other_settings=", ".join(f"{name}={value}" for name, value in settings.items()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """Evaluation that can be played."""

    plan: Plan
    cells: tuple[Cell, ...]
    is_ladder: bool = False
    """Whether the opponents are the rungs of a ladder."""
    run: Path | None = None
    """Directory of the run that prompts are as in."""

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
            "max_action_chars": MAX_ACTION_CHARS,
            **{f"opponents.{key}": getattr(config.opponents, key) for key in answers},
            # A key without a value, because later versions added it, differs from none.
            "templates": config.model_dump(mode="json", exclude_none=True)["templates"],
        }


def plan_evaluation(
    models: Sequence[str],
    *,
    config: Path | None = None,
    envs: Sequence[str] = (),
    opponents: Sequence[str] = (),
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
    ladder: rate the models and the base against the rungs of a ladder.
    trusts_config: use a run's config although another user wrote it; see `trust.run_config`.
    """
    if ladder and opponents:
        raise ConfigError("the rungs of a ladder are its opponents: leave out --opponent")
    ours, theirs = find_sides([*models, BASE], RUNGS) if ladder else find_sides(models, opponents)
    run = find_run(models)
    if config is None:
        if run is None:
            raise ConfigError("none of the models is in a run directory: name base and envs with --config")
        config = run_config(run, overrides, trusts_config)
    given = checked_config(config, overrides)
    run = run or find_run([str(config)])
    specs = [_against_saved(spec, run) for spec in _env_specs(given, envs)]
    if temperature is not None:
        try:
            specs = [spec.changed(temperature=eval_temperature(temperature)) for spec in specs]
        except ValueError as error:
            raise ConfigError(f"--temperature {temperature:g}: {error}") from None
    if ladder:
        cells = make_ladder_cells(ours, theirs, specs, given)
    elif theirs:
        cells = make_cells(ours, theirs, specs)
    else:
        cells = make_own_cells(ours, specs, copies_of(config))
    cells = list({cell.key: cell for cell in cells}.values())  # of envs that differ only in another opponent, one
    return EvaluationPlan(plan=_engine_plan(given, cells), cells=tuple(cells), is_ladder=ladder, run=run)


def _against_saved(spec: EvalEnvSpec, run: Path | None) -> EvalEnvSpec:
    """Return the eval env with the newest saved adapter of its run in place of a policy that learns."""
    player = parse_player(spec.fixed_opponent)
    is_saved = player.kind == "policy" and run is not None
    return spec.changed(fixed_opponent=f"run:{run}/newest/{player.rest}") if is_saved else spec


def make_cells(
    models: Sequence[EvaluatedModel], opponents: Sequence[EvaluatedModel], envs: Sequence[EvalEnvSpec]
) -> list[Cell]:
    """Pair every model with every opponent in every env; an env of one seat has no opponent."""
    return [
        Cell(model=model, opponent=opponent, env=env)
        for env in envs
        for model in models
        for opponent in (opponents if env.num_players > 1 else [NO_OPPONENT])
    ]


def make_ladder_cells(
    models: Sequence[EvaluatedModel], rungs: Sequence[EvaluatedModel], specs: Sequence[EvalEnvSpec], config: Config
) -> list[Cell]:
    """Pair all rungs with each other, and every model that is none of them with every rung.

    Raises ConfigError for envs that have no ladder.
    """
    envs = list({spec.changed(fixed_opponent=""): spec for spec in specs}.values())
    problems = []
    for spec in envs:
        if spec.num_players != 2:
            seats = f"{spec.env_id} has {spec.num_players}"
            problems.append(f"--ladder rates players of two-player games, and {seats}; leave it out")
        elif (reason := why_not_seated(ANCHOR, spec, config.opponents)) is not None:
            problems.append(f"--ladder: {reason}; name a game that it can play with --env openspiel:NAME")
    problems += [
        f"--ladder: {env_id} is given with {times} templates or settings; name one: --env env_id:2:template, "
        "--temperature"
        for env_id, times in Counter(spec.env_id for spec in envs).items()
        if times > 1
    ]
    if problems:
        raise ConfigError(*problems)
    pairs = list(itertools.combinations(rungs, 2))
    rated = [Cell(model=model, opponent=opponent, env=env) for env in envs for model, opponent in pairs]
    return [*rated, *make_cells([model for model in models if model not in rungs], rungs, envs)]


def make_own_cells(models: Sequence[EvaluatedModel], envs: Sequence[EvalEnvSpec], copies: Path | None) -> list[Cell]:
    """Pair every model with the `fixed_opponent` of every env. Raises ConfigError with every problem of one."""
    found: dict[str, EvaluatedModel] = {}
    problems: list[str] = []
    for name in dict.fromkeys(env.fixed_opponent for env in envs if env.num_players > 1):
        try:
            found[name] = opponent(name, copies)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return [cell for env in envs for cell in make_cells(models, [found.get(env.fixed_opponent, NO_OPPONENT)], [env])]


def in_rounds(cells: Iterable[Cell], slots: int) -> list[list[Cell]]:
    """Split cells, in order, into rounds that each need at most `slots` adapters; a cell alone never needs more."""
    rounds: list[list[Cell]] = []
    needed: dict[str, EvaluatedModel] = {}
    for cell in cells:
        if not rounds or len(needed | cell.adapters) > slots:
            rounds.append([])
            needed = {}
        rounds[-1].append(cell)
        needed |= cell.adapters
    return rounds


def seat_of(cell: Cell, number: int) -> int:
    """Return the seat of `cell.model` in game `number`; the seats rotate."""
    return number % cell.env.num_players


def game_spec(cell: Cell, number: int, seed: int, ref: Callable[[EvaluatedModel], ModelRef]) -> GameSpec:
    """Return game `number` of a cell. `ref`: returns the current reference to a model."""
    env, seat = cell.env, seat_of(cell, number)
    seated = [cell.model if pid == seat else cell.opponent for pid in range(env.num_players)]
    game_seed = derive_seed(seed, "offline eval", env.env_id, env.num_players, number // env.num_players) % 2**31 | 1
    if content_file(env.env_id):
        game_seed = question_seed(number)
    refs = [ref(model.drawn(game_seed)) for model in seated]
    return new_game(env, refs, number, "eval", game_seed, label=cell.title)


def _env_specs(config: Config, words: Sequence[str]) -> list[EvalEnvSpec]:
    """Return an eval spec for each env and each of its opponents in the config. Raises ConfigError."""
    known: dict[str, list[EvalEnvSpec]] = {}
    for spec in config.eval_envs:
        known.setdefault(spec.env_id, []).append(spec)
    trained: list[EvalEnvSpec] = []
    for train in config.train_envs:
        trained.append(evaluated_against(train, next(iter(config.league.opponents_in(train)), "scripted:random")))
        known.setdefault(train.env_id, trained[-1:])
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
        like = known.get(env_id, trained[:1])
        if env_id not in known:  # another game: keep only the way of asking
            given |= {"reward_scale": None, "env_kwargs": (), "error_allowance": 0}
            given |= {"observation": "env"} if is_built_in(env_id) else {}
            given = {"num_players": 1} | given if is_judged(env_id) else given
        specs += [spec.changed(**given) for spec in like]
    return specs


def _engine_plan(config: Config, cells: Sequence[Cell]) -> Plan:
    """Return a plan of engines for the envs and models, which have all devices to themselves.

    Raises ConfigError with every problem of the adapters, envs, templates, opponents, engine and devices.
    """
    rank = check_base(list({model.key: model for cell in cells for model in cell.models}.values()), config)
    slots = max(config.engine.max_loras, *(len(cell.adapters) for cell in cells))
    first = cells[0].env.model_dump(exclude={"fixed_opponent", "temperature", "top_p"})
    played = dict.fromkeys(
        cell.env.changed(fixed_opponent=name)
        for cell in cells
        for name in [model.name for model in cell.models if model.is_fixed] or [BASE]
    )
    played_config = config.changed(
        engine={"when_shared": "split", "max_loras": slots},
        learner=LearnerConfig(),  # the config's own may not fit this machine
        lora={"lora_rank": rank, "initial_lora_path": None},
        train_envs=(TrainEnvSpec(num_actors=cells[0].env.num_players, **first),),  # a config has at least one
        eval_envs=tuple(played),
    )
    return make_engine_plan(played_config)
