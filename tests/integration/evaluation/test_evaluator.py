"""Evaluations as a user starts them: real engine processes, with a model only if the test is about the model."""

import asyncio
import contextlib
import csv
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from typer.testing import CliRunner

import unstable_lite
from fakes import runs
from fakes.handmade_adapters import small, write_adapter, write_run
from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.cli.app import app
from unstable_lite.errors import AdapterError, ConfigError, EnvError
from unstable_lite.evaluation.calls import _in_a_loop
from unstable_lite.evaluation.evaluator import Evaluated, LoadedAdapters, evaluate
from unstable_lite.evaluation.models import find_models
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.evaluation.results import CellEvaluation, Results, results_tables, write_tables
from unstable_lite.files import read_records
from unstable_lite.orchestrator.workers import started_engines
from unstable_lite.tracking.evaluations import POINTS
from unstable_lite.tracking.intervals import student

PWN = "def read(text):\n    return text, True\nopen(__file__ + '.ran', 'w').close()\n"
SCRIPTED = (
    "engine.kind=scripted",
    'engine.replies=["\\\\boxed{[1 1]}", "\\\\boxed{[2 1]}", "\\\\boxed{[3 1]}"]',
    "engine.max_generation_len=32",
    "engine.max_model_len=4096",
)


Played = tuple[Path, Path, Evaluated]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run with four checkpoints that only the scripted engine can load."""
    return write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=4)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Return a run with four checkpoints, the output of eight games of each and of the base, and what was returned."""
    directory = tmp_path_factory.mktemp("played")
    run = write_run(directory / "run", runs.write_small(directory), checkpoints=4)
    return run, directory / "out", asyncio.run(evaluated(["base", run], directory / "out", games=8))


@pytest.fixture
def output(played: Played, tmp_path: Path) -> Path:
    return Path(shutil.copytree(played[1], tmp_path / "copy"))


async def evaluated(
    models: Sequence[str | Path], output: Path, *overrides: str, games: int, **options: Any
) -> Evaluated:
    plan = plan_evaluation([*map(str, models)], overrides=(*SCRIPTED, *overrides), **options)
    return await evaluate(plan, output, games, say=lambda _: None)


