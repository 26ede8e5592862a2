"""The frozen players of a run that have an adapter: their copies in the run directory, from which engines load them.

A copy is made when the run first meets the player, and used ever after: a resumed run plays the same weights, although
the other run made further checkpoints or was deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unstable_lite.adapters.frozen import COPIES, keep_copy, slug, source_of
from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.planning.adapter_slots import adapter_slots_needed
from unstable_lite.planning.frozen_players import frozen_problems
from unstable_lite.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPlayer:
    id: int
    """Id of its adapter."""
    name: str
    directory: Path
    """Copy of the adapter in the run directory."""
    digest: str


def keep_frozen(
    plan: Plan, registry: ModelRegistry, directory: Path, say: Callable[[str], None]
) -> tuple[FrozenPlayer, ...]:
    """Copy the adapter of each frozen player in the registry into the run directory, unless there is a copy.

    They are those of `plan.copies`, if the config is that of another run.

    Report with `say` which adapter each name stands for.
    Raises ConfigError for players that do not fit the run or its adapter slots, as those added by hand may do,
    AdapterError, NoRoomError or UnstableError if a copy cannot be written.
    """
    config, copies, metas = plan.config, directory / COPIES, registry.frozen_adapters()
    names = {meta.adapter_version or 0: meta.name or "" for meta in metas}
    problems = [*frozen_problems(dict.fromkeys(names.values()), config, copies, plan.copies)]
    needed = adapter_slots_needed(config, len(names))
    if needed > config.engine.max_loras:
        problems.append(
            f"engine.max_loras = {config.engine.max_loras}: with {len(names)} frozen players this league needs at "
            f"least {needed} adapter slots; raise it"
        )
    if problems:
        raise ConfigError(*problems)
    try:
        kept = {id: keep_copy(name, copies, plan.copies).path for id, name in names.items()}
    except OSError as error:
        raise UnstableError(f"cannot make {copies} for the copies of frozen players: {error.strerror}") from error
    for name in dict.fromkeys(names.values()):
        say(f"frozen player {name} is {source_of(name, copies)}, as copied into {COPIES}/{slug(name)}")
    return tuple(
        FrozenPlayer(id=id, name=names[id], directory=path, digest=adapter_digest(path)) for id, path in kept.items()
    )


async def load_frozen(players: tuple[FrozenPlayer, ...], adapter_sync: AdapterSync) -> None:
    """Load and check every frozen player, before the first game. Raises AdapterError."""
    for player in players:
        await adapter_sync.load_frozen(player.id, player.name, player.directory, player.digest)
