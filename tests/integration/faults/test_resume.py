"""A killed run resumes from its newest intact checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fakes import run_files, runs
from unstable_lite.config.reading import parse_config
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.errors import UnstableError
from unstable_lite.files import read_records
from unstable_lite.orchestrator.checkpoint import newest_checkpoint, read_checkpoint, save_checkpoint
from unstable_lite.tracking.displayed_metrics import duration
from unstable_lite.tracking.run_directory import find_damage, replace_config, to_toml
from unstable_lite.transport import codec
from unstable_lite.transport.rpc import BUS, make_socket_directory
from unstable_lite.types import Generation, Step

LEAGUE = (
    *runs.SCRIPTED,
    "run.checkpoint_every=2",
    "run.num_eval_workers=0",
    "league.opponent_sampling_strategy={ mirror = 0.4, lagged = 0.4, fixed = 0.2 }",
    "league.opponent_lag=[1, 2]",
)
LONG, SLOW = "fakes.long_games:LongGames-v0", "fakes.long_games:SlowEngine"


def games_of(state: dict[str, Any]) -> dict[str, int]:
    models = state["registry"]["models"]
    return dict(zip(models["uid"], models["games"], strict=True))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run killed after about five updates, with two checkpoints or more.

    Its workers end by themselves; its arena is left.
    """
    tmp_path = tmp_path_factory.mktemp("killed")
    process = runs.start_torchless("run", runs.write_small(tmp_path), *LEAGUE, "run.learning_steps=10000")
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 5)
    runs.wait_for(lambda: len(list(tmp_path.glob("outputs/*/*/checkpoints/ckpt-*"))) >= 2)
    children, directory = runs.children_of(process), runs.run_directory(tmp_path)
    assert runs.arenas_named(directory.name)  # not after the kill: any run that starts then may remove it
    process.kill()
    runs.finish(process)
    runs.wait_for(lambda: runs.are_gone(children), 5)
    return directory


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(killed, tmp_path / "run", symlinks=True)


def newest_of(run: Path, number: int = 1) -> int:
    """Return the update of the newest checkpoint of a run, or of an earlier one: the second newest is number 2."""
    return sorted(int(path.name.removeprefix("ckpt-")) for path in (run / "checkpoints").glob("ckpt-*"))[-number]


