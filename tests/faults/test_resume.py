"""A run that was killed goes on from its newest whole checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import runs
from unstable_lite.checkpoints import (
    find_damage,
    newest_checkpoint,
    read_checkpoint,
    replace_config,
    save_checkpoint,
    to_toml,
)
from unstable_lite.config import parse_config
from unstable_lite.errors import UnstableError
from unstable_lite.trackers.records import read_records
from unstable_lite.transport import messages
from unstable_lite.types import Generation, Step

LEAGUE = (
    "run.checkpoint_every=2",
    "run.num_eval_workers=0",
    "league.opponent_sampling_strategy={ mirror = 0.4, lagged = 0.4, fixed = 0.2 }",
    "league.opponent_lag=[1, 2]",
)


def games_of(state: dict[str, Any]) -> dict[str, int]:
    models = state["registry"]["models"]
    return dict(zip(models["uid"], models["games"], strict=True))


def updates_of(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "learner/loss" in line]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed after its fifth update or so; its newest checkpoint is of the fourth."""
    tmp_path = tmp_path_factory.mktemp("killed")
    process = runs.start("run", runs.write_small(tmp_path), *LEAGUE, "run.learning_steps=10000")
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 5)
    os.kill(process.pid, signal.SIGKILL)
    runs.finish(process)
    return runs.run_directory(tmp_path)


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed, tmp_path / "run", symlinks=True)


