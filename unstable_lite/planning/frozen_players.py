"""Reasons why frozen adapters cannot play in a run: not found, of another base, or not of a shape that it serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from unstable_lite.adapters.frozen import FrozenAdapter, find_adapter
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.models import resolve_model
from unstable_lite.planning.memory import shape_of

READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose inputs are a decoder layer's hidden states."""
WRITES_HIDDEN = ("o_proj", "down_proj")
"""Layers whose outputs are added to the hidden states."""


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
    if found.base and found.base != ours and not is_local(found.base) and not is_local(ours):
        return f"{found.path} is an adapter of {found.base}; here model_name is {ours}"
    return None


def _size_problem(found: FrozenAdapter, config: Config) -> str | None:
    """Return the reason why an adapter is of another hidden size than the base; None if it is not, or if none is known.

    The other sizes of a layer depend on the architecture (a gated `q_proj` has twice the outputs): engines and learner
    compare them with the base's weights.
    """
    if (shape := shape_of(config.model_name)) is None:
        return None
    for layer, (inputs, outputs) in found.sizes.items():
        module = layer.rpartition(".")[2]
        hidden = inputs if module in READS_HIDDEN else outputs if module in WRITES_HIDDEN else shape.hidden
        if hidden != shape.hidden:
            return (
                f"{found.path} is an adapter of another base: by its {layer} the hidden size is {hidden}, that of "
                f"{config.model_name} is {shape.hidden}"
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


def is_local(name: str) -> bool:
    """Return whether a base's name is that of a path on this machine."""
    return name.startswith((".", "/", "~")) or Path(name).exists()