def test_resumed_run_records_every_update_and_game_once_and_removes_what_a_kill_left(
    killed: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", temporary := tempfile.mkdtemp())  # where no other test's run looks
    monkeypatch.setattr(tempfile, "tempdir", None)
    stale = make_socket_directory()
    with socket.socket(socket.AF_UNIX) as bus:
        bus.bind(str(stale / BUS))
    newest = newest_of(copy)
    state = json.loads((copy / "checkpoints" / f"ckpt-{newest}" / "league.json").read_text())
    config = (copy / "config.toml").read_text()
    early = {"label": "concurrent", "model": f"ckpt-{newest}", "step": newest, "n": 777}  # written before the kill
    with (copy / "eval.jsonl").open("a") as file:
        first = (copy / "eval.jsonl").read_text().splitlines()[0]
        file.write(json.dumps(json.loads(first) | early) + "\n")
    count = state["buffer"]["counters"]
    last = newest + 3 + (count["added"] - count["taken"]) // 24  # more updates than the waiting steps allow
    out = runs.output_of(runs.run_torchless("run", "--resume", copy, f"run.learning_steps={last}"))
    assert f"removed {stale}, left behind" in out and not stale.exists()
    assert runs.arenas_named(killed.name) == []
    shutil.rmtree(temporary)
    assert (copy / "config.toml").read_text() == config.replace("steps = 10000", f"steps = {last}") != config
    assert (copy / f"config-{newest}.toml").read_text() == config
    assert f"ckpt-{newest}" in out and ", of which training since the resume " in out
    updates = run_files.updates(copy)
    assert [line["step"] for line in updates] == list(range(1, last + 1))
    assert [line["learner/step"] for line in updates] == list(range(1, last + 1))
    assert all(line["learner/staleness_max"] <= 8 for line in updates)
    games = [record["game_idx"] for record in run_files.games(copy)]
    assert len(games) == len(set(games))
    assert sorted({line["step"] for line in read_records(copy / "league.jsonl")}) == list(range(last + 1))
    assert updates[newest]["run/games"] >= state["tracker"]["games"]
    run = RunDirectory(copy)
    run.refresh()
    assert f"games                {run.totals().games_text}\n" in out
    assert f"time                 {duration(run.totals().seconds)}, of which training since the resume " in out
    events = EventAccumulator(str(copy / "tensorboard"), {"tensors": 0})  # 0 loads all events
    events.Reload()
    assert [event.step for event in events.Tensors("learner/loss")] == list(range(1, last + 1))
    rated = games_of(state)
    after = json.loads((copy / "checkpoints" / f"ckpt-{last}" / "league.json").read_text())
    assert all(games >= rated.get(uid, 0) for uid, games in games_of(after).items())
    assert games_of(after).keys() >= {f"ckpt-{n}" for n in range(1, last + 1)}
    assert after["buffer"]["counters"]["added"] > count["added"]
    evaluations = run_files.evaluations(copy)
    assert 777 not in [line["n"] for line in evaluations]
    evaluations = [(line["label"], line["model"], line["env_id"]) for line in evaluations]
    assert len(evaluations) == len(set(evaluations))
    assert "update 0 " not in out


@pytest.mark.nightly
def test_resumed_run_may_change_opponents_and_lack_the_files_that_may_be_removed(copy: Path) -> None:
    """docs/resume.md lists these files."""
    newest = newest_of(copy)
    for path in (copy / "train_data", *(copy / "checkpoints").glob("ckpt-*")):
        if path.name != f"ckpt-{newest}":
            shutil.rmtree(path)
    state = json.loads((copy / "checkpoints" / f"ckpt-{newest}" / "league.json").read_text())
    num_games = sum(state["scheduler"]["games"].values())
    judge = '{ env_id="Nim-v0-train", num_players=2, prompt_template="tiny", fixed_opponent="scripted:optimal" }'
    changes = (
        "league.opponent_sampling_strategy=pfsp",
        "league.fixed_opponents=['scripted:optimal']",
        f"eval_envs=[{judge}]",
        f"run.learning_steps={newest + 8}",
    )
    out = runs.output_of(runs.run_torchless("run", "--resume", copy, *changes))
    assert "PrioritizedFictitiousModelSampler" in out
    new_games = [game for game in run_files.games(copy) if game["game_idx"] >= num_games]
    met = {agent["model"] for game in new_games if game["kind"] == "train" for agent in game["agents"]}
    assert "fixed-scripted:optimal" in met
    assert "fixed-scripted:random" not in met
    assert "pfsp" in (copy / "config.toml").read_text()
    assert [line["step"] for line in run_files.updates(copy)] == list(range(1, newest + 9))


def test_keys_that_shape_checkpoints_cannot_change_on_resume(copy: Path) -> None:
    config = (copy / "config.toml").read_text()
    code, _, err = runs.invoke("run", "--resume", copy, "algorithm=a2c", "buffer.kind=auto", "lora.lora_rank=4")
    assert code == 1, err
    assert re.search('algorithm = "a2c".*"reinforce"', err)
    assert re.search(r"lora\.lora_rank = 4\b.*\b32\b", err)
    assert "Traceback" not in err
    assert (copy / "config.toml").read_text() == config


def resume_with_an_open_evaluation(copy: Path, *settings: str) -> runs.subprocess.Popen[str]:
    """Resume a run whose newest checkpoint was being evaluated when it was saved."""
    newest = copy / "checkpoints" / f"ckpt-{newest_of(copy)}"
    state = json.loads((newest / "league.json").read_text())
    tally = {"void": 0, "games": [["win", 1.0, False, 0, 0]]}
    state["tracker"]["tallies"] = [[newest.name, "Nim-v0-train", "scripted:random", tally]]
    write_with_checksum(newest, "league.json", json.dumps(state))
    return runs.start_torchless("run", "--resume", copy, "run.num_eval_workers=2", *settings)


@pytest.mark.nightly
def test_engine_that_dies_while_a_resume_starts_is_named(copy: Path) -> None:
    process = resume_with_an_open_evaluation(copy, "engine.kind=fakes.stuck_engines:DiesInItsStart")
    code, out, err = runs.finish(process, 60)
    assert code == 1 and "engine-0 was killed by SIGKILL" in err, out + err
    assert "Traceback" not in err and "KeyError" not in err, err


def wait_for_handlers(process: runs.subprocess.Popen[str]) -> None:
    """Wait until the first lines of a command, which handle the signals, have run."""
    status, caught = Path(f"/proc/{process.pid}/status"), 0
    while not caught >> (signal.SIGUSR2 - 1) & 1:
        assert process.poll() is None
        caught = int(re.findall(r"^SigCgt:\s*(\w+)", status.read_text(), re.M)[0], 16)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_stop_of_a_command_that_still_imports_has_its_reason(tmp_path: Path, signum: int) -> None:
    process = runs.start("check", runs.write_small(tmp_path))
    wait_for_handlers(process)
    process.send_signal(signum)
    assert runs.finish(process, 60) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_stop_of_a_command_that_reads_its_arguments_has_its_reason(tmp_path: Path, signum: int) -> None:
    stop = f"lambda app: os.kill(os.getpid(), {signum:d}) or read(app)"
    code = f"import os, typer.main\nread = typer.main.get_command\ntyper.main.get_command = {stop}\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    modules = os.pathsep.join([str(tmp_path), runs.environment()["PYTHONPATH"]])
    process = runs.start("check", runs.write_small(tmp_path), PYTHONPATH=modules)
    assert runs.finish(process, 60) == (130, "", "error: interrupted\n")


@pytest.mark.nightly
@pytest.mark.parametrize("is_resumed", [True, False])
@pytest.mark.timeout(600)
def test_stop_at_any_moment_of_a_start_ends_with_its_reason(copy: Path, tmp_path: Path, is_resumed: bool) -> None:
    signals = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2]
    for moment in range(5):
        if is_resumed:
            process = resume_with_an_open_evaluation(copy)
        else:
            (tmp_path / "fresh").mkdir(exist_ok=True)
            endless = (*runs.SCRIPTED, "run.learning_steps=10000")
            process = runs.start_torchless("run", runs.write_small(tmp_path / "fresh"), *endless)
        wait_for_handlers(process)
        with contextlib.suppress(runs.subprocess.TimeoutExpired):
            process.wait(moment * 0.7)
        process.send_signal(signals[moment % 4])
        code, out, err = runs.finish(process, 90)
        # If Ctrl-C comes while the standard library runs generated code, Python ends by SIGINT itself.
        assert code in ((0, 130, -2) if signals[moment % 4] == signal.SIGINT else (0, 130)), out + err
        assert "interrupted" in out + err
        assert "Traceback" not in err, err


