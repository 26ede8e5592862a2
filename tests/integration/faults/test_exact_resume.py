"""Check that a run with a sync schedule depends on its seed alone, even if it is killed and resumed."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from fakes import run_files, runs
from fakes.sync_runs import SYNC, THINKING, assert_equal, write_thinking


@pytest.mark.parametrize(
    ("checkpoint_every", "reached", "signum", "resumed_from"),
    [
        pytest.param(
            *(3, "update 4", signal.SIGKILL, 3), id="killed between two checkpoints", marks=pytest.mark.nightly
        ),
        pytest.param(
            *(2, "update 5", signal.SIGKILL, 4),
            id="killed after an evaluation that a checkpoint was beside",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(3, "update 2", signal.SIGINT, 2), id="stopped in an evaluation without one", marks=pytest.mark.slow
        ),
        pytest.param(*(3, "ckpt-6", signal.SIGKILL, 6), id="killed in the last evaluation", marks=pytest.mark.slow),
    ],
)
def test_interrupted_sync_run_equals_uninterrupted_one_bit_for_bit(
    sync_run: Path, tmp_path: Path, checkpoint_every: int, reached: str, signum: signal.Signals, resumed_from: int
) -> None:
    process = runs.start("run", write_thinking(tmp_path), *THINKING, f"run.checkpoint_every={checkpoint_every}")
    if reached.startswith("ckpt"):
        runs.wait_for(lambda: any(tmp_path.glob(f"outputs/*/*/checkpoints/{reached}")))
    else:
        runs.wait_for(lambda: runs.num_updates(tmp_path) >= int(reached.removeprefix("update ")))
    process.send_signal(signum)
    _, out, _ = runs.finish(process)
    assert ("broken off" in out) == (signum == signal.SIGINT)
    broken = runs.run_directory(tmp_path)
    out = runs.output_of(runs.run("run", "--resume", broken))
    assert re.search(rf"\bafter update {resumed_from}\b", out)
    assert_equal(broken, sync_run, {"ckpt-3", "ckpt-6"} if checkpoint_every == 3 else {"ckpt-6"})


@pytest.mark.nightly
def test_sleeping_engines_change_nothing_in_a_sync_run(sync_run: Path, tmp_path: Path) -> None:
    runs.output_of(runs.run("run", write_thinking(tmp_path), *THINKING, "engine.when_shared=sleep"))
    sleeper = runs.run_directory(tmp_path)
    assert '"inference/asleep_s"' in (sleeper / "metrics.jsonl").read_text()
    ours, theirs = (directory / "checkpoints" / "ckpt-6" for directory in (sleeper, sync_run))
    for file in ("adapter_model.safetensors", "learner.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    assert (sleeper / "eval.jsonl").read_text() == (sync_run / "eval.jsonl").read_text()


KILLED = (*SYNC, "run.checkpoint_every=2", "run.eval_games=4")
DUPLICATES = (
    *KILLED,
    "run.group_size=4",
    "learner.batch_size=60",
    "rewards.group_baseline=duplicate",
    "league.opponent_sampling_strategy={ lagged = 0.3, fixed = 0.7 }",
)


def whole_and_resumed(
    tmp_path: Path, options: tuple[str, ...], is_isolated: bool = False, interrupt: str = "4 9"
) -> Path:
    """Check that a run that is interrupted in an update and resumed equals a whole one; return its directory.

    Engine and learner are those without torch: the claim is about games, samplers and groups.
    """
    directories = []
    for name, variables in (("whole", {}), ("broken", {"INTERRUPT": interrupt})):
        (tmp_path / name).mkdir()
        config = runs.write_small(tmp_path / name)
        config.write_text(
            config.read_text().replace("num_actors = ", f"isolated = {is_isolated}\nnum_actors = ".lower())
        )
        code, out, err = runs.run_torchless("run", config, *runs.PLAYS_NIM, *options, **variables)
        assert name == "broken" or code == 0, out + err
        directories.append(runs.run_directory(tmp_path / name))
    whole, broken = directories
    out = runs.output_of(runs.run_torchless("run", "--resume", broken))
    assert re.search(r"\bafter update [24]\b", out)
    assert_equal(broken, whole, {"ckpt-2", "ckpt-4", "ckpt-6"})
    return broken


POLICIES = (
    *KILLED,
    "league.opponent_lag=[1, 2]",
    'policies.main.opponents={ mirror = 0.4, lagged = 0.3, "policy:exploiter" = 0.3 }',
    'policies.exploiter.opponents={ "policy:main" = 0.6, "policy:main/past" = 0.4 }',
    "policies.exploiter.share=0.4",
    "policies.exploiter.algorithm=fakes.slow_learners:SkipsItsFirstBatch",
)


@pytest.mark.nightly
def test_resumed_sync_run_of_two_policies_equals_a_whole_one(tmp_path: Path) -> None:
    broken = whole_and_resumed(tmp_path, POLICIES)
    trained = [line["model"] for line in run_files.evaluations(broken)]
    assert trained[-2:] == ["main/ckpt-4", "exploiter/ckpt-2"]
    games = run_files.games(broken)
    met = {(one["model"].partition("/")[0], other["model"].partition("/")[0]) for one, other in map(seated, games)}
    assert {("exploiter", "main"), ("main", "main"), ("main", "exploiter")} <= met


RESTARTS = (
    *POLICIES,
    "run.learning_steps=8",
    'policies.main.opponents={ mirror = 0.4, population = { weight = 0.6, meta = "nash" } }',
    'policies.exploiter.restart={ from = "main", at_updates = 1 }',
    "policies.exploiter.share=0.5",
)


@pytest.mark.nightly
def test_lineage_ends_in_the_same_update_if_the_run_is_stopped_in_it(tmp_path: Path) -> None:
    whole_and_resumed(tmp_path, RESTARTS, interrupt="5 2")  # the exploiter's second one that is not skipped


def test_resumed_sync_run_of_lineages_equals_a_whole_one(tmp_path: Path) -> None:
    broken = whole_and_resumed(tmp_path, RESTARTS)
    state = json.loads((broken / "checkpoints" / "ckpt-6" / "league.json").read_text())
    assert state["policies"]["exploiter"]["lineage"] == 4
    newest = {name: value for update in run_files.updates(broken) for name, value in update.items()}
    assert [newest[f"{name}/learner/skipped_updates"] for name in ("main", "exploiter")] == [0, 1]
    assert state["registry"]["population"] == ["exploiter/ckpt-1", "exploiter/ckpt-2", "exploiter/ckpt-3"]
    games = run_files.games(broken)
    kept = {agent["model"] for game in games for agent in game["agents"] if not agent["collect_data"]}
    assert {"exploiter/ckpt-1", "exploiter/ckpt-2"} <= kept, "main meets the population"
    begins = {model for game in games for agent in game["agents"] if "initial-" in (model := agent["model"])}
    assert {"exploiter/initial-2", "exploiter/initial-3"} <= begins


def seated(game: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the agents, a trained one first."""
    return sorted(game["agents"], key=lambda agent: not agent["collect_data"])


