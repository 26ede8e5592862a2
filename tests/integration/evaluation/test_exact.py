"""Exploitability is computed from a model's own probabilities: by `eval --exact`, and by the learner in a run."""

import csv
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unstable_lite
from fakes import run_files, runs
from unstable_lite.cli.app import app
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation import action_distribution
from unstable_lite.evaluation.exact import exact_result
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.evaluation.scoring import evaluate_exactly
from unstable_lite.games.openspiel import game_tree
from unstable_lite.games.openspiel.game_tree import flatten, renormalised, uniform

KUHN = "openspiel:kuhn_poker"
CONFIG = """
model_name = "builtin:tiny-games"
engine = { temperature = 0.7, max_generation_len = 12 }
learner = { dtype = "float32", batch_size = 32, learning_rate = 1e-2 }
lora = { lora_rank = 4 }
[run]
learning_steps = 2
num_collection_workers = 16
num_eval_workers = 0
exact_every = 1
output_dir = "OUTPUT"
name = "exact"
[[train_envs]]
env_id = "openspiel:kuhn_poker"
num_players = 2
num_actors = 2
prompt_template = "tiny"
"""
CONNECT_FOUR = """
[[eval_envs]]
env_id = "openspiel:connect_four"
num_players = 2
fixed_opponent = "scripted:random"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exact")
    (directory / "run.toml").write_text(CONFIG.replace("OUTPUT", str(directory / "outputs")))
    runs.output_of(runs.run("run", directory / "run.toml"))
    return runs.run_directory(directory)


def command(*arguments: str | Path) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its output without line breaks."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def curve(run: Path, name: str = "exploitability") -> dict[int, float]:
    return {line["step"]: line[f"{name}/{KUHN}"] for line in run_files.metrics(run) if f"{name}/{KUHN}" in line}


@pytest.mark.nightly
def test_learner_computes_what_the_saved_checkpoints_have(run: Path) -> None:
    tree = flatten(KUHN)
    shown = [state.observation for state in tree.states]
    assert list(curve(run)) == [0, 1, 2]
    for update, model in ((0, "base"), (2, str(run / "checkpoints" / "ckpt-2"))):
        found = action_distribution(model, KUHN, shown, config=run / "config.toml", device="cpu")
        policy = [distribution.probabilities for distribution in found]
        assert curve(run)[update] == pytest.approx(tree.exploitability(policy), abs=1e-4)
        legal = curve(run, "exploitability_legal")[update]
        assert legal == pytest.approx(tree.exploitability(renormalised(policy)), abs=1e-4)
        assert tree.exploitability(policy) != pytest.approx(legal, abs=1e-6)
    assert len({round(value, 6) for value in curve(run).values()}) == 3  # training changes it


ROLES = """seats = ["second", "first"]
[policies.first]
[policies.second]
learner = { learning_rate = 3e-2 }
"""


@pytest.mark.nightly
def test_policies_of_roles_have_the_exploitability_of_the_pair_at_their_seats(tmp_path: Path) -> None:
    text = CONFIG.replace("OUTPUT", str(tmp_path / "outputs")).replace("num_actors = 2\n", "") + ROLES
    # A sync schedule, so that the policies cannot be as good as the pair by chance.
    (tmp_path / "run.toml").write_text(text.replace("learning_steps = 2", 'learning_steps = 4\nschedule = "sync"'))
    runs.output_of(runs.run("run", tmp_path / "run.toml"))
    made = runs.run_directory(tmp_path)
    curves = {name: curve(made, f"{name}/exploitability") for name in ("first", "second")}
    assert curves["first"][0] == curves["second"][0], "both begin as the base"
    tree = flatten(KUHN)
    shown = [state.observation for state in tree.states]
    saved = made / "checkpoints" / "ckpt-4"
    found = [
        action_distribution(str(saved / name), KUHN, shown, config=made / "config.toml", device="cpu")
        for name in ("second", "first")
    ]
    pair = [found[state.seat][n].probabilities for n, state in enumerate(tree.states)]
    last = curves["second"][4]  # the policies take turns, the first one first
    assert last == pytest.approx(tree.exploitability(pair), abs=1e-4)
    for alone in found:
        assert last != pytest.approx(tree.exploitability([one.probabilities for one in alone]), abs=1e-3)


def test_command_and_call_have_a_row_for_each_model(run: Path, tmp_path: Path) -> None:
    code, out = command("eval", "base", run, "--exact", "--output", tmp_path)
    assert code == 0, out
    with (tmp_path / "exact.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["random legal", "base", "ckpt-2"]
    assert float(rows["random legal"]["exploitability"]) == pytest.approx(11 / 24)
    assert float(rows["ckpt-2"]["exploitability"]) == pytest.approx(curve(run)[2], abs=1e-4)
    for row in rows.values():
        for seat in "01":
            assert sum(float(row[f"{what}_{seat}"]) for what in ("win", "draw", "loss")) == pytest.approx(1)
    returned = unstable_lite.exploitability(["base", run], quiet=True)
    assert {row["model"]: row["exploitability"] for row in returned} == pytest.approx(
        {model: float(row["exploitability"]) for model, row in rows.items()}, abs=1e-5
    )


def of_env(env_id: str) -> str:
    return CONFIG.replace(KUHN, env_id)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (CONFIG, 0, ["12 decision states, 24 answers", "× 3 (estimated)"]),
        (CONFIG + CONNECT_FOUR, 0, ["not exact", "10^12"]),
        (CONFIG + "error_allowance = 2\n", 1, ["error_allowance = 2; set it to 0"]),
        (of_env("openspiel:pig"), 1, ["repeat without end"]),
        (of_env("openspiel:liars_dice"), 1, ["decision states"]),
        (of_env("Nim-v0-train"), 1, ["only games of OpenSpiel"]),
        (of_env("openspiel:liars_dice(numdice=0)"), 1, ["OpenSpiel"]),
    ],
)
def test_check_prints_the_cost_of_exact_evaluations_or_refuses_them(
    tmp_path: Path, text: str, code: int, said: list[str]
) -> None:
    (tmp_path / "run.toml").write_text(text)
    found, out = command("check", tmp_path / "run.toml")
    assert found == code and all(part in out for part in said), out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["scripted:random", "--exact", "--env", KUHN], 1, "scripted:random: only the base and adapters"),
        (["base", "--exact", "--ladder"], 2, "--exact plays no games"),
        (["base", "--exact", "--temperature", "0"], 2, "--exact plays no games"),
        (["base", "--exact", "--env", "openspiel:liars_dice", "--output", "OUT"], 1, "decision states"),
        (["base", "--exact", "--env", "openspiel:liars_dice"], 1, "--force"),
        (["base", "--exact", "--env", KUHN, "--env", "Nim-v0-train"], 0, "left out: Nim-v0-train: only games of Open"),
        (["RUN/checkpoints/ckpt-3", "--exact"], 1, "ckpt-3"),
        (["base", "--force", "--output", "OUT"], 2, "--force is for --exact"),
        (["base"], 2, "--output"),
    ],
)
def test_what_cannot_be_computed_or_played_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.setattr(game_tree, "MOST_COUNTED", game_tree.MOST_STATES)  # `check` counts a large game to the end
    words = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")) for word in arguments]
    found, out = command("eval", *words, "--config", run / "config.toml")
    assert found == code and said in out
    assert not list(tmp_path.iterdir())


def test_env_whose_players_may_repeat_an_illegal_answer_has_no_exact_result(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f"{CONFIG}error_allowance = 2\n")
    evaluation = plan_evaluation(["base"], config=tmp_path / "run.toml", opponents=["base"])
    with pytest.raises(ConfigError, match="error_allowance = 2; set it to 0"):
        evaluate_exactly([], evaluation, is_forced=False, say=print)


def test_result_of_uniform_play_has_known_values() -> None:
    tree = flatten("openspiel:matrix_rps")
    result = exact_result("x", "openspiel:matrix_rps", tree, uniform(tree))
    assert result.exploitability == pytest.approx(0, abs=1e-12)
    always_rock = [np.array([1.0, 0.0, 0.0])] * 2
    result = exact_result("x", "openspiel:matrix_rps", tree, always_rock)
    assert (result.exploitability, result.loss_0, result.loss_1, result.rest) == (1.0, 1.0, 1.0, 0.0)