@pytest.mark.nightly
def test_resume_repeats_only_unfinished_parts_of_the_last_evaluation(tmp_path: Path) -> None:
    small = runs.write_small(tmp_path)
    first = small.read_text().partition("[[eval_envs]]")[2]
    second = first.replace("Nim-v0-train", LONG).replace("scripted:random", "base")
    small.write_text(f'{small.read_text()}\n[[eval_envs]]{second}observation = "first-last"')

    def evaluations() -> list[tuple[str, int, str]]:
        lines = [line for path in tmp_path.glob("outputs/*/*/eval.jsonl") for line in read_records(path)]
        return [(line["label"], line["step"], line["env_id"]) for line in lines]

    overrides = ("run.eval_games=60", "run.num_eval_workers=0", "run.learning_steps=1", f"engine.kind={SLOW}")
    process = runs.start_torchless("run", small, *overrides)
    runs.wait_for(lambda: ("after", 1, "Nim-v0-train") in evaluations())
    os.kill(process.pid, signal.SIGKILL)
    runs.finish(process)
    before = [("before", 0, "Nim-v0-train"), ("before", 0, LONG)]
    assert evaluations() == [*before, ("after", 1, "Nim-v0-train")]
    directory = runs.run_directory(tmp_path)
    runs.output_of(runs.run_torchless("run", "--resume", directory))
    assert evaluations() == [*before, ("after", 1, "Nim-v0-train"), ("after", 1, LONG)]
    assert [line["step"] for line in run_files.updates(directory)] == [1]
    code, _, err = runs.invoke("run", "--resume", directory)
    assert (code, "1 updates" in err) == (1, True)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "learner.safetensors", "league.json", "waiting.msgpack"])
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_used(copy: Path, file: str) -> None:
    newest, before = damage_newest(copy, file)
    logged: list[str] = []
    assert newest_checkpoint(copy / "checkpoints", logged.append).name == f"ckpt-{before}"
    assert len(logged) == 1
    assert re.search(rf"ckpt-{newest}\b.*\b{re.escape(file)}\b.*damaged-ckpt-{newest}", logged[0])


