"""Frozen players in a config: every one that cannot play is refused before the run, and `check` counts their slots."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.handmade_adapters import Arrays, fitting, small, write_adapter
from unstable_lite.config import Config
from unstable_lite.league.opponents import frozen_adapters
from unstable_lite.league.samplers import check_league
from unstable_lite.planning.defaults import adapter_slots_needed, resolve_defaults
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.validation import find_problems

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}
TICTACTOE = NIM | {"env_id": "TicTacToe-v0-train"}
TINY = "builtin:tiny"


def config_with(names: list[str], **sections: Any) -> Config:
    league = {"opponent_sampling_strategy": "fixed", "fixed_opponents": names}
    return Config.model_validate({"train_envs": [NIM], "league": league, **sections})


def fitting_adapter(directory: Path, seed: int = 0, **how: Any) -> str:
    return f"adapter:{write_adapter(directory, fitting(TINY, seed, **how), base=TINY, r=how.get('rank', 4))}"


def widened(module: str) -> Arrays:
    """Return matrices that fit, except that this layer has twice the outputs."""
    arrays = fitting(TINY, modules=[module])
    return {name: np.concatenate([array, array]) if ".lora_B." in name else array for name, array in arrays.items()}


def test_frozen_players_in_training_and_evaluation_have_no_problem(tmp_path):
    name = fitting_adapter(tmp_path / "a")
    evaluated = {key: NIM[key] for key in ("env_id", "num_players")} | {"fixed_opponent": "base"}
    config = config_with(["base", name], eval_envs=[evaluated])
    assert find_problems(config) == []
    rows = dict(make_plan(config).describe())
    assert name in rows["frozen players"]
    assert "at least 3 needed" in rows["adapter slots"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda path: f"run:{path}/nowhere/best", "not a run directory", id="absent run"),
        pytest.param(
            lambda path: f"adapter:{write_adapter(path / 'a', small(), base='Qwen/Qwen3-4B')}",
            "of another base: .*q_proj the hidden size is 6",
            id="other inputs",
        ),
        pytest.param(
            lambda path: f"adapter:{write_adapter(path / 'a', widened('down_proj'), base=TINY)}",
            "of another base: .*down_proj the hidden size is",
            id="other outputs",
        ),
        pytest.param(lambda path: fitting_adapter(path / "a", rank=64), "rank 64.*lora_rank = 32", id="higher rank"),
        pytest.param(
            lambda path: f"adapter:{write_adapter(path / 'a', fitting(TINY), base=TINY, use_dora=True)}",
            "use_dora",
            id="not plain LoRA",
        ),
    ],
)
def test_unfit_frozen_player_is_refused(tmp_path, make, says):
    name = make(tmp_path)
    (problem,) = find_problems(config_with([name]))
    assert name in problem
    assert re.search(says, problem), problem
    evaluated = {"eval_envs": [{key: NIM[key] for key in ("env_id", "num_players")} | {"fixed_opponent": name}]}
    assert find_problems(config_with(["base"], **evaluated)) == [problem]


def test_adapter_of_other_modules_is_refused_and_of_fewer_or_lower_rank_is_not(tmp_path):
    name = fitting_adapter(tmp_path / "a", rank=2)
    assert find_problems(config_with([name])) == []
    (problem,) = find_problems(config_with([name], lora={"target_modules": ["q_proj"]}))
    assert "down_proj" in problem and "lora.target_modules" in problem
    assert find_problems(config_with([name], lora={"target_modules": ["self_attn.q_proj", "down_proj"]})) == []
    (problem,) = find_problems(config_with([name], lora={"target_modules": ["attn.q_proj", "mlp.down_proj"]}))
    assert "adapts q_proj; add that" in problem


@pytest.mark.parametrize("module", ["q_proj", "v_proj", "gate_proj"])
def test_sizes_that_depend_on_the_architecture_are_left_to_engines_and_learner(tmp_path, module):
    name = f"adapter:{write_adapter(tmp_path / 'a', widened(module), base=TINY)}"
    assert find_problems(config_with([name])) == []


def test_adapter_of_another_hub_model_is_refused(tmp_path):
    name = f"adapter:{write_adapter(tmp_path / 'a', small(), base='org/other')}"
    (problem,) = [p for p in find_problems(config_with([name], model_name="org/mine")) if "org/other" in p]
    assert "model_name is org/mine" in problem


def test_more_frozen_players_than_slots_are_refused(tmp_path):
    names = [fitting_adapter(tmp_path / str(seed), seed) for seed in range(3)]
    assert adapter_slots_needed(config_with(["base", *names])) == 5
    (problem,) = find_problems(config_with(["base", *names], engine={"max_loras": 4}))
    assert "needs at least 5 adapter slots, 3 of them for frozen players" in problem
    assert find_problems(config_with(["base", *names], engine={"max_loras": 5})) == []


def test_checkpoints_of_an_average_are_looked_up_once_and_only_if_it_may_be_met(tmp_path):
    alone = {"env_id": "Sudoku-v0-train", "num_players": 1, "fixed_opponent": "average:nowhere"}
    own = [env | {"fixed_opponents": ["average:nowhere"], "num_actors": 2} for env in (NIM, TICTACTOE)]
    league = {"opponent_sampling_strategy": "mirror", "fixed_opponents": ["average:nowhere"]}
    unmet = config_with([], league=league, train_envs=own, eval_envs=[alone])
    assert resolve_defaults(unmet).league == unmet.league
    name = f"average:{tmp_path}"
    fitting_adapter(tmp_path / "checkpoints" / "ckpt-1")
    begun = resolve_defaults(config_with([name]))
    fitting_adapter(tmp_path / "checkpoints" / "ckpt-2")
    assert resolve_defaults(begun).league.fixed_opponents == (f"{name}/ckpt-1",)
    assert frozen_adapters(begun) == [f"run:{tmp_path}/ckpt-1"]


def test_each_env_has_its_own_fixed_opponents():
    own = TICTACTOE | {"fixed_opponents": ["adapter:b", "scripted:greedy"]}
    config = config_with(["adapter:a", "base"], train_envs=[NIM, own])
    assert frozen_adapters(config) == ["adapter:a", "adapter:b"]
    (problem,) = [p for p in find_problems(config_with([], train_envs=[NIM, own])) if "'Nim" in p]
    assert "fixed_opponents" in problem
    alone = own | {"num_actors": 2}
    assert any("never met" in p for p in find_problems(config_with(["base"], train_envs=[NIM, alone])))


@pytest.mark.parametrize("strategy", ["mirror", "lagged", "uniform", {"mirror": 0.5, "uniform": 0.5}])
def test_fixed_opponents_of_an_env_that_the_strategy_never_draws_are_refused(strategy):
    own = NIM | {"fixed_opponents": ["scripted:random"]}
    config = config_with([], train_envs=[own, TICTACTOE])
    (problem,) = check_league(of_strategy(config, strategy))
    assert "'Nim-v0-train'" in problem and "never met" in problem and str(strategy) in problem
    assert check_league(of_strategy(config, {"fixed": 0.5, "mirror": 0.5})) == [
        "opponent_sampling_strategy uses 'fixed', but fixed_opponents of train env 'TicTacToe-v0-train' is empty"
    ]
    assert check_league(of_strategy(config_with(["base"]), strategy)) == [], "those of the league may stay"


def of_strategy(config: Config, strategy: Any) -> Config:
    return config.model_copy(
        update={"league": config.league.model_copy(update={"opponent_sampling_strategy": strategy})}
    )
