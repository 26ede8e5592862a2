"""`average:RUN` plays as one of the run's checkpoints in each game; its exact exploitability is that of the draw."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unstable_lite
from fakes.handmade_adapters import fitting, write_adapter
from unstable_lite.cli.app import app
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation import action_distribution
from unstable_lite.evaluation.models import opponent
from unstable_lite.evaluation.plan import game_spec, plan_evaluation
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.planning.plan import load_plan
from unstable_lite.types import ModelRef

KUHN = "openspiel:kuhn_poker"
BASE, MODULES = "builtin:tiny-games", ["q_proj", "down_proj"]
CONFIG = """
model_name = "builtin:tiny-games"
engine = { kind = "scripted", replies = ["\\\\boxed{[bet]}"], max_model_len = 2048, max_generation_len = 64 }
lora = { lora_rank = 4, lora_alpha = 8, target_modules = ["q_proj", "down_proj"] }
run = { num_eval_workers = 0 }
league = { opponent_sampling_strategy = "fixed", fixed_opponents = ["AVERAGE/linear"] }
[[train_envs]]
env_id = "openspiel:kuhn_poker"
num_players = 2
num_actors = 1
prompt_template = "tiny"
[[eval_envs]]
env_id = "openspiel:kuhn_poker"
num_players = 2
fixed_opponent = "AVERAGE"
prompt_template = "tiny"
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two checkpoints whose config has its averages as opponents."""
    for update in (1, 3):
        path = tmp_path / "run" / "checkpoints" / f"ckpt-{update}"
        write_adapter(path, fitting(BASE, update), base=BASE, target_modules=MODULES, bias="none")
    (tmp_path / "run" / "config.toml").write_text(CONFIG.replace("AVERAGE", f"average:{tmp_path / 'run'}"))
    return tmp_path / "run"


def test_members_are_drawn_apart_from_deals_and_from_other_averages(run: Path) -> None:
    one, other = (opponent(f"average:{run}{kind}") for kind in ("", "/ckpt-3,1"))
    drawn = Counter()
    for seed in range(2000):
        card = random.Random(seed).random() < 0.5  # TextArena deals from this stream
        drawn[card, one.drawn(seed).name[-1], other.drawn(seed).name[-1]] += 1
    assert len(drawn) == 8 and min(drawn.values()) > 180 and max(drawn.values()) < 320


def test_exact_exploitability_is_that_of_a_checkpoint_drawn_before_each_game(run: Path) -> None:
    weights = {f"average:{run}": (1, 1), f"average:{run}/linear": (1, 3)}
    tree, best = flatten(KUHN), dict.fromkeys(itertools.product(weights, (0, 1)), -np.inf)
    shown = [state.observation for state in tree.states]
    policies = [
        [of.probabilities for of in action_distribution(run / "checkpoints" / name, KUHN, shown, device="cpu")]
        for name in ("ckpt-1", "ckpt-3")
    ]
    for seat in (0, 1):
        own = [number for number, state in enumerate(tree.states) if state.seat == seat]
        for choices in itertools.product((0, 1), repeat=len(own)):
            response = [np.zeros(2) for _ in tree.states]
            for number, action in zip(own, choices, strict=True):
                response[number][action] = 1.0
            apart = [tree.outcomes(policy, seat, response).utility for policy in policies]
            for name in weights:
                best[name, seat] = max(best[name, seat], np.average(apart, weights=weights[name]))
    rows = {row["model"]: row for row in unstable_lite.exploitability([str(run), *weights], quiet=True)}
    assert list(rows) == ["random legal", "ckpt-1", "ckpt-3", *weights]
    for name in weights:
        won = best[name, 0], best[name, 1]
        assert rows[name]["exploitability"] == pytest.approx(np.mean(won), abs=1e-6), name


def test_games_of_an_average_are_those_of_its_members(run: Path, tmp_path: Path) -> None:
    name = f"average:{run}/linear"
    evaluation = plan_evaluation([name], opponents=["base"], overrides=["engine.max_loras=1"])
    (cell,) = evaluation.cells
    assert evaluation.plan.config.engine.max_loras == 2, "all members are loaded at once"

    def played(number: int) -> str:
        spec = game_spec(cell, number, 0, lambda model: ModelRef(uid=model.name, kind="checkpoint"))
        (uid,) = {agent.model.uid for agent in spec.agent_specs} - {"base"}
        return uid

    names = [played(number) for number in range(800)]
    assert names[::2] == names[1::2], "one draw for both seats of a deal"
    assert Counter(names)[f"run:{run}/ckpt-3"] / 800 == pytest.approx(0.75, abs=0.06)
    ended = CliRunner().invoke(
        app, ["eval", name, "--opponent", "base", "--games", "8", "--output", str(tmp_path / "x")]
    )
    assert ended.exit_code == 0, ended.output
    rows = [json.loads(line) for line in (tmp_path / "x" / "results.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == [name] * 8 and not [row for row in rows if row["end"] == "void"]


def test_config_names_the_members_that_a_run_began_with(run: Path) -> None:
    plan = load_plan(run / "config.toml")
    assert plan.config.league.fixed_opponents == (f"average:{run}/linear/ckpt-1,3",)
    assert [env.fixed_opponent for env in plan.config.eval_envs] == [f"average:{run}/ckpt-1,3"]
    (row,) = (text for name, text in plan.describe() if name == "frozen players")
    assert row.count("ckpt-1,") == row.count("ckpt-3") == 2
    (run / "config.toml").write_text(CONFIG.replace("AVERAGE", "average:nowhere"))
    with pytest.raises(ConfigError, match=r"average:nowhere.* is not a run directory"):
        load_plan(run / "config.toml")


def test_average_has_no_probabilities_of_single_answers(run: Path) -> None:
    with pytest.raises(ConfigError, match="draws a checkpoint for a whole game"):
        unstable_lite.exploitability(f"average:{run}", samples=2, quiet=True)
    ended = CliRunner().invoke(app, ["probe", str(run), f"average:{run}", "--games", "2"])
    assert ended.exit_code == 1 and "only the base and adapters" in " ".join(ended.output.split())
