"""Evaluations as a user starts them: real engine processes; with a model only where a model is what it is about."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from handmade_adapters import small, write_adapter, write_run
from typer.testing import CliRunner

import runs
from unstable_lite.cli import app
from unstable_lite.errors import AdapterError, ConfigError, EnvError
from unstable_lite.evaluation.evaluator import AdapterSlots, Evaluated, evaluate, plan_evaluation
from unstable_lite.evaluation.models import find_models
from unstable_lite.evaluation.results import Results, results_tables, write_tables
from unstable_lite.trackers.records import read_records
from unstable_lite.trackers.tracker import POINTS, wilson_interval
from unstable_lite.workers import started_engines

TESTS = Path(__file__).parents[1]
PWN = "def read(text):\n    return text, True\nopen(__file__ + '.ran', 'w').close()\n"
SCRIPTED = (
    "engine.kind=scripted",
    'engine.replies=["\\\\boxed{[1 1]}", "\\\\boxed{[2 1]}", "\\\\boxed{[3 1]}"]',
    "engine.max_generation_len=32",
    "engine.max_model_len=4096",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four checkpoints that no engine with a model could load; the scripted one can."""
    return write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=4)


async def evaluated(models: Sequence[str | Path], output: Path, *overrides: str, **options: Any) -> Evaluated:
    plan = plan_evaluation([*map(str, models)], output=output, overrides=(*SCRIPTED, *overrides), **options)
    return await evaluate(plan, say=lambda _: None)


def lines(output: Path) -> list[dict[str, Any]]:
    return list(read_records(output / "results.jsonl"))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


async def test_models_against_opponents_end_in_tables_that_agree_with_the_games(run: Path, tmp_path: Path) -> None:
    done = await evaluated(["base", run], tmp_path / "out", games=6)
    assert done.played == 5 * 6
    games = lines(tmp_path / "out")
    assert Counter(game["model"] for game in games) == {m: 6 for m in ("base", "ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4")}
    table = read_csv(tmp_path / "out" / "table.csv")
    for row, evaluation in zip(table, done.evaluations, strict=True):
        own = [game for game in games if game["model"] == row["model"]]
        assert Counter(game["pid"] for game in own) == {0: 3, 1: 3}
        assert int(row["n"]) + int(row["void"]) == 6
        wins = sum(game["outcome"] == "win" for game in own)
        assert int(row["wins"]) == evaluation.wins == wins
        assert (float(row["low"]), float(row["high"])) == pytest.approx(wilson_interval(wins, evaluation.n), abs=1e-5)
        assert float(row["mean_reward"]) == pytest.approx(sum(game["reward"] for game in own) / len(own))
        assert int(row["own_invalid"]) == sum(game["own_invalid"] for game in own)
    markdown = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert len(markdown) == 2 + len(table)
    assert markdown[2].startswith("| base | scripted:random | Nim-v0-train | 2 | tiny |  | 6 |")
    reference = read_csv(tmp_path / "out" / "eval_results.csv")
    assert list(reference[0]) == [
        "game_idx",
        "env_id",
        "eval_model_pid",
        "eval_model_reward",
        "avg_opponent_reward",
        "num_turns",
    ]
    assert len(reference) == 30