BRANCHES = (
    *KILLED,
    "algorithm=rloo",
    "run.group_size=3",
    'league.env_sampling_strategy={ "examples.branching:Branching" = '
    '{ share = 0.7, at = "uncertain", chance = "fresh" } }',
)


@pytest.mark.nightly
def test_resumed_sync_run_plays_the_same_branches_of_isolated_games(tmp_path: Path) -> None:
    broken = whole_and_resumed(tmp_path, BRANCHES, is_isolated=True)
    games = run_files.games(broken)
    branched = [game for game in games if "branch_turn" in game]
    assert len(branched) > 8 and not any(game["error"] for game in games)
    states: dict[tuple[int, tuple[str, ...]], str] = {}
    for game in branched:
        turns, number = game["turns"], game["branch_turn"]
        assert turns[number][0] in [agent["pid"] for agent in game["agents"] if agent["collect_data"]]
        actions = tuple(turn[3] for turn in turns[:number])
        assert states.setdefault((game["seed"], actions), turns[number][1]) == turns[number][1]
    assert max(line.get("run/branched_games", 0) for line in run_files.metrics(broken)) > 0


@pytest.mark.nightly
def test_resumed_sync_run_plays_the_same_groups_of_duplicates(tmp_path: Path) -> None:
    broken = whole_and_resumed(tmp_path, DUPLICATES)
    seats: dict[tuple[int, str], list[int]] = {}
    for game in run_files.games(broken):
        trained = [agent["pid"] for agent in game["agents"] if agent["collect_data"]]
        if len(trained) == 1:  # neither an evaluation nor a game against itself, as before there is an older checkpoint
            seats.setdefault((game["seed"], game["env_id"]), []).append(trained[0])
    assert len(seats) > 5
    assert all(sorted(of_group) == [0, 0, 1, 1] for of_group in seats.values())