def test_directories_with_other_names_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "ckpt-9-best").mkdir()
    (tmp_path / "ckpt-²").mkdir()
    logged: list[str] = []
    with pytest.raises(UnstableError, match="no checkpoint"):
        newest_checkpoint(tmp_path, logged.append)
    assert logged == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-9-best", "ckpt-²"]


@pytest.mark.nightly
def test_resume_before_damaged_checkpoint_writes_it_again(copy: Path) -> None:
    newest, before = damage_newest(copy, "adapter_model.safetensors")
    (copy / "checkpoints" / f".ckpt-{newest + 1}.partial" / "exploiter").mkdir(parents=True)
    code, out, err = runs.run_torchless("run", "--resume", copy, f"run.learning_steps={newest}", "run.eval_games=0")
    assert code == 0, out + err
    assert f"damaged-ckpt-{newest}" in out and not list((copy / "checkpoints").glob(".*"))
    assert re.search(rf"\bafter update {before}\b", out)
    assert [line["step"] for line in run_files.updates(copy)] == list(range(1, newest + 1))
    assert find_damage(copy / "checkpoints" / f"ckpt-{newest}") is None


def damage_newest(run: Path, file: str) -> tuple[int, int]:
    """Flip a bit of `file` in the newest checkpoint; return the updates of the newest checkpoint and the one before."""
    newest, before = newest_of(run), newest_of(run, 2)
    damaged = run / "checkpoints" / f"ckpt-{newest}" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    return newest, before


def test_run_without_an_intact_checkpoint_is_refused(copy: Path) -> None:
    for path in (copy / "checkpoints").glob("ckpt-*"):
        (path / "manifest.json").unlink()
    code, out, err = runs.invoke("run", "--resume", copy)
    assert code == 1
    assert "manifest.json" in out
    assert "no checkpoint" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("section", "content", "says"),
    [
        ("scheduler", None, "KeyError: 'scheduler'"),
        (
            "registry",
            {"current": "unknown", "models": {}, "match_counts": [], "ratings": {}, "draws": {}},
            "KeyError: 'unknown'",
        ),
    ],
    ids=["before workers are started", "after"],
)
def test_checkpoint_with_unexpected_contents_ends_run_with_advice(
    copy: Path, section: str, content: Any, says: str
) -> None:
    """The checksums are right: another program or version wrote the file."""
    newest = copy / "checkpoints" / f"ckpt-{newest_of(copy)}"
    state = json.loads((newest / "league.json").read_text())
    del state[section]
    write_with_checksum(newest, "league.json", json.dumps(state | ({section: content} if content else {})))
    assert find_damage(newest) is None
    code, _, err = runs.run_torchless("run", "--resume", copy)
    assert code == 1
    assert f"{newest}/league.json" in err
    assert says in err
    assert f"remove {newest}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("name", "content"), [("league.json", "{"), ("waiting.msgpack", "[4, []]")])
def test_unreadable_checkpoint_file_is_named(copy: Path, name: str, content: str) -> None:
    newest = copy / "checkpoints" / f"ckpt-{newest_of(copy)}"
    write_with_checksum(newest, name, content)
    with pytest.raises(UnstableError, match=re.escape(name)):
        read_checkpoint(newest)


async def test_all_waiting_steps_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1_200_000)  # instead of 1 GiB, which is too much for a test

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