async def test_models_are_compared_by_the_seeds_that_both_played_and_void_games_are_left_out(
    run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    await evaluated(["base", run], output, games=8)
    rows = lines(output)
    chance = random.Random(0)  # the scripted models lose every game
    for row in rows:
        row["outcome"] = chance.choice(["win", "draw", "loss"])
        if (row["model"], row["game"]) == ("ckpt-2", 5):
            row |= {"end": "void", "outcome": None, "reward": None}
    (output / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = plan_evaluation(["base", str(run)], output=output, games=8, overrides=SCRIPTED)
    with contextlib.closing(Results(output, plan.settings)) as results:
        base, *others = write_tables(results, plan.cells, plan.games)
    (table,) = results_tables([base, *others])
    changes = str(table.caption).splitlines()
    assert len(changes) == len(others) == 4
    in_csv = {row["model"]: row for row in read_csv(output / "table.csv")}
    assert (in_csv["base"]["compared_with"], in_csv["base"]["change"]) == ("", "")
    points = {(row["model"], row["game"]): POINTS[row["outcome"]] for row in rows if row["end"] != "void"}
    for other, change in zip(others, changes, strict=True):
        gained = []
        for seed in range(4):
            both = [n for n in (2 * seed, 2 * seed + 1) if (other.model, n) in points]
            gained.append(fmean(points[other.model, n] - points["base", n] for n in both))
        row = in_csv[other.model]
        assert (row["compared_with"], row["change_seeds"]) == ("base", "4")
        assert float(row["change"]) == pytest.approx(fmean(gained), abs=1e-6)
        half = (float(row["change_high"]) - float(row["change_low"])) / 2
        assert half == pytest.approx(3.182 * stdev(gained) / 2, abs=1e-5)
        assert change.startswith(f"{other.model}: change since base: {100 * fmean(gained):+.1f} points (95 %: ")
    assert in_csv["ckpt-2"]["void"] == "1" and "7 (+1 void)" in table.columns[1].cells


async def test_a_second_call_plays_only_what_is_not_there_and_completes_a_cut_cell(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    await evaluated(["base", run / "checkpoints" / "ckpt-1"], output, games=8)
    path = output / "results.jsonl"
    kept = path.read_text().splitlines()[:11]
    path.write_text("\n".join(kept) + '\n{"cell": "bas')  # as a crash leaves it
    again = await evaluated(["base", run / "checkpoints" / "ckpt-1"], output, games=8)
    assert again.played == 5
    assert path.read_text().splitlines()[:11] == kept
    assert Counter((g["model"], g["game"]) for g in lines(output)) == {
        (model, number): 1 for model in ("base", "ckpt-1") for number in range(8)
    }
    more = await evaluated(["base", run], output, games=10)
    assert more.played == 2 * 2 + 3 * 10
    assert (await evaluated(["base", run], output, games=10)).played == 0
    fewer = await evaluated(["base"], output, games=4, config=run / "config.toml")
    assert fewer.played == 0
    assert fewer.evaluations[0].n == 4


def evaluate_nim(model: str, run: Path, output: Path, games: int, *more: str) -> str:
    """As a user does it; returns what is printed."""
    overrides = [word for override in SCRIPTED for word in ("--set", override)]
    where = ("--config", run / "config.toml", "--output", output, "--games", str(games))
    code, out, err = runs.run("eval", model, *where, *more, *overrides)
    assert code == 0, err
    return out


def test_a_model_that_is_evaluated_later_is_added_to_the_tables(run: Path, tmp_path: Path) -> None:
    evaluate_nim("scripted:optimal", run, tmp_path / "out", 10)
    (before,) = read_csv(tmp_path / "out" / "table.csv")
    out = evaluate_nim("base", run, tmp_path / "out", 4)
    base, optimal = read_csv(tmp_path / "out" / "table.csv")
    assert (base["model"], int(base["n"]) + int(base["void"])) == ("base", 4)
    compared = {name: optimal[name] for name in optimal if name == "compared_with" or name.startswith("change")}
    assert (optimal, compared["compared_with"]) == (before | compared, "base")
    assert len((tmp_path / "out" / "table.md").read_text().splitlines()) == 4
    assert "base" in out and "scripted:optimal" not in out
    assert len(read_csv(tmp_path / "out" / "eval_results.csv")) == 4


def test_cells_that_differ_in_how_the_env_is_played_are_told_apart(run: Path, tmp_path: Path) -> None:
    envs = ("--env", "Nim-v0-train:2:tiny", "--env", "Nim-v0-train:2:default")
    out = evaluate_nim("base", run, tmp_path / "out", 2, *envs)
    table = read_csv(tmp_path / "out" / "table.csv")
    assert [(row["num_players"], row["prompt_template"]) for row in table] == [("2", "tiny"), ("2", "default")]
    assert re.search(r"model.+template.+games", out) and "players" not in out
    assert re.search(r"base .+tiny ", out) and re.search(r"base .+default ", out)
    assert "template" not in evaluate_nim("base", run, tmp_path / "out", 2, *envs[:2])
    assert len(read_csv(tmp_path / "out" / "table.csv")) == 2


async def test_what_else_of_an_env_is_set_is_told_too(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    text = config.read_text()
    env = text[text.index("[[eval_envs]]") :]
    config.write_text(f'{text}\n{env}\nmax_turns = 7\nobservation = "first-last"\n')
    await evaluated(["base"], tmp_path / "out", games=2, config=config)
    settings = [row["other_settings"] for row in read_csv(tmp_path / "out" / "table.csv")]
    assert settings == ["", "max_turns=7, observation=first-last"]


async def test_models_of_one_name_from_two_calls_are_told_apart(run: Path, tmp_path: Path) -> None:
    others = [
        write_adapter(tmp_path / name / "checkpoints" / "ckpt-1", small(seed)) for name, seed in (("a", 8), ("b", 9))
    ]
    for other in others:
        await evaluated([other], tmp_path / "out", games=2, config=run / "config.toml")
    names = [row["model"] for row in read_csv(tmp_path / "out" / "table.csv")]
    assert len({*names}) == 2
    assert all(re.fullmatch(r"ckpt-1 \([\w-]+\)", name) for name in names)


async def test_more_checkpoints_than_slots_play_in_turns(run: Path, tmp_path: Path) -> None:
    done = await evaluated([run, "base"], tmp_path / "out", "engine.max_loras=2", games=4, tournament=True)
    assert done.played == 10 * 4
    assert {e.void for e in done.evaluations} == {0}
    assert [(placed.games) for placed in done.ladder] == [16] * 5
    ladder = read_csv(tmp_path / "out" / "ladder.csv")
    assert [row["model"] for row in ladder] == [placed.model for placed in done.ladder]
    matrix = read_csv(tmp_path / "out" / "matches.csv")
    for row in matrix:
        for other in matrix:
            mine, theirs = row[other["model"]], other[row["model"]]
            assert (mine == theirs == "") if row is other else float(mine) + float(theirs) == pytest.approx(1)


async def test_what_cannot_be_evaluated_is_said_before_an_engine_starts(run: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"envs": ["NoSuchEnv-v0"]}, "no such env id"),
        ({"envs": ["Nim-v0-train:two"]}, "write env_id, env_id:players"),
        ({"envs": ["nowhere:MyGame-v0:2"]}, "cannot import 'nowhere'"),
        ({"opponents": ["scripted:perfectt"]}, "scripted"),
        ({"tournament": True, "opponents": ["base"]}, "leave --opponent out"),
        ({"config": tmp_path / "none.toml"}, "cannot be read"),
    ):
        with pytest.raises(ConfigError) as caught:
            plan_evaluation(["base", str(run)], output=tmp_path / "out", **options)  # type: ignore[arg-type]
        assert any(says in problem for problem in caught.value.problems), (says, caught.value.problems)
    with pytest.raises(ConfigError, match="--config"):
        plan_evaluation(["base"], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_checkpoint_against_another_runs_of_the_same_number_is_told_from_it(run: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other" / "checkpoints" / "ckpt-1", small(99))
    done = await evaluated([run / "checkpoints" / "ckpt-1"], tmp_path / "out", games=2, opponents=[str(other)])
    assert [(e.model, e.opponent) for e in done.evaluations] == [("run/ckpt-1", "other/ckpt-1")]


async def test_where_nobody_can_win_the_reward_is_shown(run: Path, tmp_path: Path) -> None:
    ones = [run / "checkpoints" / "ckpt-1"]
    done = await evaluated(ones, tmp_path / "out", games=3, envs=["GuessTheNumber-v0-train:1"])
    (row,) = read_csv(tmp_path / "out" / "table.csv")
    assert (row["opponent"], row["win_rate"], int(row["n"]) + int(row["void"])) == ("none", "", 3)
    assert float(row["mean_reward"]) == pytest.approx(done.evaluations[0].mean_reward)


async def test_how_a_model_was_trained_is_of_no_concern(run: Path, tmp_path: Path) -> None:
    of_another_machine = ("algorithm=a2c", "buffer.kind=episodes", "learner.devices=[7]", "run.eval_every=5")
    assert (await evaluated(["base", run], tmp_path / "out", *of_another_machine, games=1)).played == 5


@pytest.mark.parametrize(
    "learning",
    [
        ("algorithm=grpo", "run.group_size=4"),
        ("algorithm=rloo", "run.group_size=2"),
        ("rewards.group_baseline=grpo", "run.group_size=4", "rewards.final_reward_transformation=[]"),
        ("algorithm=ppo", "lora.initial_lora_path=/nowhere", "lora.initial_critic_path=/nowhere/critic"),
        ("run.mode=sleep", "run.output_dir=/dev/null/of/another/machine", "learner.shard_base=true"),
        ("run.eval_games=9", "run.max_eval_games_per_ckpt=5", "run.num_eval_workers=0", "buffer.buffer_size=24"),
        ("remote.workers=2", "remote.keys=/nowhere", "league.max_active_checkpoints=6"),
    ],
)
def test_no_key_about_learning_stands_against_an_evaluation(
    run: Path, tmp_path: Path, learning: tuple[str, ...]
) -> None:
    overrides = (*SCRIPTED, *learning)
    assert plan_evaluation([str(run)], output=tmp_path, overrides=overrides).plan.config.run.group_size == 1


def test_the_opponent_that_an_eval_env_names_needs_no_slash(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace('fixed_opponent = "scripted:random"', 'fixed_opponent = "llama3:8b"'))
    overrides = (*SCRIPTED, "opponents.base_url=http://127.0.0.1:9/v1")
    cells = plan_evaluation([str(run)], output=tmp_path, overrides=overrides).cells
    assert {cell.opponent_name for cell in cells} == {"llama3:8b"}


def test_code_that_comes_with_the_model_is_trusted_in_an_evaluation_where_its_user_says_so(
    run: Path, tmp_path: Path
) -> None:
    for word, is_trusted in (("true", True), ("false", False)):
        overrides = (*SCRIPTED, f"trust_remote_code={word}")
        plan = plan_evaluation([str(run)], output=tmp_path, overrides=overrides).plan
        assert plan.config.trust_remote_code is is_trusted


async def test_an_output_directory_of_something_else_or_of_other_settings_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="no evaluation's"):
        await evaluated(["base", run], tmp_path / "full", games=1)
    await evaluated([run / "checkpoints" / "ckpt-1"], tmp_path / "out", games=1)
    for override, says in (
        ("engine.temperature=0.5", "mixed: temperature was 1.0 and is 0.5"),
        ("opponents.temperature=0.5", "opponents.temperature was None and is 0.5"),
        ("opponents.base_url=http://localhost:1/v1", "opponents.base_url was None and is 'http://localhost:1/v1'"),
        ("opponents.max_tokens=9", "opponents.max_tokens was None and is 9"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            await evaluated([run / "checkpoints" / "ckpt-1"], tmp_path / "out", override, games=1)
    (tmp_path / "out" / "settings.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"settings.json cannot be read .*another directory"):
        await evaluated([run / "checkpoints" / "ckpt-1"], tmp_path / "out", games=1)


async def test_an_env_that_keeps_breaking_ends_the_evaluation_and_void_games_are_played_again(
    run: Path, tmp_path: Path
) -> None:
    too_short = ("engine.max_model_len=20", "engine.max_generation_len=4")
    with pytest.raises(EnvError, match="broke 20 times in a row"):
        await evaluated(["base", run], tmp_path / "out", *too_short, games=30)
    assert {game["end"] for game in lines(tmp_path / "out")} == {"void"}
    again = plan_evaluation(["base"], config=run / "config.toml", output=tmp_path / "out", games=2, overrides=SCRIPTED)
    (tmp_path / "out" / "settings.json").write_text(json.dumps(again.settings))
    done = await evaluate(again, say=lambda _: None)
    assert (done.played, done.evaluations[0].n, done.evaluations[0].void) == (2, 2, 0)


def test_bad_input_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    code, out, err = runs.run("eval", "base", tmp_path, "--output", tmp_path / "out")
    assert code == 1
    assert err.startswith("error: ")
    assert "neither a run directory" in err
    assert "Traceback" not in err + out


def start_long_evaluation(run: Path, output: Path) -> subprocess.Popen[str]:
    """Somewhere in the middle of it."""
    overrides = [word for override in SCRIPTED for word in ("--set", override)]
    process = runs.start("eval", "base", run, "--output", output, "--games", "100000", *overrides)
    runs.wait_for(lambda: (output / "results.jsonl").exists() and len(lines(output)) > 20)
    return process


def test_ctrl_c_keeps_what_was_played_and_the_same_command_goes_on(run: Path, tmp_path: Path) -> None:
    process = start_long_evaluation(run, tmp_path / "out")
    children = runs.children_of(process)
    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process, 30)
    assert code == 130
    assert "Traceback" not in out + err
    runs.wait_for(lambda: runs.are_gone(children), 5)
    kept = lines(tmp_path / "out")
    overrides = [word for override in SCRIPTED for word in ("--set", override)]
    code, out, err = runs.run("eval", "base", run, "--output", tmp_path / "out", "--games", "5", *overrides)
    assert code == 0, err
    assert lines(tmp_path / "out")[: len(kept)] == kept


def test_an_engine_that_dies_ends_the_evaluation_and_is_named(run: Path, tmp_path: Path) -> None:
    process = start_long_evaluation(run, tmp_path / "out")
    (engine,) = runs.children_of(process)
    engine.kill()
    code, _, err = runs.finish(process, 30)
    assert code == 1
    assert "engine-0 was killed by SIGKILL" in err
    assert "Traceback" not in err


# From here on with the model.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates, evaluated before and after by 60 games."""
    directory = tmp_path_factory.mktemp("trained")
    overrides = ("run.eval_games=60", "run.checkpoint_every=1", "run.num_eval_workers=0")
    code, out, err = runs.run("run", runs.write_small(directory), *overrides)
    assert code == 0, out + err
    return runs.run_directory(directory)


def scaled(directory: Path, checkpoint: Path, of_a: float, of_b: float) -> Path:
    """The checkpoint with its A and B matrices multiplied."""
    arrays = safetensors.numpy.load_file(checkpoint / "adapter_model.safetensors")
    made = {name: (of_a if ".lora_A." in name else of_b) * array for name, array in arrays.items()}
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    return write_adapter(directory, {name: array.astype(np.float32) for name, array in made.items()}, **config)


def test_offline_results_agree_with_those_of_training(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    zero = scaled(tmp_path / "zero", trained / "checkpoints" / "ckpt-3", 1, 0)
    models = ("base", trained / "checkpoints" / "latest", zero)
    code, out, err = runs.run("eval", *models, "--output", output, "--games", "60", "--set", "engine.threads=1")
    assert code == 0, out + err
    assert "180 games played" in out
    assert "Nim-v0-train against scripted:random" in out
    offline = {row["model"]: row for row in read_csv(output / "table.csv")}
    online = {row["model"]: row for row in map(json.loads, (trained / "eval.jsonl").read_text().splitlines())}
    for model, trained_as in (("base", "base"), ("ckpt-3", "ckpt-3"), ("zero", "base")):
        row, (low, high) = offline[model], online[trained_as]["interval"]
        assert int(row["n"]) + int(row["void"]) == 60
        assert float(row["low"]) <= high, model
        assert low <= float(row["high"]), model


async def test_adapters_that_do_not_fit_or_cannot_be_told_apart_are_errors(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / "ckpt-3"
    plan = plan_evaluation([str(checkpoint)], output=tmp_path / "out", overrides=["engine.threads=1"])
    other_base = write_adapter(tmp_path / "other", small())
    twin = scaled(tmp_path / "twin", checkpoint, 2, 0.5)
    faint = scaled(tmp_path / "faint", checkpoint, 1, 1e-20)
    (tmp_path / "logs").mkdir()
    async with started_engines(plan.plan, tmp_path / "logs", say=lambda _: None) as workers:
        slots = AdapterSlots(workers, "<|im_start|>user\nAvailable Moves: [0]<|im_end|>\n<|im_start|>assistant\n")

        async def hold(*paths: Path) -> None:
            await slots.hold({model.key: model for model in find_models(map(str, paths))})

        await hold(checkpoint)
        for path, says in (
            (other_base, r"does not fit the base: model\.layers\.0"),
            (twin, r"engine-0 answers as ckpt-3 where twin"),
            (faint, r"engine-0 answers as the base model where faint"),
        ):
            with pytest.RaisesGroup(pytest.RaisesExc(AdapterError, match=says), allow_unwrapped=True):
                await hold(checkpoint, path)
        await hold(trained / "checkpoints" / "ckpt-1", trained / "checkpoints" / "ckpt-2")
        untrained = [scaled(tmp_path / f"zero-{of_a}", checkpoint, of_a, 0) for of_a in (1, 2)]
        await hold(*untrained)  # both are the base, and say so


async def test_an_engine_that_serves_the_base_in_silence_is_caught(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    plan = plan_evaluation(
        [str(trained / "checkpoints" / "ckpt-3")],
        output=tmp_path / "out",
        overrides=["engine.kind=lying_engines:ServesBaseUnderTheRightName", "engine.threads=1"],
    )
    with pytest.raises(AdapterError, match="engine-0 answers as the base model where ckpt-3"):
        await evaluate(plan, say=lambda _: None)
    assert lines(tmp_path / "out") == []


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "RUN", "--output", "OUT"],
        ["eval", "base", "RUN/checkpoints/ckpt-1", "--tournament", "--output", "OUT"],
        ["play", "RUN"],
        ["resample", "RUN"],
        ["run", "--resume", "RUN"],
    ],
)
def test_run_of_somebody_else_runs_none_of_its_code_unless_it_is_trusted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    module = f"evil_{'_'.join(words[:2]).replace('-', '_').lower()}"
    (tmp_path / f"{module}.py").write_text(PWN)
    monkeypatch.syspath_prepend(tmp_path)
    env = f'num_players = 2\naction_extraction_fn = "{module}:read"'
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("num_players = 2", env))
    (run / "games.jsonl").touch()
    command = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in words]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 1
    assert f"action_extraction_fn = '{module}:read'" in ended.output and "--trust-config" in ended.output
    assert not list(tmp_path.glob("*.ran"))
    # A wrong key, so that nothing is started.
    overrides = ["run.env_timeout_s=-1"] if words[0] == "run" else ["--set", "run.max_action_chars=-1"]
    ended = CliRunner().invoke(app, [*command, *overrides, "--trust-config"])
    assert ended.exit_code == 1
    assert " = -1" in ended.output and "--trust-config" not in ended.output
