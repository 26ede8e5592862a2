"""Models of an evaluation: the base, adapters on disk, runs with their checkpoints, fixed opponents.

Owns the facts about an adapter that its files alone show. Loads no weights; the engines do.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import deserialize

from unstable_lite.adapters.peft_files import CONFIG, PICKLES, WEIGHTS, check_adapter, read_json
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.games.players.factory import is_remote
from unstable_lite.models import resolve_model
from unstable_lite.tracking.run_directory import by_update
from unstable_lite.types import BASE, ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    name: str
    """Name in tables."""
    key: str
    """Key of results: `base`, a fixed opponent's name, or the digest of an adapter's files."""
    path: Path | None = None
    """PEFT directory of an adapter."""
    is_fixed: bool = False
    is_zero: bool = False
    """Whether it answers like the base: the base itself, or an adapter whose B matrices are all zero."""


BASE_MODEL = EvaluatedModel(name=BASE, key=BASE, is_zero=True)
NO_OPPONENT = EvaluatedModel(name="none", key="none")
"""Placeholder for the opponent in an env of one seat."""


def find_models(words: Iterable[str]) -> list[EvaluatedModel]:
    """Return the models of each word: `base`, a run directory (all of its checkpoints), a PEFT directory, an opponent.

    The same weights under two names count once. Raises ConfigError with every word that names no model.
    """
    return _with_distinct_names(_found(words))


def find_sides(words: Iterable[str], others: Iterable[str]) -> tuple[list[EvaluatedModel], list[EvaluatedModel]]:
    """Call `find_models` for both sides, and give different models different names across both."""
    sides = _found(words), _found(others)
    distinct = {model.key: model for side in reversed(sides) for model in side}
    named = {model.key: model for model in _with_distinct_names(list(distinct.values()))}
    ours, theirs = ([named[model.key] for model in side] for side in sides)
    return ours, theirs


def _found(words: Iterable[str]) -> list[EvaluatedModel]:
    models: dict[str, EvaluatedModel] = {}
    problems: list[str] = []
    for word in words:
        try:
            for model in _find(word):
                models.setdefault(model.key, model)
        except ConfigError as error:
            problems += error.problems
        except AdapterError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(*problems)
    return list(models.values())


def find_run(words: Iterable[str]) -> Path | None:
    """Return the first run directory that a word names, itself or by a checkpoint in it."""
    for word in words:
        path = Path(word).expanduser().resolve()
        for directory in (path, *path.parents[:2]):
            if (directory / "config.toml").is_file() and (directory / "checkpoints").is_dir():
                return directory
    return None


def check_base(models: Sequence[EvaluatedModel], config: Config) -> int:
    """Return the largest rank of the adapters. Raises ConfigError for one that names another base.

    Only names of a hub are compared, because a local directory may contain any model. Engines refuse weights that do
    not fit the base's shapes.
    """
    rank, problems = 1, []
    for model in models:
        if model.path is None:
            continue
        stored = read_json(model.path / CONFIG)
        rank = max(rank, stored["r"])
        theirs = stored.get("base_model_name_or_path") or ""
        ours = resolve_model(config.model_name)
        if theirs and theirs != ours and not _is_local(theirs) and not _is_local(ours):
            problems.append(f"{model.path} is an adapter of {theirs}; this evaluation's model_name is {ours}")
    if problems:
        raise ConfigError(*problems)
    return rank


def _find(word: str) -> list[EvaluatedModel]:
    if word == BASE:
        return [BASE_MODEL]
    if not is_remote(ModelRef(uid=word, kind="fixed", name=word)):  # scripted, or a custom class
        return [opponent(word)]
    path = Path(word).expanduser()
    if path.is_dir():
        if any((path / name).exists() for name in (CONFIG, WEIGHTS, *PICKLES)):
            return [_adapter(path)]
        if (path / "checkpoints").is_dir():
            checkpoints = by_update(path / "checkpoints")
            if not checkpoints:
                raise ConfigError(f"{path} has no checkpoint: {path / 'checkpoints'} holds no ckpt-<n>")
            return [_adapter(found) for found in checkpoints.values()]
        raise ConfigError(f"{path} is neither a run directory (checkpoints/) nor an adapter ({CONFIG})")
    if "/" not in word or word.startswith((".", "/", "~")) or Path(path.parts[0]).exists():
        raise ConfigError(
            f"{word!r} names no model: give 'base', a run directory, an adapter's directory, 'scripted:…', "
            "'module:Class' or 'vendor/model' at the API"
        )
    return [opponent(word)]


def opponent(name: str) -> EvaluatedModel:
    """Return the model of a config's `fixed_opponent`: the base, a scripted player, or a model behind an endpoint."""
    if name == BASE:
        return BASE_MODEL
    return EvaluatedModel(name=name, key=name, is_fixed=True)


def _adapter(path: Path) -> EvaluatedModel:
    """Read an adapter. Raises AdapterError unless both files exist and are valid."""
    path = path.resolve()
    stored, _ = check_adapter(path)
    try:
        with (path / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        is_zero = _is_zero(path / WEIGHTS)
    except OSError as error:
        raise AdapterError(f"{path} is not a readable adapter: {error}") from error
    # The same matrices with another scale are another model.
    key = f"{digest}-{stored.get('r')}-{stored.get('lora_alpha')}" + "-rslora" * bool(stored.get("use_rslora"))
    return EvaluatedModel(name=path.name, key=key, path=path, is_zero=is_zero)


def _is_zero(weights: Path) -> bool:
    """Return whether every B matrix of an adapter is zero, given the bytes of its file, of any type."""
    for name, tensor in deserialize(weights.read_bytes()):  # type: ignore[no-untyped-call]
        if ".lora_B." in name:
            items_NB = np.frombuffer(bytearray(tensor["data"]), np.uint8).reshape(math.prod(tensor["shape"]), -1)
            items_NB[:, -1] &= 0x7F  # the sign is in the last byte, and zero may be negative
            if items_NB.any():
                return False
    return True


def _with_distinct_names(models: list[EvaluatedModel]) -> list[EvaluatedModel]:
    """Name models `ckpt-3`, or `<run>/ckpt-3` if two runs have one, or by the whole path if that is ambiguous."""
    for rename in (_with_run, lambda path: str(path)):
        names = Counter(model.name for model in models)
        models = [
            replace(model, name=rename(model.path)) if model.path is not None and names[model.name] > 1 else model
            for model in models
        ]
    return models


def _with_run(path: Path) -> str:
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return f"{run.name}/{path.name}"


def _is_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or Path(name).exists()