def test_every_config_that_made_updates_is_kept(tmp_path: Path) -> None:
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


def test_finished_running_or_missing_run_is_not_resumed(copy: Path, tmp_path: Path) -> None:
    config = (copy / "config.toml").read_text()
    code, _, err = runs.invoke("run", "--resume", copy, "run.learning_steps=1")
    assert (code, "updates" in err) == (1, True)
    assert (copy / "config.toml").read_text() == config
    code, _, err = runs.invoke("run", "--resume", tmp_path)
    assert (code, "config.toml" in err) == (1, True)
    process = runs.start_torchless("run", "--resume", copy)
    runs.wait_for(lambda: runs.children_of(process))
    code, _, err = runs.invoke("run", "--resume", copy)
    assert (code, "another process" in err) == (1, True)
    process.kill()
    runs.finish(process)


KILLS = int(os.environ.get("UNSTABLE_LITE_KILLS", "2"))
"""Number of kills; each takes half a minute."""


THREE = (
    'policies.main.opponents={ mirror = 0.5, "policy:exploiter" = 0.3, population = 0.2 }',
    'policies.exploiter.opponents={ "policy:main" = 0.7, "policy:main/past" = 0.3 }',
    'policies.exploiter.restart={ from = "base", at_updates = 3 }',
    'policies.third.opponents="policy:main"',
)


@pytest.mark.nightly
@pytest.mark.timeout(600 + 60 * KILLS)
@pytest.mark.parametrize("policies", [(), THREE], ids=["one policy", "three policies and lineages"])
def test_kills_at_random_moments_leave_a_resumable_run(tmp_path: Path, policies: tuple[str, ...]) -> None:
    """The kills hit start-up, saves, evaluations and updates; with three policies, workers too."""
    chance = random.Random(5)
    small, options = runs.write_small(tmp_path), ("run.checkpoint_every=1", "run.learning_steps=10000", *policies)
    process = runs.start_torchless("run", small, *LEAGUE, *options)
    runs.wait_for(lambda: any(tmp_path.glob("outputs/*/*/checkpoints/ckpt-*")))
    directory = runs.run_directory(tmp_path)
    for kill in range(KILLS):
        runs.wait_for(lambda: len(runs.children_of(process)) == 2)  # noqa: B023
        children, before = runs.children_of(process), runs.num_updates(tmp_path)
        if kill % 4 != 3:  # every fourth run is killed during its start
            runs.wait_for(lambda: runs.num_updates(tmp_path) > before)  # noqa: B023
            if policies:
                chance.choice(children).kill()
                runs.wait_for(lambda: runs.num_updates(tmp_path) > before + 4)  # noqa: B023
                children = runs.children_of(process)
        try:
            process.wait(chance.uniform(0, 1))
        except runs.subprocess.TimeoutExpired:
            process.kill()
        runs.finish(process)
        runs.wait_for(lambda: runs.are_gone(children), 5)  # noqa: B023
        process = runs.start_torchless("run", "--resume", directory)
        runs.wait_for(lambda: runs.children_of(process))  # noqa: B023
        assert len(runs.arenas_named(directory.name)) <= 1  # not the killed process's arena
    process.send_signal(signal.SIGINT)
    runs.finish(process)
    steps = f"run.learning_steps={len(run_files.updates(directory)) + 2}"
    runs.output_of(runs.run_torchless("run", "--resume", directory, steps))
    updates = run_files.updates(directory)
    assert [line["step"] for line in updates] == list(range(1, len(updates) + 1))
    if policies:
        of_main = [line["main/learner/step"] for line in updates if "main/learner/step" in line]
        assert of_main == list(range(1, len(of_main) + 1)) and len(of_main) > len(updates) / 4
        lineages = [line["exploiter/league/lineage"] for line in updates if "exploiter/league/lineage" in line]
        assert lineages == [1 + n // 3 for n in range(len(lineages))]
    games = [record["game_idx"] for record in run_files.games(directory)]
    assert len(games) == len(set(games))
