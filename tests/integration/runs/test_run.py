"""Whole runs as a user starts them: real processes, real games, real training of the tiny model."""

import ast
import csv
import json
import re
import runpy
import signal
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from typer.testing import CliRunner

from fakes import run_files, runs
from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.dashboards.report.games import policy_seats
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.models import BASE_MODEL
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.files import read_part

EXPORT = str(Path(__file__).parents[3] / "examples" / "export_csv.py")
SECOND_EVAL_ENV = """
[[eval_envs]]
env_id = "TicTacToe-v0-train"
num_players = 2
prompt_template = "tiny"
fixed_opponent = "scripted:random"
"""


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_n_learning_steps_make_n_measured_updates_and_n_consecutive_versions(finished_run: Path) -> None:
    updates = run_files.updates(finished_run)
    assert [line["step"] for line in updates] == [1, 2, 3]
    assert [line["learner/step"] for line in updates] == [1, 2, 3]
    assert updates[-1]["learner/samples_seen"] == 3 * 24
    for line in updates:
        assert 0 <= line["canary/mismatch"] < 0.1
        assert line["canary/n"] > 0
        assert line["learner/staleness_max"] <= 8
        assert line["transport/dropped_frames"] == 0
        assert line["learner/mismatch_tokens"] == line["learner/num_tokens"], "all 24 steps"
        assert 0 < line["learner/mismatch_mean"] < 0.1
        assert 0 <= line["run/eval_share"] <= 1


