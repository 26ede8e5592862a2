"""Whole league runs: checkpoints that leave and return, and games in groups."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from fakes import run_files, runs

POOL = (
    "run.eval_games=0",
    "run.num_eval_workers=0",
    "run.checkpoint_every=100",
    "league.opponent_sampling_strategy={pfsp={weight=0.8,weighting='even'},mirror=0.2}",
    "league.fixed_opponents=[]",
    "league.opponent_lag=[2,3]",
    "league.max_active_checkpoints=3",
    "engine.max_loras=5",
)
GROUPS = ("algorithm=fakes.slow_learners:TakesAWhile", "rewards.group_baseline=rloo", "run.group_size=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("league")
    overrides = (
        *POOL,
        *GROUPS,
        *runs.PLAYS_NIM,
        "run.learning_steps=8",
        "league.keep_every=4",
        "learner.batch_size=72",
    )
    runs.output_of(runs.run_torchless("run", runs.write_small(directory), *overrides))
    return runs.run_directory(directory)


def log_of(run: Path) -> str:
    return (run / "logs" / "orchestrator.log").read_text()


@pytest.mark.nightly
def test_checkpoints_return_slots_suffice_and_files_stay(finished: Path) -> None:
    last = run_files.updates(finished)[-1]
    assert last["step"] == 8
    assert log_of(finished).count(" is back as an opponent, as adapter ") >= last["league/returned_checkpoints"] >= 3
    assert all(line.get("league/active_checkpoints", 0) <= 3 for line in run_files.metrics(finished))
    assert last["run/alarms"] == 0
    assert last["buffer/groups_whole"] > last["buffer/groups_of_one"]
    kept = {path.name for path in (finished / "adapters").iterdir()}
    assert kept == {"ckpt-4", "ckpt-5", "ckpt-6", "ckpt-7", "ckpt-8"}
    assert all((finished / "adapters" / name / "adapter_model.safetensors").is_file() for name in kept)


def test_returned_checkpoints_play_and_too_young_ones_do_not(finished: Path) -> None:
    games = run_files.games(finished)
    pairs = {
        (next(agent["model"] for agent in game["agents"] if agent["collect_data"]), agent["model"])
        for game in games
        for agent in game["agents"]
        if not agent["collect_data"]
    }
    updates = {model: 0 if model == "base" else int(model.removeprefix("ckpt-")) for pair in pairs for model in pair}
    lags = {(policy, opponent): updates[policy] - updates[opponent] for policy, opponent in pairs}
    # A checkpoint left when it stopped being the policy, because it was too young; at two updates of age it returned.
    assert any(opponent != "base" for _, opponent in pairs)
    assert all(lag >= 2 or opponent == "base" for (_, opponent), lag in lags.items()), lags


def test_games_of_a_group_start_equal_and_are_sampled_separately(finished: Path) -> None:
    groups = defaultdict(list)
    for line in (finished / "games.jsonl").read_text().splitlines():
        game = json.loads(line)
        groups[game["seed"]].append((game["agents"], [turn[2] for turn in game["turns"]]))
    pairs = [group for group in groups.values() if len(group) == 2]
    assert len(pairs) > 20
    assert all(one[0] == other[0] for one, other in pairs)
    assert sum(one[1] != other[1] for one, other in pairs) > len(pairs) / 2
