"""Copies of frozen players at a run's start: the ones of a registry made by hand count and are checked like the config's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.handmade_adapters import fitting, write_adapter
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.orchestrator.frozen_players import keep_frozen
from unstable_lite.planning.adapter_slots import (
    active_checkpoints,
    adapter_slots_needed,
    adapters_in_memory,
    changing_slots,
)
from unstable_lite.planning.staleness import in_flight

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}
TINY = "builtin:tiny"


def config_of(strategy: str, max_loras: int = 8, **league: Any) -> Config:
    league = {"opponent_sampling_strategy": strategy, **league}
    return Config.model_validate({"train_envs": [NIM], "league": league, "engine": {"max_loras": max_loras}})


def registry_with(*paths: Path) -> ModelRegistry:
    registry = ModelRegistry()
    for number, path in enumerate(paths):
        registry.add_checkpoint(f"rival-{number}", path, iteration=number)
    return registry


def adapters(directory: Path, count: int) -> list[Path]:
    return [write_adapter(directory / f"rival-{n}", fitting(TINY, n), base=TINY) for n in range(count)]


def test_active_checkpoints_leave_slots_to_players_that_were_added_by_hand(tmp_path: Path) -> None:
    config, registry = config_of("random"), registry_with(*adapters(tmp_path, 3))
    assert adapter_slots_needed(config) == 8
    frozen = keep_frozen(config, registry, tmp_path / "run", print)
    assert [player.name for player in frozen] == [f"adapter:{tmp_path}/rival-{n}" for n in range(3)]
    assert adapter_slots_needed(config, len(frozen)) == 8
    assert active_checkpoints(config, len(frozen)) == active_checkpoints(config) - 3
    assert changing_slots(config, len(frozen)) == changing_slots(config) - 3
    assert adapters_in_memory(config, len(frozen)) == adapters_in_memory(config) - 3
    assert in_flight(config, {}, len(frozen)).limit < in_flight(config, {}).limit


def test_players_added_by_hand_are_refused_if_the_checkpoints_leave_no_slot_are_refused(tmp_path: Path) -> None:
    config = config_of("random", max_active_checkpoints=5)
    with pytest.raises(ConfigError, match="with 2 frozen players this league needs at least 9 adapter slots"):
        keep_frozen(config, registry_with(*adapters(tmp_path, 2)), tmp_path / "run", print)