def test_live_view_of_a_finished_run_shows_its_end(finished_run: Path) -> None:
    live = json.loads((finished_run / "live.json").read_text())
    assert (live["learning_steps"], live["has_ended"], live["has_failed"]) == (3, True, False)
    assert {worker["name"]: worker["state"] for worker in live["workers"]} == {"engine-0": "ready", "learner": "ready"}
    assert [worker["gpu"] for worker in live["workers"]] == ["", ""]
    state = json.loads((finished_run / "checkpoints" / "ckpt-3" / "league.json").read_text())
    steps = [json.loads(line) for line in (finished_run / "league.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2, 3, 3]  # including the evaluations
    seen = {uid: row for line in steps for uid, row in line["models"].items()}
    assert seen.keys() == set(state["registry"]["models"]["uid"])
    assert seen["ckpt-3"][2] >= 6
    out = runs.output_of(runs.invoke("top", finished_run))
    for fact in ("ended", "update 3/3", "ckpt-3", "Nim-v0-train", "evaluated checkpoint"):
        assert fact in out, fact


def test_checkpoints_are_complete_and_latest_is_the_last(finished_run: Path) -> None:
    checkpoints = finished_run / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"ckpt-2", "ckpt-3", "latest"}
    assert (checkpoints / "latest").resolve().name == "ckpt-3"
    for name in ("adapter_model.safetensors", "adapter_config.json", "league.json"):
        assert (checkpoints / "ckpt-3" / name).is_file()
    state = json.loads((checkpoints / "ckpt-3" / "league.json").read_text())
    assert state["updates"] == 3
    assert state["registry"]["current"] == "ckpt-3"


def test_finished_run_leaves_its_config_logs_table_and_no_shared_memory(finished_run: Path) -> None:
    raw = tomllib.loads((finished_run / "config.toml").read_text())
    config = Config.model_validate(raw)
    assert config.learner.batch_size == 24
    assert config.engine.kind == "transformers"
    assert config.league.opponent_sampling_strategy == {"mirror": 0.5, "fixed": 0.5}
    out = (finished_run.parents[1] / "stdout").read_text()
    assert "Points against scripted:random in Nim-v0-train" in out
    assert f"unstable-lite play run:{finished_run}/best" in out
    assert "torch" not in out and "torch" in (finished_run / "logs" / "orchestrator.log").read_text(), "worker facts"
    assert str(finished_run / "checkpoints" / "ckpt-3") in out
    assert runs.arenas_named(finished_run.name) == []
    assert {path.name for path in (finished_run / "logs").iterdir()} == {
        "orchestrator.log",
        "engine-0.log",
        "learner.log",
    }


def test_games_are_kept_with_turns_and_evaluations_with_counts(finished_run: Path) -> None:
    games = run_files.games(finished_run)
    assert {game["kind"] for game in games} == {"train", "eval"}
    assert len({game["game_idx"] for game in games}) == len(games)
    evaluations = run_files.evaluations(finished_run)
    with_quota = [line for line in evaluations if line["label"] != "concurrent"]
    assert [(line["label"], line["model"], line["n"] + line["void"]) for line in with_quota] == [
        ("before", "base", 6),
        ("after", "ckpt-3", 6),
    ]
    concurrent = [line for line in evaluations if line["label"] == "concurrent"]
    played = [
        next(agent["model"] for agent in game["agents"] if not agent["model"].startswith("fixed-"))
        for game in games
        if game["kind"] == "eval" and game["eval_label"] is None
    ]
    assert {line["model"]: line["n"] + line["void"] for line in concurrent} == Counter(played)


def test_metrics_include_every_name_of_the_reference(finished_run: Path) -> None:
    names = {name for line in run_files.metrics(finished_run) for name in line}
    seats, lengths = "Reward (pid=0), Reward (pid=1)", "Game Length, Respone Length (char), Observation Length (char)"
    formats = "Format Success Rate - correct_answer_format, Format Success Rate - invalid_move"
    of_groups = {
        "collection-Nim-v0-train": f"reward, Win Rate, Loss Rate, Draw, {seats}, {lengths}, {formats}, step",
        "evaluation-Nim-v0-train (scripted:random)": f"Reward, {seats}, Win Rate, Loss Rate, Draw Rate, step",
        "inference/engine-0": "queued, running, tok_s",
        "learner": "loss, logp_mean, avg_train_len, pct_truncated, step, samples_seen, lr, policy_grad_norm",
        "exploration/Nim-v0-train": ", ".join(f"Pct. Unique Action {n}-gram" for n in (1, 2, 3, 4)),
    }
    assert {f"{group}/{name}" for group, of in of_groups.items() for name in of.split(", ")} - names == set()


def test_train_data_is_kept_and_exported_with_the_reference_columns(finished_run: Path, tmp_path: Path) -> None:
    run = finished_run
    rows = [row for update in (1, 2, 3) for row in read_part(run / "train_data" / f"step-{update:06d}.jsonl.gz")]
    assert len(rows) == 3 * 24
    assert all(0 <= row["staleness"] <= 8 and row["completion_tokens"] <= 12 for row in rows)
    runpy.run_path(EXPORT)["export"](run, tmp_path / "csv")
    exported = [
        row for k in range(3) for row in read_csv(tmp_path / "csv" / "training_data" / f"train_data_step_{k}.csv")
    ]
    assert list(exported[0]) == ["pid", "obs", "act", "reward", "env_id", "step_info"]
    assert [row["act"] for row in exported] == [row["act"] for row in rows]
    assert [ast.literal_eval(row["step_info"]) for row in exported] == [row["step_info"] for row in rows]
    games = {game["game_idx"]: game for game in run_files.games(run) if game["end"] != "void"}
    evaluated = list((tmp_path / "csv" / "eval_data").iterdir())
    assert len(evaluated) == sum(game["kind"] == "eval" for game in games.values())
    for path in evaluated:
        turns = read_csv(path)
        game = games[int(turns[0]["game_idx"])]
        assert path.name == f"Nim-v0-train-{game['game_idx']}.csv"
        assert [turn["obs"] for turn in turns] == [turn[1] for turn in game["turns"]]
        assert {turn["eval_opponent_name"] for turn in turns} == {"scripted:random"}
        assert {float(turn["final_reward"]) for turn in turns} <= set(game["rewards"].values())
    collected = [turn for path in (tmp_path / "csv" / "collection").iterdir() for turn in read_csv(path)]
    assert {turn["env_id"] for turn in collected} == {"Nim-v0-train"}
    assert len(collected) == sum(len(game["turns"]) for game in games.values() if game["kind"] == "train")


@pytest.mark.nightly
def test_games_against_the_base_record_the_evaluated_seat(tmp_path: Path) -> None:
    config = runs.write_small(tmp_path)
    config.write_text(config.read_text().replace('fixed_opponent = "scripted:random"', 'fixed_opponent = "base"'))
    # Games beside the training (num_eval_workers) alternate the seats, but end at any number.
    settings = ("run.learning_steps=1", "run.checkpoint_every=1", "run.eval_games=4", "run.num_eval_workers=0")
    runs.output_of(runs.run_torchless("run", config, *runs.PLAYS_NIM, *settings))
    run = runs.run_directory(tmp_path)
    runpy.run_path(EXPORT)["export"](run, tmp_path / "csv")
    seats: list[list[int]] = []
    for game in run_files.games(run):
        if game["kind"] == "eval":
            rows = read_csv(tmp_path / "csv" / "eval_data" / f"Nim-v0-train-{game['game_idx']}.csv")
            (row,) = {(row["eval_opponent_name"], int(row["eval_model_pid"])) for row in rows}
            seats.append(policy_seats(game))
            assert row == ("base", *seats[-1])
    assert seats.count([0]) == seats.count([1]) == len(seats) / 2 > 0
    cells = plan_evaluation([str(run)]).cells
    assert [cell.opponent for cell in cells] == [BASE_MODEL]


def test_logprobs_of_engine_and_learner_are_kept_per_token(finished_run: Path) -> None:
    run = finished_run
    games = {game["game_idx"]: game for game in run_files.games(run)}
    differences = []
    for update in (1, 2, 3):
        for row in read_part(run / "train_data" / f"step-{update:06d}.jsonl.gz"):
            *_, sampled = games[row["step_info"]["game_idx"]]["turns"][row["step_info"]["turn"]]
            assert len(row["learner_logprobs"]) == len(sampled["completion_ids"]) == row["completion_tokens"]
            if row["staleness"] == 0:
                pairs = zip(row["learner_logprobs"], sampled["logprobs"], strict=True)
                differences += [abs(mine - its) for mine, its in pairs]
    assert differences
    assert max(differences) < 0.05


def test_tensorboard_has_the_same_numbers_under_reference_names(finished_run: Path) -> None:
    events = EventAccumulator(str(finished_run / "tensorboard"))
    events.Reload()
    tags = events.Tags()["tensors"]
    group = "collection-Nim-v0-train"
    for tag in (
        "learner/loss",
        "learner/policy_grad_norm",
        f"{group}/Win Rate",
        f"{group}/Respone Length (char)",
        "inference/engine-0/tok_s",
    ):
        assert tag in tags
    rate = f"{group}/Format Success Rate - invalid_move"  # of few games, so it may be 0 in all of them
    rates = [line[rate] for line in run_files.metrics(finished_run) if rate in line]
    assert len(rates) == 3 and (rate in tags) == any(rates)
    assert [event.step for event in events.Tensors("learner/loss")] == [1, 2, 3]
    for tag in ("learner/advantage", "learner/importance_weight", "learner/completion_tokens"):
        counts = [make_ndarray(event.tensor_proto)[:, 2].sum() for event in events.Tensors(tag)]
        assert len(counts) == 3 and min(counts) >= 24, tag
    config, versions = (events.Tensors(f"run/{name}")[0].tensor_proto.string_val[0] for name in ("config", "versions"))
    assert b'name = "small-' in config and b'"textarena": "0.7.4"' in versions


def test_orchestrator_imports_neither_torch_nor_transformers(finished_run: Path) -> None:
    imported = (finished_run.parents[1] / "imports").read_text().split()
    assert "unstable_lite.orchestrator.run" in imported
    assert not {"torch", "transformers", "peft", "vllm"} & {*imported}


def test_ctrl_c_finishes_the_update_saves_and_exits_cleanly(tmp_path: Path) -> None:
    process = runs.start_torchless("run", runs.write_small(tmp_path), *runs.SCRIPTED, "run.learning_steps=10000")
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 2)
    children = runs.children_of(process)
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    out = runs.output_of(runs.finish(process))
    directory = runs.run_directory(tmp_path)
    last = max(line["step"] for line in run_files.metrics(directory))
    assert re.search(rf"\bckpt-{last}\b.*saved", out)
    assert (directory / "checkpoints" / "latest").resolve().name == f"ckpt-{last}"
    assert re.search(rf"^updates +{last} of 10000$", out, re.M)
    runs.wait_for(lambda: runs.are_gone(children), 5)
    assert runs.arenas_named(directory.name) == []


