"""Reasons why frozen adapters cannot play in a run: not found, of another base, or not of a shape that it serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from unstable_lite.adapters.frozen import FrozenAdapter, find_adapter
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.models import resolve_model
from unstable_lite.planning.memory import shape_of


def frozen_problems(names: Iterable[str], config: Config, *copies: Path | None) -> Iterator[str]:
    """Yield each reason why the adapters of these names cannot play. `copies`: as in `find_adapter`."""
    for name in names:
        try:
            found = find_adapter(name, *copies)
        except ConfigError as error:
            yield from error.problems
        except AdapterError as error:
            yield f"{name!r}: {error}"
        else:
            yield from (f"{name!r}: {problem}" for problem in _misfits(found, config))


def base_problem(found: FrozenAdapter, config: Config) -> str | None:
    """Return the reason why an adapter names another base; None if it does not.

    Only names of a hub are compared, because a local directory may contain any model. Engines refuse weights that do
    not fit the base's shapes.
    """
    ours = resolve_model(config.model_name)
    if found.base and found.base != ours and not _is_local(found.base) and not _is_local(ours):
        return f"{found.path} is an adapter of {found.base}; here model_name is {ours}"
    return None


def _size_problem(found: FrozenAdapter, config: Config) -> str | None:
    """Return the reason why an adapter does not fit the base's layers; None if it does, or if they are not known."""
    shape = shape_of(config.model_name)
    sizes = shape.linear_layers if shape is not None else {}
    for layer, theirs in found.sizes.items():
        if theirs != (own := sizes.get(layer.rpartition(".")[2], theirs)):
            return (
                f"{found.path} is an adapter of another base: {layer} has {theirs[0]} inputs and {theirs[1]} outputs "
                f"there, {own[0]} and {own[1]} in {config.model_name}"
            )
    return None


def _misfits(found: FrozenAdapter, config: Config) -> Iterator[str]:
    """Yield each reason why a run cannot serve an adapter, and the learner not check it."""
    if (problem := base_problem(found, config) or _size_problem(found, config)) is not None:
        yield problem
    lora = config.lora
    if found.rank > lora.lora_rank:
        yield (
            f"{found.path} has rank {found.rank}, but this run serves and checks adapters up to lora.lora_rank = "
            f"{lora.lora_rank}; raise it"
        )
    targets = tuple(f".{target}" for target in lora.target_modules)
    if others := {layer.rpartition(".")[2] for layer in found.sizes if not f".{layer}".endswith(targets)}:
        yield f"{found.path} adapts {', '.join(sorted(others))}; add that to lora.target_modules"


def _is_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or Path(name).exists()
