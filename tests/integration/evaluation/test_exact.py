"""Exploitability is computed from a model's own probabilities: by `eval --exact`, and by the learner in a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from fakes import runs
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation import action_distribution
from unstable_lite.evaluation.exact import exact_result
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.evaluation.scoring import evaluate_exactly
from unstable_lite.games.game_tree import renormalised, uniform
from unstable_lite.games.openspiel.flatten import flatten

KUHN = "openspiel:kuhn_poker"
CONFIG = """
model_name = "builtin:tiny-games"
[run]
learning_steps = 4
num_collection_workers = 16
num_eval_workers = 0
exact_every = 2
output_dir = "OUTPUT"
name = "exact"
[engine]
temperature = 0.7
max_generation_len = 12
[learner]
dtype = "float32"
batch_size = 32
learning_rate = 1e-2
[lora]
lora_rank = 4
[[train_envs]]
env_id = "openspiel:kuhn_poker"
num_players = 2
num_actors = 2
prompt_template = "tiny"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exact")
    (directory / "run.toml").write_text(CONFIG.replace("OUTPUT", str(directory / "outputs")))
    code, out, err = runs.run("run", directory / "run.toml")
    assert code == 0, out + err
    return runs.run_directory(directory)


def curve(run: Path, name: str = "exploitability") -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[f"{name}/{KUHN}"] for line in lines if f"{name}/{KUHN}" in line}


def test_learner_computes_what_the_saved_checkpoints_have(run: Path) -> None:
    tree = flatten(KUHN)
    shown = [state.observation for state in tree.states]
    assert list(curve(run)) == [0, 2, 4]
    for update, model in ((0, "base"), (4, str(run / "checkpoints" / "ckpt-4"))):
        found = action_distribution(model, KUHN, shown, config=run / "config.toml", device="cpu")
        policy = [distribution.probabilities for distribution in found]
        assert curve(run)[update] == pytest.approx(tree.exploitability(policy), abs=1e-4)
        legal = curve(run, "exploitability_legal")[update]
        assert legal == pytest.approx(tree.exploitability(renormalised(policy)), abs=1e-4)
        assert tree.exploitability(policy) != pytest.approx(legal, abs=1e-6)
    assert len({round(value, 6) for value in curve(run).values()}) == 3  # training changes it


def test_eval_exact_writes_a_row_for_each_model(run: Path, tmp_path: Path) -> None:
    code, out, err = runs.run("eval", "base", run, "--exact", "--output", tmp_path)
    assert code == 0, out + err
    with (tmp_path / "exact.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["random legal", "base", "ckpt-4"]
    assert float(rows["random legal"]["exploitability"]) == pytest.approx(11 / 24)
    assert float(rows["ckpt-4"]["exploitability"]) == pytest.approx(curve(run)[4], abs=1e-4)
    for row in rows.values():
        for seat in "01":
            assert sum(float(row[f"{what}_{seat}"]) for what in ("win", "draw", "loss")) == pytest.approx(1)


def test_check_says_what_exact_evaluations_cost(run: Path) -> None:
    code, out, _ = runs.run("check", run / "config.toml")
    assert code == 0
    assert "12 decision states, 24 answers" in out and "× 3 (estimated)" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('env_id = "openspiel:pig"', "repeat without end"),
        ('env_id = "openspiel:liars_dice"', "decision states"),
        ('env_id = "Nim-v0-train"', "only games of OpenSpiel"),
        ('env_id = "openspiel:liars_dice(numdice=0)"', "OpenSpiel"),
        ('env_id = "openspiel:kuhn_poker"\nerror_allowance = 2', "error_allowance = 2; set it to 0"),
    ],
)
def test_impossible_exact_evaluations_are_refused_before_the_start(tmp_path: Path, change: str, said: str) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.replace('env_id = "openspiel:kuhn_poker"', change))
    code, out, err = runs.run("check", tmp_path / "run.toml")
    assert code == 1 and said in " ".join((out + err).split())


def test_exact_evaluation_of_a_large_game_names_its_size(run: Path, tmp_path: Path) -> None:
    arguments = ("eval", "base", "--exact", "--config", run / "config.toml", "--env", "openspiel:liars_dice")
    code, _, err = runs.run(*arguments, "--output", tmp_path)
    assert code == 1 and "decision states" in err and "--force" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["scripted:random", "--exact", "--env", KUHN], 1, "scripted:random: only the base and adapters"),
        (["base", "--exact", "--tournament"], 2, "--exact plays no games"),
        (["base", "--exact", "--temperature", "0"], 2, "--exact plays no games"),
        (["base", "--force", "--output", "x"], 2, "--force is for --exact"),
    ],
)
def test_options_that_exact_evaluation_does_not_have_are_refused(
    run: Path, arguments: list[str], code: int, said: str
) -> None:
    found, out, err = runs.run("eval", *arguments, "--config", run / "config.toml")
    assert found == code and said in " ".join((out + err).replace("│", " ").split())


def test_envs_that_cannot_be_computed_are_left_out_with_the_reason(run: Path, tmp_path: Path) -> None:
    envs = ("--env", KUHN, "--env", "Nim-v0-train")
    code, out, err = runs.run("eval", "base", "--exact", "--config", run / "config.toml", *envs)
    assert code == 0 and "left out: Nim-v0-train: only games of OpenSpiel" in " ".join((out + err).split())
    more = '\n[[eval_envs]]\nenv_id = "openspiel:connect_four"\nnum_players = 2\nfixed_opponent = "scripted:random"\n'
    (tmp_path / "run.toml").write_text(CONFIG + more)
    code, out, err = runs.run("check", tmp_path / "run.toml")
    assert code == 0 and "not exact" in out and "10^12" in out


def test_env_whose_players_may_repeat_an_illegal_answer_has_no_exact_result(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"{CONFIG}error_allowance = 2\n")
    evaluation = plan_evaluation(["base"], output=tmp_path, config=tmp_path / "run.toml", opponents=["base"])
    with pytest.raises(ConfigError, match="error_allowance = 2; set it to 0"):
        evaluate_exactly(evaluation.cells, evaluation.plan.config, is_forced=False, say=print)


def test_output_is_needed_for_games_but_not_for_exact_results(run: Path) -> None:
    code, _, err = runs.run("eval", "base", "--config", run / "config.toml")
    assert code == 2 and "--output" in err


def test_result_of_uniform_play_has_known_values() -> None:
    tree = flatten("openspiel:matrix_rps")
    result = exact_result("x", "openspiel:matrix_rps", tree, uniform(tree))
    assert result.exploitability == pytest.approx(0, abs=1e-12)
    always_rock = [np.array([1.0, 0.0, 0.0])] * 2
    result = exact_result("x", "openspiel:matrix_rps", tree, always_rock)
    assert (result.exploitability, result.loss_0, result.loss_1, result.rest) == (1.0, 1.0, 1.0, 0.0)


def test_checkpoint_that_a_run_does_not_have_is_named(run: Path) -> None:
    code, _, err = runs.run("eval", run / "checkpoints" / "ckpt-3", "--exact")
    assert code == 1 and "ckpt-3" in err