@pytest.mark.nightly
def test_ctrl_c_interrupts_an_evaluation(tmp_path: Path) -> None:
    process = runs.start_torchless("run", runs.write_small(tmp_path), *runs.SCRIPTED, "run.eval_games=100000")
    runs.wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("outputs/*/*/games.jsonl")))
    process.send_signal(signal.SIGINT)
    out = runs.output_of(runs.finish(process, 60))
    assert re.search(r"evaluation before: Nim-v0-train, \d+ of 100000 games", out)
    assert re.search(r"^updates +0 of \d+$", out, re.M)
    assert "--resume" not in out  # the run has no checkpoint
    assert (runs.run_directory(tmp_path) / "eval.jsonl").read_text() == ""


@pytest.mark.nightly
def test_evaluation_on_two_envs_uses_one_policy(tmp_path: Path) -> None:
    small = runs.write_small(tmp_path)
    small.write_text(small.read_text() + SECOND_EVAL_ENV)
    overrides = ("run.learning_steps=12", "run.eval_every=4", "run.eval_games=150", "run.num_eval_workers=0")
    overrides += (*runs.PLAYS_NIM, 'league.opponent_sampling_strategy="mirror"')
    runs.output_of(runs.run_torchless("run", small, *overrides))
    lines = run_files.evaluations(runs.run_directory(tmp_path))
    evaluated = Counter((line["label"], line["model"], line["n"] + line["void"]) for line in lines)
    policies = {"before": "base", "update 4": "ckpt-4", "update 8": "ckpt-8", "after": "ckpt-12"}
    assert evaluated == {(label, model, 150): 2 for label, model in policies.items()}
    assert not any(line["void"] for line in lines)


