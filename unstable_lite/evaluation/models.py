"""Models of an evaluation: the base, adapters on disk, runs with their checkpoints, fixed opponents.

Owns the names in tables and the keys of results. Loads no weights; the engines do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unstable_lite.adapters.frozen import (
    FrozenAdapter,
    by_update,
    drawn_member,
    find_adapter,
    members,
    name_of,
    policies_of,
    read_facts,
    update_of,
)
from unstable_lite.adapters.peft_files import CONFIG, PICKLES, WEIGHTS
from unstable_lite.config import Config
from unstable_lite.config.games import parse_player
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.files import check_links
from unstable_lite.planning.validation import base_problem
from unstable_lite.rng import digest_of
from unstable_lite.types import BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    name: str
    """Name in tables."""
    key: str
    """Key of results: `base`, a fixed opponent's name, or the digest of an adapter's files."""
    adapter: FrozenAdapter | None = None
    is_fixed: bool = False
    members: tuple[EvaluatedModel, ...] = ()
    """Models of which an average plays as one in each game."""
    weights: tuple[float, ...] = ()
    """Weights of the members."""

    @property
    def adapters(self) -> dict[str, EvaluatedModel]:
        """Models with an adapter, by key, that must be loaded for it to play."""
        return {model.key: model for model in self.members or (self,) if model.path is not None}

    def drawn(self, seed: int) -> EvaluatedModel:
        """Return the model that plays the game of a seed."""
        return self.members[drawn_member(self.weights, seed, "member", self.key)] if self.members else self

    @property
    def path(self) -> Path | None:
        """PEFT directory of an adapter."""
        return None if self.adapter is None else self.adapter.path


BASE_MODEL = EvaluatedModel(name=BASE, key=BASE)
NO_OPPONENT = EvaluatedModel(name="none", key="none")
"""Placeholder for the opponent in an env of one seat."""


def find_models(words: Iterable[str]) -> list[EvaluatedModel]:
    """Return the models of each word: a run directory (all of its checkpoints), a PEFT directory, or a fixed opponent.

    The same weights under two names count once. Raises ConfigError with every word that names no model.
    """
    return find_sides(words, ())[0]


def find_sides(words: Iterable[str], others: Iterable[str]) -> tuple[list[EvaluatedModel], list[EvaluatedModel]]:
    """Call `find_models` for both sides, and give different models different names across both."""
    sides: tuple[dict[str, EvaluatedModel], dict[str, EvaluatedModel]] = ({}, {})
    problems: list[str] = []
    for side, given in zip(sides, (words, others), strict=True):
        for word in given:
            try:
                for model in _find(word):
                    side.setdefault(model.key, model)
            except ConfigError as error:
                problems += error.problems
            except AdapterError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(*problems)
    named = _with_distinct_names(sides[1] | sides[0])
    ours, theirs = ([named[key] for key in side] for side in sides)
    return ours, theirs


def find_run(words: Iterable[str]) -> Path | None:
    """Return the first run directory that a word names, itself or by a checkpoint in it."""
    for word in words:
        player = parse_player(word)
        path = Path(player.rest if player.has_adapter else word).expanduser().resolve()
        for directory in (path, *path.parents[:3]):
            if (directory / "config.toml").is_file() and (directory / "checkpoints").is_dir():
                return directory
    return None


def check_base(models: Sequence[EvaluatedModel], config: Config) -> int:
    """Return the largest rank of the adapters. Raises ConfigError for one of another base."""
    adapters = [one.adapter for model in models for one in model.adapters.values() if one.adapter is not None]
    if problems := [problem for found in adapters if (problem := base_problem(found, config)) is not None]:
        raise ConfigError(*problems)
    return max((found.rank for found in adapters), default=1)


def _find(word: str) -> list[EvaluatedModel]:
    if parse_player(word).kind != "remote":
        return [opponent(word)]
    path = Path(word).expanduser()
    if path.is_dir():
        if any((path / name).exists() for name in (CONFIG, WEIGHTS, *PICKLES)):
            adapters = [path]
        elif (path / "checkpoints").is_dir():
            check_links(path)
            policies = policies_of(path)
            adapters = [saved / one for saved in by_update(path / "checkpoints").values() for one in policies]
            if not adapters:
                raise ConfigError(f"{path} has no checkpoint: {path / 'checkpoints'} holds no ckpt-<n>")
        else:
            raise ConfigError(f"{path} is neither a run directory (checkpoints/) nor an adapter ({CONFIG})")
        return [EvaluatedModel(name=name_of(one.path), key=one.key, adapter=one) for one in map(read_facts, adapters)]
    if "/" not in word or word.startswith((".", "/", "~")) or Path(path.parts[0]).exists():
        raise ConfigError(
            f"{word!r} names no model: give 'base', a run directory, an adapter's directory, 'run:DIRECTORY/best', "
            "'scripted:…', 'module:Class' or 'vendor/model' at the API"
        )
    return [opponent(word)]


def opponent(name: str, copies: Path | None = None) -> EvaluatedModel:
    """Return the model of a config's `fixed_opponent`. `copies`: directory of the run's copies of adapters.

    Raises ConfigError for an adapter that cannot be found or read.
    """
    player = parse_player(name)
    if player.kind == "policy":
        raise ConfigError(f"{name!r} learns in a run; name its saved adapter: run:DIRECTORY/newest/{player.rest}")
    if player.kind == "base":
        return BASE_MODEL
    if player.kind == "average":
        weights = members(name)
        models = tuple(opponent(member, copies) for member in weights)
        key = digest_of(repr([(model.key, weight) for model, weight in zip(models, weights.values(), strict=True)]))
        return EvaluatedModel(name=name, key=f"average:{key}", members=models, weights=tuple(weights.values()))
    if player.has_adapter:
        try:
            found = find_adapter(name, copies)
        except AdapterError as error:
            raise ConfigError(f"{name!r}: {error}") from error
        return EvaluatedModel(name=name, key=found.key, adapter=found)
    return EvaluatedModel(name=name, key=name, is_fixed=True)


def _with_distinct_names(models: dict[str, EvaluatedModel]) -> dict[str, EvaluatedModel]:
    """Name models `ckpt-3`, or `<run>/ckpt-3` if two runs have one, or by the whole path if that is ambiguous."""
    for rename in (_with_run, str):
        names = Counter(model.name for model in models.values())
        models = {
            key: replace(model, name=rename(model.path)) if model.path is not None and names[model.name] > 1 else model
            for key, model in models.items()
        }
    return models


def _with_run(path: Path) -> str:
    place = path if update_of(path.parent) is None else path.parent  # of one of several policies
    run = place.parent.parent if place.parent.name == "checkpoints" else place.parent
    return f"{run.name}/{name_of(path)}"


def check_served(models: Iterable[EvaluatedModel]) -> None:
    """Raise ConfigError if one of the models is not the base or an adapter, whose answers have probabilities."""
    if fixed := sorted({model.name for model in models if model.is_fixed or model.members}):
        raise ConfigError(f"{', '.join(fixed)}: only the base and adapters have probabilities of answers")