def lines(output: Path) -> list[dict[str, Any]]:
    return list(read_records(output / "results.jsonl"))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_tables_agree_with_the_games(played: Played) -> None:
    _, output, done = played
    games = lines(output)
    assert done.played == len(games) == 5 * 8
    table = read_csv(output / "table.csv")
    assert [row["model"] for row in table] == ["base", "ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]
    for row, evaluation in zip(table, done.evaluations, strict=True):
        own = [game for game in games if game["model"] == row["model"]]
        assert Counter(game["pid"] for game in own) == {0: 4, 1: 4}
        assert int(row["n"]) + int(row["void"]) == 8
        wins = sum(game["outcome"] == "win" for game in own)
        assert int(row["wins"]) == evaluation.wins == wins
        edges = float(row["interval_low"]), float(row["interval_high"])
        assert edges == pytest.approx(evaluation.interval, abs=1e-5)
        assert float(row["mean_reward"]) == pytest.approx(sum(game["reward"] for game in own) / len(own))
        assert int(row["own_invalid"]) == sum(game["own_invalid"] for game in own)
    markdown = (output / "table.md").read_text().splitlines()
    assert len(markdown) == 2 + len(table)
    assert markdown[0].startswith("| model | opponent | env_id | num_players | prompt_template | n | wins | draws |")
    assert markdown[0].endswith("| void | remarks | compared_with | change | change_low | change_high |")
    assert markdown[2].startswith("| base | scripted:random | Nim-v0-train | 2 | tiny | 8 |")


async def test_call_within_an_event_loop_returns_the_rows_of_the_table(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"games": 4, "opponents": "base", "overrides": SCRIPTED, "quiet": True}
    rows = unstable_lite.evaluate(["base", run / "checkpoints" / "ckpt-2"], output=tmp_path / "out", **options)
    table = read_csv(tmp_path / "out" / "table.csv")
    assert [row["model"] for row in rows] == [row["model"] for row in table] == ["base", "ckpt-2"]
    for row, written in zip(rows, table, strict=True):
        assert {name: "" if x is None else str(x) for name, x in row.items() if not isinstance(x, float)} == {
            name: x for name, x in written.items() if not isinstance(row[name], float)
        }
        assert row["n"] == 4 and row["interval_low"] < row["points"] < row["interval_high"]
    assert (rows[0]["change"], rows[1]["compared_with"]) == (None, "base")


def test_call_keeps_nothing_without_an_output(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    (row,) = unstable_lite.evaluate("base", config=run / "config.toml", games=2, overrides=SCRIPTED, quiet=True)
    assert (row["model"], row["n"], list(Path().iterdir())) == ("base", 2, [])


IN_A_NOTEBOOK = """
import asyncio, os, signal, threading, time, unstable_lite

def interrupt():  # when imports, which may lose it, have ended; in a thread that waits for nothing
    while not os.path.exists("OUTPUT/results.jsonl"): time.sleep(0.1)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

async def cell():
    threading.Thread(target=interrupt).start()
    try:
        unstable_lite.evaluate("base", config="CONFIG", games=10**6, overrides=OVERRIDES, output="OUTPUT")
    except KeyboardInterrupt:
        print("interrupted")

if __name__ == "__main__":
    asyncio.new_event_loop().run_until_complete(cell())
"""


@pytest.mark.nightly
def test_ctrl_c_ends_a_call_within_an_event_loop(run: Path, tmp_path: Path) -> None:
    script = IN_A_NOTEBOOK.replace("CONFIG", str(run / "config.toml")).replace("OUTPUT", str(tmp_path / "out"))
    (tmp_path / "cell.py").write_text(script.replace("OVERRIDES", repr(SCRIPTED)))
    process = subprocess.run([sys.executable, tmp_path / "cell.py"], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0 and "interrupted" in process.stdout, process.stdout + process.stderr


async def test_interrupt_before_the_wait_ends_a_call_within_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, ended = futures.ThreadPoolExecutor.submit, futures.Future[bool]()

    def interrupted(*arguments: Any) -> None:
        submit(*arguments)
        raise KeyboardInterrupt

    async def games() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set_result(True)

    monkeypatch.setattr(futures.ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _in_a_loop(games())
    assert ended.result(timeout=0)


def rewritten(played: Played, output: Path, rows: list[dict[str, Any]], *models: str) -> list[CellEvaluation]:
    """Write these lines of games, and the tables as by a call for these models; return the results of the models."""
    (output / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = played[0] / "config.toml"
    plan = plan_evaluation(models, config=config, overrides=SCRIPTED)
    with contextlib.closing(Results(output, plan.settings)) as results:
        return write_tables(results, plan.cells, games=8)


def test_models_are_compared_on_common_seeds_without_void_games(played: Played, output: Path) -> None:
    rows = lines(output)
    chance = random.Random(0)  # the scripted models lose every game
    for row in rows:
        row["outcome"] = chance.choice(["win", "draw", "loss"])
        del row["reason"]  # as earlier versions wrote them
        if (row["model"], row["game"]) == ("ckpt-2", 5):
            row |= {"end": "void", "outcome": None, "reward": None}
    base, *others = rewritten(played, output, rows, "base", str(played[0]))
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
        edges, half = (float(row["change_low"]), float(row["change_high"])), student(3) * stdev(gained) / 2
        assert edges == pytest.approx((max(fmean(gained) - half, -1), min(fmean(gained) + half, 1)), abs=1e-5)
        assert change.startswith(f"{other.model}: {100 * fmean(gained):+.1f} compared with base (95 %: ")
    assert in_csv["ckpt-2"]["void"] == "1" and "7 (+1 void)" in table.columns[1].cells


async def test_second_call_plays_only_missing_games(played: Played, output: Path) -> None:
    run, path = played[0], output / "results.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["model"] in ("base", "ckpt-1")][:11]
    path.write_text("\n".join(kept) + '\n{"cell": "bas')  # as after a crash
    again = await evaluated(["base", run], output, games=10)
    assert again.played == 5 * 10 - 11
    assert path.read_text().splitlines()[:11] == kept
    assert Counter((g["model"], g["game"]) for g in lines(output)) == {
        (model, number): 1 for model in ("base", *(f"ckpt-{n}" for n in range(1, 5))) for number in range(10)
    }
    assert (await evaluated(["base", run], output, games=10)).played == 0
    fewer = await evaluated(["base"], output, games=4, config=run / "config.toml")
    assert (fewer.played, fewer.evaluations[0].n) == (0, 4)


def evaluate_nim(model: str, run: Path, output: Path, games: int, *added: str) -> str:
    """Call `eval` as a user does and return its output."""
    overrides = [word for override in SCRIPTED for word in ("--set", override)]
    where = ("--config", run / "config.toml", "--output", output, "--games", games)
    result = CliRunner().invoke(app, [*map(str, ("eval", model, *where)), *added, *overrides])
    assert result.exit_code == 0, result.output
    return result.output


def test_later_model_is_added_to_the_tables(run: Path, tmp_path: Path) -> None:
    evaluate_nim("scripted:optimal", run, tmp_path / "out", 10)
    (before,) = read_csv(tmp_path / "out" / "table.csv")
    out = evaluate_nim("base", run, tmp_path / "out", 4)
    base, optimal = read_csv(tmp_path / "out" / "table.csv")
    assert (base["model"], int(base["n"]) + int(base["void"])) == ("base", 4)
    compared = {name: optimal[name] for name in optimal if name == "compared_with" or name.startswith("change")}
    assert (optimal, compared["compared_with"]) == (before | compared, "base")
    assert len((tmp_path / "out" / "table.md").read_text().splitlines()) == 4
    assert "base" in out and "scripted:optimal" not in out


def test_cells_that_differ_in_env_settings_are_distinguished(run: Path, tmp_path: Path) -> None:
    envs = ("--env", "Nim-v0-train:2:tiny", "--env", "Nim-v0-train:2:default")
    out = evaluate_nim("base", run, tmp_path / "out", 2, *envs)
    table = read_csv(tmp_path / "out" / "table.csv")
    assert [(row["num_players"], row["prompt_template"]) for row in table] == [("2", "tiny"), ("2", "default")]
    assert re.search(r"model.+template.+games", out) and "players" not in out
    assert re.search(r"base .+tiny ", out) and re.search(r"base .+default ", out)
    assert "template" not in evaluate_nim("base", run, tmp_path / "out", 2, *envs[:2])
    assert len(read_csv(tmp_path / "out" / "table.csv")) == 2


async def test_games_with_other_settings_are_other_games_of_the_same_deals(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    text = config.read_text()
    env = text[text.index("[[eval_envs]]") :]
    others = "max_turns = 7\nenv_kwargs = { piles = [2, 3] }\nerror_allowance = 1\n"
    config.write_text(f"{text}temperature = 0.3\n{env}\n{env}{others}")
    for temperature, num_cells in ((0.0, 2), (None, 3)):
        done = await evaluated(["base"], tmp_path / "out", games=2, config=config, temperature=temperature)
        assert done.played == 2 * num_cells
    own = "max_turns=7, env_kwargs={'piles': (2, 3)}, error_allowance=1"
    settings = ["temperature=0.3", "", own]
    titles = ["Nim-v0-train against scripted:random" + f", {each}" * bool(each) for each in settings]
    tables = results_tables(done.evaluations)
    assert ([table.title for table in tables], [table.row_count for table in tables]) == (titles, [1, 1, 1])
    rows = read_csv(tmp_path / "out" / "table.csv")
    assert {row["other_settings"] for row in rows} == {*settings, "temperature=0.0", f"{own}, temperature=0.0"}
    assert len(rows) == 5
    assert len({game["seed"] for game in lines(tmp_path / "out")}) == 1


@pytest.mark.parametrize(
    ("temperature", "code", "says"),
    [("-1", 1, "give 0 (greedy)"), ("nan", 1, "give 0 (greedy)"), ("inf", 1, "--temperature inf: give 0"),
     ("0.001", 1, "from 0.01"), ("warm", 2, "valid number")],
)  # fmt: skip
def test_temperature_that_no_engine_has_is_refused(
    run: Path, tmp_path: Path, temperature: str, code: int, says: str
) -> None:
    arguments = ["eval", str(run), "--output", str(tmp_path / "out"), "--temperature", temperature]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code and says in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_models_of_one_name_from_two_calls_are_distinguished(played: Played, output: Path) -> None:
    of_two = [row | {"model": "x"} for row in lines(output) if row["model"] in ("ckpt-1", "ckpt-2")]
    rewritten(played, output, of_two, "base")
    names = [row["model"] for row in read_csv(output / "table.csv")]
    assert len({*names}) == 2 and all(re.fullmatch(r"x \([\w-]+\)", name) for name in names)


async def test_more_checkpoints_than_slots_play_in_turns(run: Path, tmp_path: Path) -> None:
    both = [str(run / "checkpoints" / f"ckpt-{number}") for number in (1, 2)]
    done = await evaluated([run, "base"], tmp_path / "out", "engine.max_loras=2", games=2, opponents=both)
    assert done.played == 10 * 2
    assert {e.void for e in done.evaluations} == {0}


TIC_TAC_TOE, NIM_1_2 = "openspiel:tic_tac_toe", "openspiel:nim(is_misere=False,pile_sizes=1;2)"


@pytest.mark.nightly
async def test_ladder_rates_models_the_base_and_random_against_playouts(run: Path, tmp_path: Path) -> None:
    ones = [run / "checkpoints" / "ckpt-1", "scripted:mcts:100"]
    done = await evaluated(ones, tmp_path / "out", games=2, ladder=True, envs=[TIC_TAC_TOE, NIM_1_2])
    rungs = ["scripted:random", "scripted:mcts:10", "scripted:mcts:100", "scripted:mcts:1000"]
    assert done.played == 2 * 2 * (6 + 2 * 4)
    rows = read_csv(tmp_path / "out" / "ladder.csv")
    for env_id in (TIC_TAC_TOE, NIM_1_2):
        own = [row for row in rows if row["env_id"] == env_id]
        assert {row["model"] for row in own} == {"base", "ckpt-1", *rungs}
        assert [float(row["rating"]) for row in own] == sorted((float(row["rating"]) for row in own), reverse=True)
        (anchor,) = (row for row in own if row["model"] == "scripted:mcts:10")
        assert float(anchor["rating"]) == 0
        base = next(row for row in own if row["model"] == "base")
        assert base["games"] == "8"
        games = [game for game in lines(tmp_path / "out") if (game["env_id"], game["model"]) == (env_id, "base")]
        for rung in rungs:
            points = [POINTS[game["outcome"]] for game in games if game["opponent"] == rung]
            assert float(base[f"points against {rung}"]) == fmean(points)
    assert [place.model for place in done.places] == [row["model"] for row in rows]
    again = await evaluated(ones, tmp_path / "out", games=2, ladder=True, envs=[TIC_TAC_TOE, NIM_1_2])
    assert (again.played, again.places) == (0, done.places)
    elsewhere = await evaluated(
        [], tmp_path / "other", games=2, ladder=True, envs=[NIM_1_2], config=run / "config.toml"
    )
    ratings = {place.model: place for place in done.places if place.env_id == NIM_1_2 and place.model in rungs}
    assert {place.model: place for place in elsewhere.places if place.model in rungs} == ratings


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"envs": ["openspiel:kuhn_poker"]}, "openspiel:kuhn_poker hides information"),
        ({"envs": [TIC_TAC_TOE, "openspiel:matrix_rps"]}, "openspiel:matrix_rps"),
        ({}, "plays games of OpenSpiel only; not Nim-v0-train"),
        ({"envs": ["GuessTheNumber-v0-train:1"]}, "GuessTheNumber-v0-train has 1"),
        ({"envs": ["openspiel:no_such_game"]}, "no_such_game"),
        ({"envs": [TIC_TAC_TOE, f"{TIC_TAC_TOE}:2:default"]}, "2 templates or settings"),
        ({"envs": [TIC_TAC_TOE], "opponents": ["base"]}, "--opponent"),
        ({"ladder": False, "envs": ["NoSuchEnv-v0"]}, "NoSuchEnv-v0"),
        ({"ladder": False, "envs": ["Nim-v0-train:two"]}, "env_id:players"),
        ({"ladder": False, "envs": ["nowhere:MyGame-v0:2"]}, "'nowhere'"),
        ({"ladder": False, "envs": ["openspiel:kuhn_poker(players)"]}, "'players' is not a parameter"),
        ({"ladder": False, "envs": ["openspiel:kuhn_poker:3"]}, "is a game of 2"),
        ({"ladder": False, "opponents": ["scripted:perfectt"]}, "scripted"),
        ({"ladder": False, "config": Path("none.toml")}, "none.toml"),
        ({"ladder": False, "models": ["base"]}, "--config"),
    ],
)
def test_impossible_evaluation_or_ladder_is_refused(run: Path, options: dict[str, Any], says: str) -> None:
    given = {"models": [str(run)], "ladder": True} | options
    with pytest.raises(ConfigError, match=re.escape(says)):
        plan_evaluation(overrides=SCRIPTED, **given)


async def test_env_without_winners_shows_the_reward_with_its_interval(run: Path, tmp_path: Path) -> None:
    ones = [run / "checkpoints" / "ckpt-1"]
    done = await evaluated(ones, tmp_path / "out", games=3, envs=["GuessTheNumber-v0-train:1"])
    (evaluation,) = done.evaluations
    (row,) = read_csv(tmp_path / "out" / "table.csv")
    assert (row["opponent"], row["win_rate"], int(row["n"]) + int(row["void"])) == ("none", "", 3)
    edges = float(row["interval_low"]), float(row["interval_high"])
    assert row["points"] == "" and edges == pytest.approx(evaluation.interval, abs=1e-5)
    assert "points" not in (tmp_path / "out" / "table.md").read_text()
    assert float(row["mean_reward"]) == pytest.approx(evaluation.mean_reward)
    (table,) = results_tables(done.evaluations)
    shown = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert shown == {
        "model": "ckpt-1",
        "games": "3",
        "mean reward": f"{evaluation.mean_reward:.3f}",
        "95 %": evaluation.interval_text,
        "own\ninvalid": "3 (100.0 %)",
    }


@pytest.mark.parametrize(
    "learning",
    [
        ("algorithm=a2c", "buffer.kind=episodes", "learner.devices=[7]", "run.eval_every=5"),
        ("algorithm=grpo", "run.group_size=4"),
        ("algorithm=rloo", "run.group_size=2"),
        ("rewards.group_baseline=grpo", "run.group_size=4", "rewards.final_reward_transformation=[]"),
        ("rewards.group_baseline=duplicate", "run.group_size=3"),
        ("algorithm=ppo", "lora.initial_lora_path=/nowhere", "lora.initial_critic_path=/nowhere/critic"),
        ("engine.when_shared=sleep", "run.output_dir=/dev/null/of/another/machine"),
        ("run.eval_games=9", "run.num_eval_workers=0", "buffer.buffer_size=24"),
        ("league.max_active_checkpoints=6",),
    ],
)
def test_no_learning_key_prevents_an_evaluation(run: Path, tmp_path: Path, learning: tuple[str, ...]) -> None:
    overrides = (*SCRIPTED, *learning)
    assert plan_evaluation([str(run)], overrides=overrides).plan.learner_devices == ()


def test_opponent_named_by_an_eval_env_needs_no_slash(run: Path, tmp_path: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace('fixed_opponent = "scripted:random"', 'fixed_opponent = "llama3:8b"'))
    overrides = (*SCRIPTED, "opponents.base_url=http://127.0.0.1:9/v1")
    cells = plan_evaluation([str(run)], overrides=overrides).cells
    assert {cell.opponent.name for cell in cells} == {"llama3:8b"}


def test_model_code_is_trusted_in_an_evaluation_only_on_request(run: Path, tmp_path: Path) -> None:
    for word, is_trusted in (("true", True), ("false", False)):
        overrides = (*SCRIPTED, f"trust_remote_code={word}")
        plan = plan_evaluation([str(run)], overrides=overrides).plan
        assert plan.config.trust_remote_code is is_trusted


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.temperature=0.5", r"temperature .*1\.0 .*0\.5"),
        ("opponents.temperature=0.5", r"opponents\.temperature .*0\.5"),
        ("opponents.base_url=http://localhost:1/v1", r"opponents\.base_url .*http://localhost:1/v1"),
        ("opponents.max_tokens=9", r"opponents\.max_tokens .*9"),
    ],
)
async def test_results_of_other_settings_are_not_mixed(played: Played, output: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await evaluated(["base", played[0]], output, override, games=1)


async def test_foreign_output_directory_is_refused(played: Played, output: Path) -> None:
    (output / "settings.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"settings\.json"):
        await evaluated(["base", played[0]], output, games=1)
    (output / "settings.json").unlink()
    with pytest.raises(ConfigError, match="copy is not empty"):
        await evaluated(["base", played[0]], output, games=1)


async def test_failing_env_ends_the_evaluation_and_void_games_are_repeated(run: Path, tmp_path: Path) -> None:
    too_short = ("engine.max_model_len=20", "engine.max_generation_len=4")
    with pytest.raises(EnvError, match=r"20 games of Nim-v0-train in a row failed, .* prompt has \d+ tokens"):
        await evaluated(["base", run], tmp_path / "out", *too_short, games=30)
    ended = {(game["pid"], game["end"], game["reason"]) for game in lines(tmp_path / "out")}
    assert ended == {(0, "void", "prompt_too_long"), (1, "truncated", "context_full")}
    again = plan_evaluation(["base"], config=run / "config.toml", overrides=SCRIPTED)
    (tmp_path / "out" / "settings.json").write_text(json.dumps(again.settings))
    done = await evaluate(again, tmp_path / "out", 2, say=lambda _: None)
    assert (done.played, done.evaluations[0].n, done.evaluations[0].void) == (1, 2, 0)


def test_bad_input_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["eval", "base", str(tmp_path), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output.startswith("error: ") and str(tmp_path) in result.output


def start_long_evaluation(run: Path, output: Path) -> subprocess.Popen[str]:
    overrides = [word for override in SCRIPTED for word in ("--set", override)]
    process = runs.start("eval", "base", run, "--output", output, "--games", "100000", *overrides)
    runs.wait_for(lambda: (output / "results.jsonl").exists() and len(lines(output)) > 20)
    return process


def test_ctrl_c_keeps_the_games_and_the_same_command_continues(run: Path, tmp_path: Path) -> None:
    process = start_long_evaluation(run, tmp_path / "out")
    children = runs.children_of(process)
    process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process, 30)
    assert code == 130
    assert "Traceback" not in out + err
    runs.wait_for(lambda: runs.are_gone(children), 5)
    kept = lines(tmp_path / "out")
    evaluate_nim("base", run, tmp_path / "out", 5)
    assert lines(tmp_path / "out")[: len(kept)] == kept


def test_dead_engine_ends_the_evaluation_and_is_named(run: Path, tmp_path: Path) -> None:
    process = start_long_evaluation(run, tmp_path / "out")
    (engine,) = runs.children_of(process)
    engine.kill()
    code, _, err = runs.finish(process, 30)
    assert code == 1
    assert "engine-0 was killed by SIGKILL" in err
    assert "Traceback" not in err


# The tests below use the model.


@pytest.mark.nightly
def test_offline_results_agree_with_those_of_training(tmp_path: Path) -> None:
    overrides = ("run.eval_games=100", "run.learning_steps=1", "run.checkpoint_every=1", "run.num_eval_workers=0")
    runs.output_of(runs.run_torchless("run", runs.write_small(tmp_path), *overrides))
    trained, output = runs.run_directory(tmp_path), tmp_path / "out"
    models = ("base", trained / "checkpoints" / "latest")
    out = runs.output_of(runs.run("eval", *models, "--output", output, "--games", "100", "--set", "engine.threads=1"))
    assert "200 games played" in out
    assert "Nim-v0-train against scripted:random" in out
    offline = {row["model"]: row for row in read_csv(output / "table.csv")}
    online = {row["model"]: row for row in map(json.loads, (trained / "eval.jsonl").read_text().splitlines())}
    for model in ("base", "ckpt-1"):
        row, (low, high) = offline[model], online[model]["interval"]
        assert int(row["n"]) + int(row["void"]) == 100
        slack = (high - low) / 2  # intervals this far apart: four standard errors of the difference
        assert float(row["interval_low"]) - slack <= high, model
        assert low - slack <= float(row["interval_high"]), model


@pytest.mark.nightly
async def test_adapter_of_another_shape_is_an_error(tmp_path: Path) -> None:
    other_base, config = write_adapter(tmp_path / "other", small()), runs.write_small(tmp_path)
    plan = plan_evaluation([str(other_base)], config=config, overrides=["engine.threads=1"])
    with pytest.raises(AdapterError, match=r"other.*model\.layers\.0"):
        await evaluate(plan, tmp_path / "out", 200, say=lambda _: None)
    assert lines(tmp_path / "out") == []


async def test_engine_that_read_other_files_is_detected(run: Path, tmp_path: Path) -> None:
    plan = plan_evaluation([str(run / "checkpoints" / "ckpt-3")], overrides=SCRIPTED)
    adapter_file = run / "checkpoints" / "ckpt-3" / "adapter_model.safetensors"

    async def load(id: int, path: Path) -> str:
        adapter_file.write_bytes((run / "checkpoints" / "ckpt-2" / adapter_file.name).read_bytes())
        return adapter_digest(path)

    async with started_engines(plan.plan, tmp_path, say=lambda _: None) as workers:
        workers.engines.engines[0].load_adapter = load  # type: ignore[method-assign]
        (model,) = find_models([str(run / "checkpoints" / "ckpt-3")])
        with pytest.raises(AdapterError, match=r"ckpt-3 .*digest"):
            await LoadedAdapters(workers.engines).hold({model.key: model})


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "RUN", "--output", "OUT"],
        ["eval", "base", "RUN/checkpoints/ckpt-1", "--output", "OUT"],
        ["play", "RUN"],
        ["probe", "RUN"],
        ["run", "--resume", "RUN"],
    ],
)
def test_foreign_run_executes_none_of_its_code_unless_trusted(
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
    # An invalid key, so that nothing starts.
    overrides = ["run.env_timeout_s=-1"] if words[0] == "run" else ["--set", "run.env_timeout_s=-1"]
    ended = CliRunner().invoke(app, [*command, *overrides, "--trust-config"])
    assert ended.exit_code == 1
    assert " = -1" in ended.output and "--trust-config" not in ended.output
