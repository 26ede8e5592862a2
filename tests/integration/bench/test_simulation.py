"""The results of the simulation, compared with calculation by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.latency import Latency
from bench.simulation import Kind, LearnerCosts, Outcome, Setup, Simulation, setup_of
from unstable_lite.config import Config
from unstable_lite.config.reading import parse_toml

LATENCY = Latency(step_s=0.01, row_s=0.001, prompt_token_s=0.0, slots=10)
TURNS = [(50, 20)]
ALONE = Setup(engines=1, latency=LATENCY, games=10, turns=TURNS, turns_per_game=4, turn_s=0.0)
LEARNER = LearnerCosts(
    batch_size=40,
    token_s=0.001,
    load_s=0.1,
    canary_s=0.2,
    score_s=0.05,
    scored_token_s=0.0005,
    canaries=2,
    canary_tokens=75,
    buffer_size=80,
    max_staleness=3,
)


def simulate(setup: Setup, seconds: float = 100.0, seed: int = 0) -> Outcome:
    return Simulation(setup, seed).run(20.0, seconds)


def alone(games: int) -> float:
    """Return tokens per second of an engine with a slot for each game.

    The next turn of a game arrives during the step after its last one and joins the step after that, so a game takes
    part in 20 of 21 steps.
    """
    rows = games * 20 / 21
    return rows / (0.01 + 0.001 * rows)


def test_engine_makes_one_token_per_row_and_step() -> None:
    outcome = simulate(ALONE)
    assert outcome.tokens_per_s == pytest.approx(alone(10), rel=0.01)
    assert outcome.turns_per_s == pytest.approx(outcome.tokens_per_s / 20, rel=0.01)
    assert 20 / 21 < outcome.occupied_slots < 1, "a step with one row less is shorter"
    assert simulate(replace(ALONE, games=5)).tokens_per_s == pytest.approx(alone(5), rel=0.01)


def test_waiting_games_fill_every_slot_and_add_no_more_tokens() -> None:
    for games in (20, 40):
        outcome = simulate(replace(ALONE, games=games))
        assert outcome.tokens_per_s == pytest.approx(10 / (0.01 + 10 * 0.001), rel=0.01)
        assert outcome.occupied_slots == pytest.approx(1.0, rel=0.01)


def test_reading_a_prompt_delays_every_row_of_the_step() -> None:
    setup = replace(ALONE, latency=replace(LATENCY, prompt_token_s=0.0001))
    cycle_s = 200 / alone(10) + 10 * 50 * 0.0001
    assert simulate(setup).tokens_per_s == pytest.approx(200 / cycle_s, rel=0.01)


def test_undisturbed_engines_scale_linearly() -> None:
    outcome = simulate(replace(ALONE, engines=16, games=160))
    assert outcome.tokens_per_s == pytest.approx(16 * alone(10), rel=0.01)


def test_orchestrator_limits_the_turns_per_second() -> None:
    outcome = simulate(replace(ALONE, engines=16, games=160, turn_s=0.01))
    assert outcome.turns_per_s == pytest.approx(100, rel=0.01)
    assert outcome.orchestrator_busy == pytest.approx(1.0, rel=0.01)
    assert outcome.occupied_slots < 0.5


def test_slow_learner_delays_everything_and_every_step_is_counted() -> None:
    setup = replace(ALONE, engines=2, games=20, learner=LEARNER)
    outcome = simulate(setup, seconds=400.0)
    update_s, publish_s = 40 * 70 * 0.001, 0.1 + 0.2 + 0.05 + 2 * 2 * 75 * 0.0005
    assert outcome.updates == pytest.approx(400 / (update_s + publish_s), abs=2)
    assert outcome.learner_busy == pytest.approx(update_s / (update_s + publish_s), rel=0.02)
    assert outcome.weight_sync == pytest.approx(publish_s / (update_s + publish_s), rel=0.02)
    assert outcome.occupied_slots < 0.7
    assert outcome.produced == outcome.trained + outcome.dropped + outcome.waiting
    assert 0 < outcome.staleness_mean <= outcome.staleness_max <= LEARNER.max_staleness


def test_fast_learner_waits_for_its_batch_and_its_loads_stall_engines() -> None:
    learner = replace(LEARNER, token_s=0.0, canary_s=0.0, score_s=0.0, scored_token_s=0.0)
    outcome = simulate(replace(ALONE, learner=learner), seconds=400.0)
    batch_s = 40 / (alone(10) / 20)
    assert outcome.tokens_per_s == pytest.approx(alone(10) * batch_s / (batch_s + 0.1), rel=0.02)
    assert outcome.dropped == 0


def test_same_seed_gives_the_same_outcome_and_another_does_not() -> None:
    rng = random.Random(1)
    turns = [(rng.randint(1, 90), rng.randint(1, 90)) for _ in range(50)]
    setup = replace(ALONE, engines=3, games=33, turns=turns, turn_s=0.001, learner=LEARNER)
    assert simulate(setup) == simulate(setup)
    assert simulate(setup) != simulate(setup, seed=1)


# training on generated steps

CUSTOM_GAMES = {"custom_env", "verifiers"}
"""Examples with a custom game, whose length the simulation does not know."""
EXAMPLES = sorted(
    path for path in (Path(__file__).parents[3] / "examples").glob("*.toml") if path.stem not in CUSTOM_GAMES
)
UPDATE_TURNS = (0.5, 4.0, 14.0)
"""Duration of an update in units of a turn: the learner is faster, about as fast, or slower."""


def mirror(*env_ids: str, **sections: Any) -> Config:
    """Return the default config with these envs."""
    envs = [{"env_id": env_id, "num_players": 2, "num_actors": 2} for env_id in env_ids]
    return Config.model_validate({"train_envs": envs, **sections})


def assert_all_are_trained_on(outcome: Outcome) -> None:
    dropped = sum(counts.dropped for counts in outcome.counts.values())
    trained = sum(counts.trained for counts in outcome.counts.values())
    assert dropped <= 0.01 * (dropped + trained)
    for (env_id, turns), counts in outcome.counts.items():
        left = counts.trained + counts.dropped
        assert counts.trained >= 0.95 * left, f"{env_id}, {turns}"
    assert len(outcome.counts) >= 1


@pytest.mark.parametrize("update_turns", UPDATE_TURNS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_trains_on_its_generated_steps(path: Path, update_turns: float) -> None:
    config = Config.model_validate(parse_toml(path.read_bytes(), path.name))
    assert_all_are_trained_on(Simulation(setup_of(config, update_turns)).run_updates(5, 30))


@pytest.mark.parametrize("update_turns", UPDATE_TURNS)
@pytest.mark.parametrize(
    "config",
    [
        mirror("SimpleTak-v0-train"),
        mirror("Nim-v0-train", "ConnectFour-v0-train"),
        mirror("Nim-v0-train", "ConnectFour-v0-train", engine={"max_loras": 32}),
        mirror("ConnectFour-v0-train", algorithm="grpo", run={"group_size": 8}),
        mirror("SimpleTak-v0-train", buffer={"max_staleness": 3}),
    ],
    ids=["defaults", "two envs", "two envs, many slots", "groups of 8", "little staleness"],
)
def test_defaults_train_on_their_generated_steps(config: Config, update_turns: float) -> None:
    assert_all_are_trained_on(Simulation(setup_of(config, update_turns)).run_updates(5, 30))


@pytest.mark.parametrize("update_turns", UPDATE_TURNS)
def test_games_of_6_and_of_30_turns_are_trained_on_equally(update_turns: float) -> None:
    setup = setup_of(mirror("SimpleTak-v0-train"), update_turns)
    kinds = [Kind(env_id="short", lengths=[6]), Kind(env_id="long", lengths=[30])]
    outcome = Simulation(replace(setup, kinds=kinds)).run_updates(5, 40)
    assert_all_are_trained_on(outcome)
    assert {env_id for env_id, _ in outcome.counts} == {"short", "long"}


def test_long_games_are_dropped_without_back_pressure() -> None:
    """The simulation detects the problem that it exists for."""
    simulation = Simulation(setup_of(mirror("Nim-v0-train", "ConnectFour-v0-train", engine={"max_loras": 32}), 0.5))
    simulation._buffer.in_flight = None
    outcome = simulation.run_updates(5, 30)
    with pytest.raises(AssertionError):
        assert_all_are_trained_on(outcome)


def test_faster_learner_has_as_many_games_in_flight_as_staleness_allows() -> None:
    """Games of 15 turns may be 7 updates old, so 7 batches complete while one is played: 7 * 384 / 15 games."""
    setup = replace(setup_of(mirror("SimpleTak-v0-train"), 0.0), kinds=[Kind(env_id="even", lengths=[16])])
    outcome = Simulation(setup).run_updates(10, 60)
    assert outcome.staleness_max <= 8
    assert 0.6 * 7 * 384 / 16 < outcome.games_in_flight < 1.1 * 7 * 384 / 16