def test_a_killed_run_goes_on_and_tells_every_update_and_game_once(copy: Path) -> None:
    newest = max(int(path.name.removeprefix("ckpt-")) for path in (copy / "checkpoints").glob("ckpt-*"))
    state = json.loads((copy / "checkpoints" / f"ckpt-{newest}" / "league.json").read_text())
    config = (copy / "config.toml").read_text()
    told_early = {"label": "concurrent", "model": f"ckpt-{newest}", "step": newest, "n": 777}  # before it was killed
    with (copy / "eval.jsonl").open("a") as file:
        first = (copy / "eval.jsonl").read_text().splitlines()[0]
        file.write(json.dumps(json.loads(first) | told_early) + "\n")
    count = state["buffer"]["counters"]
    last = newest + 3 + (count["added"] - count["taken"]) // 24  # more updates than the steps that waited can feed
    code, out, err = runs.run("run", "--resume", copy, f"run.learning_steps={last}")
    assert code == 0, out + err
    assert (copy / "config.toml").read_text() == config.replace("steps = 10000", f"steps = {last}") != config
    assert (copy / f"config-{newest}.toml").read_text() == config
    assert f"going on after update {newest}, from ckpt-{newest}" in out
    updates = updates_of(copy)
    assert [line["step"] for line in updates] == list(range(1, last + 1))
    assert [line["learner/step"] for line in updates] == list(range(1, last + 1))
    assert all(line["learner/staleness_max"] <= 8 for line in updates)
    games = [record["game_idx"] for record in read_records(copy / "games.jsonl")]
    assert len(games) == len(set(games))
    league = [json.loads(line) for line in (copy / "league.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in league}) == list(range(last + 1))
    assert updates[newest]["run/games"] >= state["tracker"]["games"]
    events = EventAccumulator(str(copy / "tensorboard"), {"tensors": 0})  # 0: all, not a sample of 10
    events.Reload()
    assert [event.step for event in events.Tensors("learner/loss")] == list(range(1, last + 1))
    rated = games_of(state)
    after = json.loads((copy / "checkpoints" / f"ckpt-{last}" / "league.json").read_text())
    assert all(games >= rated.get(uid, 0) for uid, games in games_of(after).items())
    assert games_of(after).keys() >= {f"ckpt-{n}" for n in range(1, last + 1)}
    assert after["buffer"]["counters"]["added"] > count["added"]
    evaluations = list(read_records(copy / "eval.jsonl"))
    assert 777 not in [line["n"] for line in evaluations]
    told = [(line["label"], line["model"], line["env_id"]) for line in evaluations]
    assert len(told) == len(set(told))
    assert out.count("evaluation before") == 0


def test_a_run_goes_on_with_other_opponents_and_another_way_to_draw_them(copy: Path) -> None:
    newest = max(int(path.name.removeprefix("ckpt-")) for path in (copy / "checkpoints").glob("ckpt-*"))
    num_games = len([*read_records(copy / "games.jsonl")])
    judge = '{ env_id="Nim-v0-train", num_players=2, prompt_template="tiny", fixed_opponent="scripted:optimal" }'
    changes = (
        "league.opponent_sampling_strategy=pfsp",
        "league.fixed_opponents=['scripted:optimal']",
        f"eval_envs=[{judge}]",
        f"run.learning_steps={newest + 8}",
    )
    code, out, err = runs.run("run", "--resume", copy, *changes)
    assert code == 0, out + err
    assert "PrioritizedFictitiousModelSampler begins anew" in out
    new_games = [*read_records(copy / "games.jsonl")][num_games + 24 :]  # without those that were played anew
    met = {agent["model"] for game in new_games if game["kind"] == "train" for agent in game["agents"]}
    assert "fixed-scripted:optimal" in met
    assert "fixed-scripted:random" not in met
    assert "pfsp" in (copy / "config.toml").read_text()


def test_what_checkpoints_are_made_of_cannot_be_changed_on_the_way(copy: Path) -> None:
    config = (copy / "config.toml").read_text()
    code, _, err = runs.run("run", "--resume", copy, "algorithm=a2c", "buffer.kind=auto", "lora.lora_rank=4")
    assert code == 1, err
    assert 'algorithm = "a2c": what the run\'s checkpoints hold was made with "reinforce"' in err
    assert "lora.lora_rank = 4: what the run's checkpoints hold was made with 32" in err
    assert "Traceback" not in err
    assert (copy / "config.toml").read_text() == config


def test_the_engines_of_a_resumed_run_are_told_that_they_go_on(tmp_path: Path) -> None:
    engine, steps = "engine.kind=told_engines:TellsWhetherItGoesOn", "run.learning_steps={}"
    code, out, err = runs.run("run", runs.write_small(tmp_path), engine, steps.format(1), "run.eval_games=0")
    assert code == 0 and "goes on False" in out, out + err
    code, out, err = runs.run("run", "--resume", runs.run_directory(tmp_path), steps.format(2))
    assert code == 0 and "goes on True" in out, out + err


def test_a_run_goes_on_after_what_may_be_pruned_of_it_is_gone(copy: Path) -> None:
    numbers = sorted(int(path.name.removeprefix("ckpt-")) for path in (copy / "checkpoints").glob("ckpt-*"))
    code, out, err = runs.run("runs", "prune", copy, "--train-data", "--yes")
    assert code == 0 and "freed" in out, out + err
    kept = [path.name for path in (copy / "checkpoints").glob("ckpt-*")]
    assert kept == [f"ckpt-{numbers[-1]}"]
    code, out, err = runs.run("run", "--resume", copy, f"run.learning_steps={numbers[-1] + 1}", "run.eval_games=0")
    assert code == 0, out + err
    assert [line["step"] for line in updates_of(copy)] == list(range(1, numbers[-1] + 2))


def test_what_was_evaluated_beside_training_when_a_run_was_stopped_is_told_once(tmp_path: Path) -> None:
    overrides = ("run.eval_games=0", "run.learning_steps=3", "learner.batch_size=96")
    process = runs.start("run", runs.write_small(tmp_path), *overrides)
    runs.wait_for(lambda: any(tmp_path.glob("outputs/*/*/games.jsonl")))
    directory = runs.run_directory(tmp_path)

    def evaluated() -> list[str]:
        games = [record for record in read_records(directory / "games.jsonl") if record["kind"] == "eval"]
        return [agent["model"] for game in games for agent in game["agents"]]

    runs.wait_for(lambda: evaluated().count("ckpt-1") >= 3)
    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process)
    assert code == 0, out + err
    code, out, err = runs.run("run", "--resume", directory, "learner.batch_size=24")
    assert code == 0, out + err
    told = [line["model"] for line in read_records(directory / "eval.jsonl")]
    assert told.count("ckpt-1") == 1
    assert len(told) == len(set(told))


def test_of_the_last_evaluation_a_resume_makes_what_was_not_over(tmp_path: Path) -> None:
    small = runs.write_small(tmp_path)
    first = small.read_text().partition("[[eval_envs]]")[2]
    small.write_text(f"{small.read_text()}\n[[eval_envs]]{first.replace('Nim', 'TicTacToe')}")

    def told() -> list[tuple[str, int, str]]:
        lines = [line for path in tmp_path.glob("outputs/*/*/eval.jsonl") for line in read_records(path)]
        return [(line["label"], line["step"], line["env_id"]) for line in lines]

    process = runs.start("run", small, "run.eval_games=60", "run.num_eval_workers=0", "run.learning_steps=1")
    runs.wait_for(lambda: ("after", 1, "Nim-v0-train") in told())
    os.kill(process.pid, signal.SIGKILL)
    runs.finish(process)
    before = [("before", 0, "Nim-v0-train"), ("before", 0, "TicTacToe-v0-train")]
    assert told() == [*before, ("after", 1, "Nim-v0-train")]
    directory = runs.run_directory(tmp_path)
    code, out, err = runs.run("run", "--resume", directory)
    assert code == 0, out + err
    assert told() == [*before, ("after", 1, "Nim-v0-train"), ("after", 1, "TicTacToe-v0-train")]
    assert [line["step"] for line in updates_of(directory)] == [1]
    code, _, err = runs.run("run", "--resume", directory)
    assert (code, "has made its 1 updates" in err) == (1, True)


def test_an_actor_and_its_critic_go_on_together(tmp_path: Path) -> None:
    small = runs.write_small(tmp_path)
    overrides = ("run.eval_games=0", "run.num_eval_workers=0", "run.checkpoint_every=1")
    code, out, err = runs.run("run", small, "algorithm=a2c", *overrides, "run.learning_steps=1")
    assert code == 0, out + err
    directory = runs.run_directory(tmp_path)
    assert find_damage(directory / "checkpoints" / "ckpt-1") is None
    code, out, err = runs.run("run", "--resume", directory, "run.learning_steps=2")
    assert code == 0, out + err
    assert [line["learner/step"] for line in updates_of(directory)] == [1, 2]
    head = directory / "checkpoints" / "ckpt-2" / "critic" / "value_head.safetensors"
    head.write_bytes(head.read_bytes()[:-1])
    assert find_damage(directory / "checkpoints" / "ckpt-2") is not None


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "learner.safetensors", "league.json", "waiting.msgpack"])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_is_taken(copy: Path, file: str) -> None:
    newest, before = damage_newest(copy / "checkpoints", file)
    said: list[str] = []
    assert newest_checkpoint(copy / "checkpoints", said.append).name == f"ckpt-{before}"
    assert said == [
        f"ckpt-{newest} cannot be used ({file} has other contents than were written); it is now damaged-ckpt-{newest}"
    ]


