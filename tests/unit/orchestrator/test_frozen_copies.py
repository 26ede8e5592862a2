"""Copies of frozen players at a run's start: those added by hand are counted and checked like those of the config."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes.handmade_adapters import fitting, small, write_adapter
from unstable_lite.adapters.frozen import COPIES, keep_copy, read_facts
from unstable_lite.adapters.peft_files import WEIGHTS
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import add_training_opponents
from unstable_lite.orchestrator.checkpoint_pool import keep_frozen
from unstable_lite.planning.defaults import active_checkpoints, adapter_slots_needed, adapters_in_memory, changing_slots
from unstable_lite.planning.plan import load_plan, make_plan
from unstable_lite.planning.staleness import in_flight
from unstable_lite.tracking.run_directory import to_toml

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}
TINY = "builtin:tiny"


def config_of(strategy: str, max_loras: int = 8, **league: Any) -> Config:
    league = {"opponent_sampling_strategy": strategy, "fixed_opponents": ["scripted:random"], **league}
    return Config.model_validate({"train_envs": [NIM], "league": league, "engine": {"max_loras": max_loras}})


def registry_with(*paths: Path) -> ModelRegistry:
    registry = ModelRegistry()
    for number, path in enumerate(paths):
        registry.add_checkpoint(f"rival-{number}", path, iteration=number)
    return registry


def adapters(directory: Path, count: int) -> list[Path]:
    return [write_adapter(directory / f"rival-{n}", fitting(TINY, n), base=TINY) for n in range(count)]


def test_active_checkpoints_leave_slots_to_players_that_were_added_by_hand(tmp_path):
    config, registry = config_of("random"), registry_with(*adapters(tmp_path, 3))
    assert adapter_slots_needed(config) == 8
    frozen = keep_frozen(make_plan(config), registry, tmp_path / "run", print)
    assert [name for _, name, _ in frozen] == [f"adapter:{tmp_path}/rival-{n}" for n in range(3)]
    assert adapter_slots_needed(config, len(frozen)) == 8
    assert adapter_slots_needed(config_of("random", max_active_checkpoints=5), 2) == 9
    assert active_checkpoints(config, len(frozen)) == active_checkpoints(config) - 3
    assert changing_slots(config, len(frozen)) == changing_slots(config) - 3
    assert adapters_in_memory(config, len(frozen)) == adapters_in_memory(config) - 3
    assert in_flight(config, {}, len(frozen)).limit < in_flight(config, {}).limit


@pytest.mark.parametrize("is_gone", [False, True])
def test_config_of_a_run_stands_for_its_copies_which_a_new_run_copies(tmp_path, is_gone):
    other, run = tmp_path / "other", tmp_path / "run"
    first = write_adapter(other / "checkpoints" / "ckpt-1", fitting(TINY), base=TINY)
    key, name = read_facts(first).key, f"run:{other}/newest"
    kept, elsewhere = keep_copy(name, run / COPIES), tmp_path / "elsewhere.toml"
    for path in (run / "config.toml", elsewhere):
        path.write_text(to_toml(config_of("fixed", fixed_opponents=[name]).model_dump(mode="json")))
    write_adapter(other / "checkpoints" / "ckpt-2", fitting(TINY, 1), base=TINY)
    if is_gone:
        shutil.rmtree(other)
        with pytest.raises(ConfigError, match="not a run directory"):
            load_plan(elsewhere)
    plan, registry = load_plan(run / "config.toml"), ModelRegistry()
    add_training_opponents(plan.config, registry)
    ((_, _, copy),) = keep_frozen(plan, registry, tmp_path / "another", print)
    assert copy.parent == tmp_path / "another" / COPIES
    assert read_facts(copy).key == key
    (kept.path / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ConfigError, match="is damaged"):
        load_plan(run / "config.toml")


def test_adapter_of_the_config_that_changed_since_the_check_is_refused(tmp_path):
    (path,) = adapters(tmp_path, 1)
    plan, registry = make_plan(config_of("fixed", fixed_opponents=[f"adapter:{path}"])), ModelRegistry()
    add_training_opponents(plan.config, registry)
    shutil.rmtree(path)
    write_adapter(path, small(), base=TINY)
    with pytest.raises(ConfigError, match="of another base"):
        keep_frozen(plan, registry, tmp_path / "run", print)
