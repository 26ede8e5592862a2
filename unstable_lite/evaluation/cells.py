"""The games of an evaluation: cells (a model, its opponent, an env), and the games of each.

Pure: knows no engines, and of files only the digest of questions. Game number k of an env has the same seed and the
same seat for every model, and each seed is played from every seat, so that every model plays the same games. The
sampling itself is not seeded here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from unstable_lite.config.env_ids import is_questions
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.models import NO_OPPONENT, EvaluatedModel
from unstable_lite.games.questions.reader import read_questions
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.rng import derive_seed, question_seed
from unstable_lite.types import GameSpec, ModelRef

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
        if is_questions(self.env.env_id):  # a file that changed is another env
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
        return {model.key: model for model in self.models if model.path is not None}


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


def make_cells(
    models: Sequence[EvaluatedModel],
    opponents: Callable[[EvalEnvSpec], Sequence[EvaluatedModel]],
    envs: Sequence[EvalEnvSpec],
) -> list[Cell]:
    """Pair every model with every opponent of every env; an env of one seat has no opponent."""
    return [
        Cell(model=model, opponent=opponent, env=env)
        for env in envs
        for model in models
        for opponent in (opponents(env) if env.num_players > 1 else [NO_OPPONENT])
    ]


def make_tournament(models: Sequence[EvaluatedModel], envs: Sequence[EvalEnvSpec]) -> list[Cell]:
    """Pair all models in every env, in both orders if an env has more than two seats, because one model plays alone.

    Raises ConfigError if there are fewer than two models or an env has one seat.
    """
    if len(models) < 2:
        raise ConfigError(f"a tournament needs two models or more, got {len(models)}")
    if alone := [env.env_id for env in envs if env.num_players == 1]:
        raise ConfigError(f"a tournament needs opponents, and {', '.join(alone)} has one player")
    return [
        Cell(model=model, opponent=opponent, env=env)
        for env in envs
        for model, opponent in (
            itertools.combinations(models, 2) if env.num_players == 2 else itertools.permutations(models, 2)
        )
    ]


def make_ladder_cells(
    models: Sequence[EvaluatedModel], rungs: Sequence[EvaluatedModel], envs: Sequence[EvalEnvSpec]
) -> list[Cell]:
    """Pair all rungs with each other, and every model that is none of them with every rung."""
    keys = {rung.key for rung in rungs}
    others = [model for model in models if model.key not in keys]
    return [*make_tournament(rungs, envs), *make_cells(others, lambda _env: rungs, envs)]


def as_trained(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells with the sampling of training, each once."""
    trained = [replace(cell, env=cell.env.model_copy(update={"temperature": None, "top_p": None})) for cell in cells]
    return list({cell.key: cell for cell in trained}.values())


def in_rounds(cells: Iterable[Cell], slots: int) -> list[list[Cell]]:
    """Split cells, in order, into rounds that each need at most `slots` adapters.

    Raises ConfigError if one cell alone needs more.
    """
    rounds: list[list[Cell]] = []
    needed: dict[str, EvaluatedModel] = {}
    for cell in cells:
        if len(cell.adapters) > slots:
            raise ConfigError(f"engine.max_loras = {slots}: {cell.title} needs {len(cell.adapters)}")
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
    number_of_seed = number // env.num_players
    game_seed = derive_seed(seed, "offline eval", env.env_id, env.num_players, number_of_seed) % 2**31 | 1
    if is_questions(env.env_id):
        game_seed = question_seed(number)
    return new_game(env, [ref(model) for model in seated], number, "eval", game_seed, label=cell.title)