def test_a_directory_of_another_name_beside_the_checkpoints_is_neither_taken_nor_touched(tmp_path: Path) -> None:
    (tmp_path / "ckpt-9-best").mkdir()
    (tmp_path / "ckpt-²").mkdir()
    said: list[str] = []
    with pytest.raises(UnstableError, match="no checkpoint to go on from"):
        newest_checkpoint(tmp_path, said.append)
    assert said == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-9-best", "ckpt-²"]


def test_a_run_goes_on_before_a_damaged_checkpoint_and_writes_it_anew(copy: Path) -> None:
    newest, before = damage_newest(copy / "checkpoints", "adapter_model.safetensors")
    code, out, err = runs.run("run", "--resume", copy, f"run.learning_steps={newest}", "run.eval_games=0")
    assert code == 0, out + err
    assert f"ckpt-{newest} cannot be used" in out
    assert f"going on after update {before}" in out
    assert [line["step"] for line in updates_of(copy)] == list(range(1, newest + 1))
    assert find_damage(copy / "checkpoints" / f"ckpt-{newest}") is None


def damage_newest(checkpoints: Path, file: str) -> tuple[int, int]:
    """One bit of it; the updates of the newest checkpoint and of the one before."""
    *_, before, newest = sorted(int(path.name.removeprefix("ckpt-")) for path in checkpoints.glob("ckpt-*"))
    damaged = checkpoints / f"ckpt-{newest}" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    return newest, before


def test_a_run_without_a_whole_checkpoint_says_so(copy: Path) -> None:
    for path in (copy / "checkpoints").glob("ckpt-*"):
        (path / "manifest.json").unlink()
    code, out, err = runs.run("run", "--resume", copy)
    assert code == 1
    assert "manifest.json is missing" in out
    assert "there is no checkpoint to go on from" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("section", "content", "says"),
    [
        ("scheduler", None, "KeyError: 'scheduler'"),
        (
            "registry",
            {"current": "nobody", "models": {}, "match_counts": [], "ratings": {}, "draws": {}},
            "KeyError: 'nobody'",
        ),
    ],
    ids=["before workers are started", "after"],
)
def test_a_checkpoint_with_other_contents_than_a_runs_ends_the_run_with_what_to_do(
    copy: Path, section: str, content: Any, says: str
) -> None:
    """Whole by its checksums: somebody else wrote it, or another version."""
    newest = max((copy / "checkpoints").glob("ckpt-*"), key=lambda path: int(path.name.removeprefix("ckpt-")))
    state = json.loads((newest / "league.json").read_text())
    del state[section]
    write_with_checksum(newest, "league.json", json.dumps(state | ({section: content} if content else {})))
    assert find_damage(newest) is None
    code, _, err = runs.run("run", "--resume", copy)
    assert code == 1
    assert f"{newest}/league.json is as it was written, but it is not what this version of unstable_lite writes" in err
    assert says in err
    assert f"remove {newest} to go on from the checkpoint before it" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("name", "content"), [("league.json", "{"), ("waiting.msgpack", "[4, []]")])
def test_a_checkpoint_that_cannot_be_read_at_all_is_named(copy: Path, name: str, content: str) -> None:
    newest = max((copy / "checkpoints").glob("ckpt-*"), key=lambda path: int(path.name.removeprefix("ckpt-")))
    write_with_checksum(newest, name, content)
    with pytest.raises(
        UnstableError, match=rf"{name} is as it was written, but .* go on from the checkpoint before it"
    ):
        read_checkpoint(newest)


