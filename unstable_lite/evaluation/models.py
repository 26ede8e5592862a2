"""The models that an evaluation names: the base, adapters on disk, runs with their checkpoints, fixed opponents.

Owns what can be told of an adapter by its files alone. Loads no weights: that is the engines' business.
"""

from __future__ import annotations

import hashlib
import mmap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.games.seats import is_remote
from unstable_lite.models import resolve_model
from unstable_lite.outside_files import CONFIG, FLOAT_BYTES, PICKLES, WEIGHTS, Entry, check_adapter, read_json
from unstable_lite.trackers.run_view import by_update, update_of
from unstable_lite.types import BASE, ModelRef


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    name: str
    """What tables show."""
    key: str
    """What results are kept under: `base`, a fixed opponent's name, or the digest of an adapter's files."""
    path: Path | None = None
    """Of an adapter's PEFT directory."""
    is_fixed: bool = False
    is_zero: bool = False
    """An adapter whose B matrices are all zero: it is the base."""
    step: int = 0
    """Of a checkpoint: the updates it had seen."""


BASE_MODEL = EvaluatedModel(name=BASE, key=BASE)


def find_models(words: Iterable[str]) -> list[EvaluatedModel]:
    """What each word names: `base`, a run directory (all of its checkpoints), a PEFT directory, a fixed opponent.

    The same weights under two names count once. Raises ConfigError with every word that names nothing.
    """
    return _with_distinct_names(_found(words))


def find_sides(words: Iterable[str], others: Iterable[str]) -> tuple[list[EvaluatedModel], list[EvaluatedModel]]:
    """`find_models` of both, in which different models have different names, on whichever side they are."""
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
    """The first run directory that is named, by itself or by a checkpoint inside it."""
    for word in words:
        path = Path(word).expanduser().resolve()
        for directory in (path, *path.parents[:2]):
            if (directory / "config.toml").is_file() and (directory / "checkpoints").is_dir():
                return directory
    return None


def check_base(models: Sequence[EvaluatedModel], config: Config) -> int:
    """The largest rank of the adapters. Raises ConfigError for one that says that it is of another base.

    Only names are compared, and only where both are a hub's: a local directory may hold anything. Weights that do not
    fit the base's shapes are refused by the engines.
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
    if not is_remote(ModelRef(uid=word, kind="fixed", name=word)):  # scripted, or a class of one's own
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
    """Return what a config's `fixed_opponent` names: the base, a scripted player, or a model behind an endpoint."""
    if name == BASE:
        return BASE_MODEL
    return EvaluatedModel(name=name, key=name, is_fixed=True)


def _adapter(path: Path) -> EvaluatedModel:
    """Raises AdapterError unless both files are there and are what they should be."""
    path = path.resolve()
    stored, header = check_adapter(path)
    try:
        with (path / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        is_zero = _is_zero(path / WEIGHTS, header)
    except OSError as error:
        raise AdapterError(f"{path} is no adapter that can be read: {error}") from error
    # The same matrices under another scale are another model.
    key = f"{digest}-{stored.get('r')}-{stored.get('lora_alpha')}" + "-rslora" * bool(stored.get("use_rslora"))
    return EvaluatedModel(name=path.name, key=key, path=path, is_zero=is_zero, step=update_of(path) or 0)


def _is_zero(weights: Path, header: Mapping[str, Entry]) -> bool:
    """Whether every B matrix in a safetensors file is zero, told from its bytes, whatever their type."""
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name, entry in header.items():
            if ".lora_B." in name:
                numbers = np.frombuffer(bytearray(content[entry.start : entry.stop]), np.uint8)
                numbers = numbers.reshape(-1, FLOAT_BYTES[entry.dtype])
                numbers[:, -1] &= 0x7F  # the sign, in the last byte; there is a negative zero
                if numbers.any():
                    return False
    return True


def _with_distinct_names(models: list[EvaluatedModel]) -> list[EvaluatedModel]:
    """`ckpt-3`; where another run's has the same name, `<run>/ckpt-3`; where that is not enough, the whole path."""
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
