"""A run whose games outgrow the context: none is void, and everything that counts games says why they ended."""

import re
from pathlib import Path

from typer.testing import CliRunner

from fakes import run_files, runs
from unstable_lite.cli.app import app
from unstable_lite.files import read_records

CONFIG = """
model_name = "builtin:tiny"
run = { learning_steps = 1, num_collection_workers = 8, num_eval_workers = 0, eval_games = 100, output_dir = "OUTPUT" }
learner = { batch_size = 8 }
league = { opponent_sampling_strategy = "fixed", fixed_opponents = ["scripted:random"] }
[engine]
kind = "scripted"
replies = ['\\\\boxed{rock}', '\\\\boxed{paper}', '\\\\boxed{scissors}', 'none']
max_generation_len = 40
max_model_len = 560
[[train_envs]]
env_id = "IteratedRockPaperScissors-v0-train"
num_players = 2
num_actors = 1
prompt_template = "default"
[[eval_envs]]
env_id = "IteratedRockPaperScissors-v0-train"
num_players = 2
prompt_template = "default"
fixed_opponent = "scripted:random"
"""
ENV = "IteratedRockPaperScissors-v0-train (scripted:random)"


def test_games_that_outgrow_the_context_are_kept_counted_and_shown(tmp_path: Path) -> None:
    config = tmp_path / "full.toml"
    config.write_text(CONFIG.replace("OUTPUT", str(tmp_path / "outputs")))
    checked = CliRunner().invoke(app, ["check", str(config)]).output
    assert re.search(r"turn \d+ of a trial game .* \(engine\.max_model_len = 560\).* is full at turn \d+", checked)
    assert "Illegal answers and long actions come on top" in checked
    assert "of a trial game" not in CliRunner().invoke(app, ["check", str(config), "engine.max_model_len=4096"]).output
    refused = CliRunner().invoke(app, ["check", str(config), "engine.max_model_len=100"])
    assert refused.exit_code == 1
    assert re.search(r"first prompt of a game has \d+ tokens, and engine\.max_model_len = 100", refused.output)
    out = runs.output_of(runs.run_torchless("run", config))
    directory = runs.run_directory(tmp_path)
    games = list(read_records(directory / "games.jsonl"))
    assert {(game["end"], game["reason"]) for game in games} >= {("truncated", "context_full"), ("invalid", "")}
    assert "void" not in {game["end"] for game in games} and "; 0 void" in out
    full = sum(game["reason"] == "context_full" for game in games)
    assert re.search(rf"^ended early +{full} context_full in {re.escape(ENV)}$", out, re.M)
    assert re.search(r"update 1/1 .* ended early: \d+ context_full in ", out)
    assert re.search(r"update 0  .*: \d\d % of the games ended by an invalid move", out)
    assert re.search(
        r"update 0  .*: \d+ context_full of 100 games: [\d.]+ % of the points had all of these been lost", out
    )
    assert re.search(r"^alarm update 0: ended_early: .* newest 100 games ended early: context_full in ", out, re.M)
    assert run_files.metrics(directory)[-1][f"ended/{ENV}/context_full"] == full
    assert runs.undocumented_metrics(directory) == []
    assert CliRunner().invoke(app, ["report", str(directory)]).exit_code == 0
    page = (directory / "report.html").read_text()
    assert f"outside of their rules: {full} context_full in {ENV}." in page
    assert "context_full of 100 games" in page
