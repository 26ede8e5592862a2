"""Real runs against frozen players: their games, their checks, and resumes after the other run moved on or is gone."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import unstable_lite as unstable
from fakes import numpy_learner, run_files, runs, sync_runs
from fakes.handmade_adapters import fitting, write_adapter
from unstable_lite.adapters.frozen import FIRST_FROZEN_VERSION, slug
from unstable_lite.adapters.peft_files import WEIGHTS
from unstable_lite.config.reading import read_config
from unstable_lite.errors import ConfigError
from unstable_lite.files import read_records
from unstable_lite.planning.defaults import active_checkpoints
from unstable_lite.planning.plan import make_plan

TINY = "builtin:tiny"


def write_other_run(directory: Path) -> Path:
    """Write a run with two checkpoints, of which the first is the best."""
    for update in (10, 20):
        write_adapter(directory / "checkpoints" / f"ckpt-{update}", fitting(TINY, update), base=TINY)
    env = '[[eval_envs]]\nenv_id = "Nim-v0-train"\nnum_players = 2\nfixed_opponent = "base"\n'
    (directory / "config.toml").write_text(env)
    for update, points in ((10, 0.7), (20, 0.6)):
        line = {"label": "after", "model": f"ckpt-{update}", "env_id": "Nim-v0-train", "opponent": "base"}
        with (directory / "eval.jsonl").open("a") as file:
            file.write(json.dumps(line | {"points": points, "mean_reward": 0.0}) + "\n")
    return directory


def versions_of(games: Iterable[dict[str, Any]], uids: set[str] | None = None) -> dict[str, set[int]]:
    """Return the adapters with which each opponent answered. `uids`: count only games of these models."""
    versions: dict[str, set[int]] = {}
    for game in games:
        opponents = {agent["pid"]: agent["opponent"] for agent in game["agents"] if "opponent" in agent}
        if uids is None or any(agent["model"] in uids for agent in game["agents"]):
            for pid, *_, sampled in game["turns"]:
                if pid in opponents:
                    versions.setdefault(opponents[pid], set()).add(sampled["adapter_version"])
    return versions


def write_config(directory: Path, evaluated: str, *names: str) -> Path:
    """Write a config that trains against these opponents alone and evaluates against another."""
    path = runs.write_small(directory)
    text = path.read_text().replace('fixed_opponents = ["scripted:random"]', f"fixed_opponents = {json.dumps(names)}")
    text = text.replace("{ mirror = 0.5, fixed = 0.5 }", '"fixed"')
    path.write_text(text.replace('fixed_opponent = "scripted:random"', f'fixed_opponent = "{evaluated}"'))
    return path


@pytest.mark.nightly
def test_every_kind_of_frozen_player_answers_with_its_own_adapter(tmp_path: Path) -> None:
    """Digests and canaries pass, an all-zero adapter's too, and each turn bears the id of its player's adapter."""
    other = write_other_run(tmp_path / "other")
    zeros = {name: 0 * matrix for name, matrix in fitting(TINY, rank=2).items()}
    zero = write_adapter(tmp_path / "zero", zeros, base=TINY, r=2)
    average = f"average:{other}"
    names = [f"run:{other}/best", f"run:{other}/ckpt-20", f"adapter:{zero}", "base"]
    config = write_config(tmp_path, names[0], *names, average)
    out = runs.output_of(runs.run("run", config, "tracker.keep_tokens=true", "run.learning_steps=2"))
    assert re.search(r"frozen player \S+/best is \S+/ckpt-10, as copied into opponents/", out)
    directory = runs.run_directory(tmp_path)
    versions = versions_of(run_files.games(directory))
    assert versions.pop(f"{average}/ckpt-10,20") <= {FIRST_FROZEN_VERSION + 3, FIRST_FROZEN_VERSION + 4}
    assert versions == {name: {FIRST_FROZEN_VERSION + n} for n, name in enumerate(names[:-1])} | {"base": {0}}
    rated = {uid for line in read_records(directory / "league.jsonl") for uid, row in line["models"].items() if row[2]}
    assert {f"fixed-{name}" for name in names} <= rated
    assert {line["opponent"] for line in run_files.evaluations(directory)} == {names[0]}
    assert {path.name for path in (directory / "opponents").iterdir()} == set(
        map(slug, [*names[:-1], f"run:{other}/ckpt-10"])
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("run", "engine", "says"),
    [
        (runs.run, "ServesBaseForFrozenPlayers", r"engine-0 does not compute like .*run:\S+/(best|newest).*the base"),
        (runs.run_torchless, "ReadsAnotherFrozenPlayer", r"engine-0 holds another adapter .*copy of run:\S+/newest"),
    ],
)
def test_engine_that_serves_other_weights_for_a_frozen_player_ends_the_run(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]], engine: str, says: str
) -> None:
    other = write_other_run(tmp_path / "other")
    config = write_config(tmp_path, "base", f"run:{other}/best", f"run:{other}/newest")
    code, out, err = run("run", config, f"engine.kind=fakes.lying_engines:{engine}")
    assert code == 1
    assert re.search(says, err), err
    assert "update 1/" not in out, "no game was played"


@pytest.mark.nightly
def test_resumed_run_plays_its_copies_and_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    settings = (*sync_runs.SYNC, *runs.SCRIPTED, "run.learning_steps=4", "run.checkpoint_every=2", "run.eval_games=8")
    settings += ("league.opponent_sampling_strategy={ mirror = 0.2, fixed = 0.8 }",)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    other = write_other_run(tmp_path / "other")
    names = (f"run:{other}/newest", f"run:{other}/best", "base", f"average:{other}/linear")
    for directory in (whole, broken):
        directory.mkdir()
    runs.output_of(runs.run_torchless("run", write_config(whole, names[1], *names), *settings))
    code, _, err = runs.run_torchless("run", write_config(broken, names[1], *names), *settings, INTERRUPT="4 9")
    assert code == -9, err
    shutil.rmtree(other)
    ours, theirs = runs.run_directory(broken), runs.run_directory(whole)
    out = runs.output_of(runs.run_torchless("run", "--resume", ours))
    assert "after update 2" in out
    assert re.search(r"frozen player \S+/newest is \S+/ckpt-20", out)
    sync_runs.assert_equal(ours, theirs, {"ckpt-4"})
    copy = ours / "opponents" / slug(names[0]) / WEIGHTS
    copy.write_bytes(copy.read_bytes()[:-4] + b"\0\0\0\0")
    code, _, err = runs.run_torchless("run", "--resume", ours, "run.learning_steps=5")
    assert (code, "is damaged" in err) == (1, True), err


@pytest.mark.nightly
def test_run_survives_worker_deaths_with_each_update_once_and_its_frozen_players(tmp_path: Path) -> None:
    other = write_other_run(tmp_path / "other")
    best = f"run:{other}/best"
    config = write_config(tmp_path, best, best, "base")
    settings = ("run.learning_steps=10", "run.num_eval_workers=0", "run.eval_games=0", "tracker.keep_tokens=true")
    settings += ("algorithm=fakes.slow_learners:TakesAWhile",)
    process = runs.start_torchless("run", config, *runs.SCRIPTED, *settings)
    for number, module in enumerate((runs.TORCHLESS, "unstable_lite.engines.worker")):
        runs.wait_for(lambda: runs.num_updates(tmp_path) > number)  # noqa: B023
        commands = {child: child.as_dict(["cmdline"], [])["cmdline"] for child in runs.children_of(process)}
        (worker,) = (child for child, command in commands.items() if any(module in part for part in command))
        worker.kill()
        alarms = runs.run_directory(tmp_path) / "alarms.jsonl"
        runs.wait_for(lambda: alarms.exists() and alarms.read_text().count("restarted") > number)  # noqa: B023
    first = runs.num_updates(tmp_path) + 2  # the next update's adapter may have been loaded before
    out = runs.output_of(runs.finish(process))
    assert re.findall(r"alarm after update \d+: (\S+) .*restart", out) == ["learner", "engine-0"], out
    assert first <= 10
    directory = runs.run_directory(tmp_path)
    updates = run_files.updates(directory)
    assert [line["step"] for line in updates] == [line["learner/step"] for line in updates] == [*range(1, 11)]
    assert updates[-1]["run/void_games"] == 0
    assert 2 <= updates[-1]["run/alarms"] <= out.count("alarm after update")
    assert all(line["canary/mismatch"] < 0.1 for line in updates)
    assert runs.arenas_named(directory.name) == []
    versions = versions_of(run_files.games(directory), {f"ckpt-{update}" for update in range(first, 11)})
    assert versions[best] == {FIRST_FROZEN_VERSION}, "games of later checkpoints started after the restart"


def hand_made(tmp_path: Path, *adapters: Path, max_loras: int = 8, overrides: tuple[str, ...] = ()) -> unstable.Run:
    given = (f"engine.max_loras={max_loras}", "run.eval_games=0", "run.learning_steps=1")
    config, problems = read_config(runs.write_small(tmp_path), (*given, *overrides))
    assert config is not None, problems
    registry = unstable.ModelRegistry()
    for number, path in enumerate(adapters):
        registry.add_checkpoint(f"rival-{number}", path, iteration=10 * number)
    sampler = unstable.samplers.FixedOpponentModelSampler(registry, random.Random(0))
    envs = unstable.samplers.UniformRandomEnvSampler(config.train_envs, config.eval_envs)
    return unstable.Run(make_plan(config), scheduler=unstable.GameScheduler(sampler, envs))


@pytest.mark.nightly
def test_checkpoint_added_by_hand_is_played_and_rated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_learner.use(monkeypatch)
    adapters = [write_adapter(tmp_path / str(n), fitting(TINY, n), base=TINY) for n in range(3)]
    run = hand_made(tmp_path, *adapters, overrides=(*runs.SCRIPTED, "league.opponent_sampling_strategy=random"))
    summary = run.start()
    slots = active_checkpoints(run.plan.config, 3)
    assert run.training.parts.policies[""].pool._size == slots < active_checkpoints(run.plan.config)
    games = [game for game in run_files.games(summary.directory) if game["kind"] == "train"]
    models = {agent["model"] for game in games for agent in game["agents"]}
    assert "rival-0" in models and "fixed-scripted:random" not in models


def test_unfit_checkpoints_added_by_hand_are_refused_before_the_workers_start(tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / str(n), fitting(TINY, n), base=TINY) for n in range(3)]
    run = hand_made(tmp_path, *adapters, tmp_path / "nowhere", max_loras=3)
    with pytest.raises(ConfigError) as caught:
        run.start()
    absent, slots = caught.value.problems
    assert "nowhere" in absent
    assert "with 4 frozen players this league needs at least 6 adapter slots" in slots
