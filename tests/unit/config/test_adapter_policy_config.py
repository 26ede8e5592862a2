"""`league.adapter_policy` in `check`: refusals, and the predicted age of steps and number of adapters."""

from typing import Any

import pytest

from unstable_lite.config import Config
from unstable_lite.planning.staleness import describe, in_flight, predict

ENV = {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
EVAL_ENV = {"env_id": "TicTacToe-v0-train", "num_players": 2, "fixed_opponent": "scripted:random"}
LENGTHS = {ENV["env_id"]: [40] * 64}


def config_of(policy: str = "turn", **sections: Any) -> Config:
    league = {"adapter_policy": policy, **sections.pop("league", {})}
    return Config.model_validate(
        {
            "model_name": "builtin:tiny",
            "train_envs": [ENV],
            "league": league,
            "engine": {"kind": "scripted"},
            **sections,
        }
    )


FEW_SLOTS: dict[str, Any] = {
    "engine": {"kind": "scripted", "max_loras": 2},
    "learner": {"batch_size": 100},
    "run": {"num_collection_workers": 1000},
}


def test_two_slots_stop_no_long_game_if_turns_use_the_newest_adapter():
    by_game, by_turn = (predict(config_of(policy, **FEW_SLOTS), LENGTHS) for policy in ("game", "turn"))
    assert by_turn.games > 4 * by_game.games
    assert by_turn.adapters == 2 < by_game.adapters
    assert by_turn.most_age <= 8
    assert by_turn.mean_age == pytest.approx(by_turn.games * 40 / 100 * 17 / 32), "half of a lifetime, in 16 ages"
    assert not [text for name, text in describe(config_of("turn", **FEW_SLOTS), LENGTHS) if name == "warning"]


@pytest.mark.parametrize(
    "sections",
    [
        {"eval_envs": [EVAL_ENV], "run": {"num_collection_workers": 1000, "num_eval_workers": 1}},
        {
            "league": {"opponent_sampling_strategy": "lagged", "opponent_lag": (1, 1)},
            "train_envs": [{**ENV, "num_actors": 1}],
        },
    ],
)
def test_slots_limit_games_if_opponents_or_evaluations_hold_them(sections):
    sections = {**FEW_SLOTS, **sections}
    by_game, by_turn = (in_flight(config_of(policy, **sections), LENGTHS) for policy in ("game", "turn"))
    assert by_turn.limit == by_game.limit
    warnings = [text for name, text in describe(config_of(**sections), LENGTHS) if name == "warning"]
    assert any("evaluation games and games against checkpoints will need" in text for text in warnings)


def test_one_turn_games_are_limited_by_slots_in_either_way():
    lengths = {ENV["env_id"]: [1] * 64}
    pace = predict(config_of("turn", **FEW_SLOTS), lengths)
    assert pace.games == 100, "as many as the learner waits for"
    assert any("turns in flight will need" in text for _, text in describe(config_of("turn", **FEW_SLOTS), lengths))