async def test_steps_that_wait_are_saved_however_many_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 1_000_000)  # of 1 GiB, which a test has no room for

    async def save_learner(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"weights")

    generation = Generation(
        prompt_ids=np.arange(9, dtype=np.int32),
        completion_ids=np.array([1], np.int32),
        logprobs=np.array([-0.5], np.float32),
        text="a",
        finish_reason="stop",
        adapter_version=1,
    )
    chunks = [
        [Step(pid=0, obs="x" * 400, act="a", reward=turn, env_id="E", generation=generation) for turn in range(size)]
        for size in (1, 700, 999, 5, 0, 1500, 300)
    ]
    directory = await save_checkpoint(tmp_path, 1, {}, chunks, save_learner)
    assert (directory / "waiting.msgpack").stat().st_size > 1_500_000
    read = read_checkpoint(directory).waiting
    assert [[step.reward for step in chunk] for chunk in read] == [list(range(len(chunk))) for chunk in chunks]


def test_every_config_that_updates_were_made_with_is_kept(tmp_path: Path) -> None:
    def learning_steps() -> dict[str, int]:
        paths = sorted(tmp_path.glob("config*.toml"))
        return {path.name: tomllib.loads(path.read_text())["run"]["learning_steps"] for path in paths}

    config = parse_config(tomllib.loads(runs.SMALL))[0]
    assert config is not None
    (tmp_path / "config.toml").write_text(to_toml(config.model_dump(mode="json")))
    for steps, update in ((3, 2), (10, 2), (20, 2), (20, 6), (30, 8)):
        run = config.run.model_copy(update={"learning_steps": steps})
        replace_config(tmp_path, config.model_copy(update={"run": run}), update)
    assert learning_steps() == {"config-2.toml": 3, "config-8.toml": 20, "config.toml": 30}


def write_with_checksum(checkpoint: Path, name: str, content: str) -> None:
    (checkpoint / name).write_text(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = {"bytes": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_that_is_done_or_is_no_run_or_still_runs_is_not_resumed(copy: Path, tmp_path: Path) -> None:
    config = (copy / "config.toml").read_text()
    code, _, err = runs.run("run", "--resume", copy, "run.learning_steps=1")
    assert (code, "has made its" in err) == (1, True)
    assert (copy / "config.toml").read_text() == config
    code, _, err = runs.run("run", "--resume", tmp_path)
    assert (code, "config.toml" in err) == (1, True)
    process = runs.start("run", "--resume", copy)
    runs.wait_for(lambda: runs.children_of(process))
    code, _, err = runs.run("run", "--resume", copy)
    assert (code, "another process is running this run" in err) == (1, True)
    process.kill()
    runs.finish(process)


KILLS = int(os.environ.get("UNSTABLE_LITE_KILLS", "2"))
"""More of them take half a minute each."""


@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.slow
def test_kills_at_random_moments_never_leave_a_run_that_cannot_go_on(tmp_path: Path) -> None:
    """Start-up, saves, evaluations and updates are all among the moments."""
    chance = random.Random(5)
    small = runs.write_small(tmp_path)
    process = runs.start("run", small, *LEAGUE, "run.checkpoint_every=1", "run.learning_steps=10000")
    runs.wait_for(lambda: any(tmp_path.glob("outputs/*/*/checkpoints/ckpt-*")))
    directory = runs.run_directory(tmp_path)
    for kill in range(KILLS):
        runs.wait_for(lambda: len(runs.children_of(process)) == 2)  # noqa: B023
        children, before = runs.children_of(process), runs.num_updates(tmp_path)
        if kill % 4 != 3:  # the fourth is killed while it starts
            runs.wait_for(lambda: runs.num_updates(tmp_path) > before)  # noqa: B023
        try:
            process.wait(chance.uniform(0, 1))
        except runs.subprocess.TimeoutExpired:
            process.kill()
        runs.finish(process)
        runs.wait_for(lambda: runs.are_gone(children), 5)  # noqa: B023
        process = runs.start("run", "--resume", directory)
        runs.wait_for(lambda: runs.children_of(process))  # noqa: B023
        assert len(runs.arenas_named(directory.name)) <= 1  # not that of the one that was killed
    process.send_signal(signal.SIGINT)
    runs.finish(process)
    code, out, err = runs.run("run", "--resume", directory, f"run.learning_steps={len(updates_of(directory)) + 2}")
    assert code == 0, out + err
    steps = [line["step"] for line in updates_of(directory)]
    assert steps == list(range(1, len(steps) + 1))
    games = [record["game_idx"] for record in read_records(directory / "games.jsonl")]
    assert len(games) == len(set(games))