@pytest.mark.parametrize("is_starting", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_ctrl_c_during_start_up_and_a_second_one_end_at_once_and_leave_nothing(
    tmp_path: Path, is_starting: bool
) -> None:
    endless = ("run.learning_steps=10000", "learner.batch_size=100000")
    endless += ("engine.kind=fakes.stuck_engines:Slow",) if is_starting else ()
    process = runs.start_torchless("run", runs.write_small(tmp_path), *runs.SCRIPTED, *endless)
    runs.wait_for(lambda: is_starting or any(tmp_path.glob("outputs/*/*/eval.jsonl")))
    runs.wait_for(lambda: len(runs.children_of(process)) == 2)
    children = runs.children_of(process)
    for _ in range(2 - is_starting):
        process.send_signal(signal.SIGINT)
    code, out, err = runs.finish(process, 60)
    assert code in ((130,) if is_starting else (0, 130)) and "Traceback" not in err, out + err
    assert "interrupted" in out or not is_starting
    runs.wait_for(lambda: runs.are_gone(children), 5)
    assert runs.arenas_named(runs.run_directory(tmp_path).name) == []


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["engine-0", "learner"])
def test_worker_death_ends_the_run_at_once_if_restarts_are_off(tmp_path: Path, victim: str) -> None:
    process = runs.start_torchless(
        "run", runs.write_small(tmp_path), *runs.SCRIPTED, "run.learning_steps=10000", "run.max_restarts=0"
    )
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 1)
    children = runs.children_of(process)
    package = "engines.worker" if victim == "engine-0" else runs.TORCHLESS
    (worker,) = [child for child in children if any(package in part for part in child.cmdline())]
    worker.kill()
    code, _, err = runs.finish(process, 60)
    assert code == 1
    assert f"{victim} was killed by SIGKILL" in err
    assert "Traceback" not in err
    runs.wait_for(lambda: runs.are_gone(children), 5)
    assert runs.arenas_named(runs.run_directory(tmp_path).name) == []


@pytest.mark.parametrize(
    ("run", "override", "reason", "restarts"),
    [
        (
            runs.run_torchless,
            'rewards.final_reward_transformation=["fakes.failing_transform:Transform"]',
            "your code ended the run: KeyError: 0 (failing_transform.py, line 6, in __call__)",
            0,
        ),
        pytest.param(
            runs.run,
            "algorithm=fakes.failing_parts:Algorithm",
            "learner: AttributeError: 'tuple' object has no attribute 'nope' (failing_parts.py, line 12, in update)",
            1,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["in a reward transform", "in an algorithm"],
)
def test_mistake_in_own_code_ends_the_run_with_its_line(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]], override: str, reason: str, restarts: int
) -> None:
    code, out, err = run("run", runs.write_small(tmp_path), *runs.SCRIPTED, override, "run.eval_games=0")
    assert code == 1 and err.startswith(f"error: {reason}"), out + err
    assert "Traceback" not in err
    assert out.count("It is restarted") == restarts


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param(["lora.target_modules=['nowhere']", *runs.SCRIPTED], "nowhere", marks=pytest.mark.nightly),
        (["model_name=/nowhere/at/all"], "/nowhere/at/all"),
        (["run.learning_stepps=3"], "did you mean 'learning_steps'"),
        ([f"run.output_dir={__file__}/x"], "run.output_dir"),
        (["engine.max_model_len=12"], "engine.max_"),
    ],
)
def test_bad_input_gives_one_clear_message_and_leaves_nothing(tmp_path: Path, overrides: list[str], says: str) -> None:
    ended = CliRunner().invoke(app, ["run", str(runs.write_small(tmp_path)), "run.name=bad", *overrides])
    assert ended.exit_code == 1
    assert says in ended.stderr
    assert "Traceback" not in ended.output
    assert [path for path in runs.arenas_named("") if path.name.endswith("-bad")] == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    words = ["run", str(runs.write_small(tmp_path)), "model_name=/nowhere", "--debug"]
    with pytest.raises(ConfigError, match="/nowhere"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.nightly
def test_training_continues_from_an_adapter_and_evaluates_it_first(finished_run: Path, tmp_path: Path) -> None:
    adapter = finished_run / "checkpoints" / "ckpt-3"
    initial = (*runs.SCRIPTED, f"lora.initial_lora_path={adapter}")
    out = runs.output_of(runs.run_torchless("run", runs.write_small(tmp_path), *initial))
    assert "initial" in out
    directory = runs.run_directory(tmp_path)
    evaluations = run_files.evaluations(directory)
    assert [line["model"] for line in evaluations if line["label"] in ("before", "after")] == ["initial", "ckpt-3"]
    updates = run_files.updates(directory)
    assert [line["step"] for line in updates] == [1, 2, 3]
    assert all(0 <= line["learner/staleness_max"] <= 8 for line in updates)
