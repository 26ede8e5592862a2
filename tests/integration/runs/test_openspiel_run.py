"""A run, an evaluation and a check on games of OpenSpiel, as a user starts them."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fakes import run_files, runs
from unstable_lite.config.reading import read_config
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.evaluator import evaluate
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.files import read_records
from unstable_lite.planning.plan import load_plan
from unstable_lite.planning.trust import run_config

KUHN, LEDUC = "openspiel:kuhn_poker", "openspiel:leduc_poker"
NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"
CONFIG = """
model_name = "builtin:tiny"
run = { learning_steps = 2, num_collection_workers = 8, num_eval_workers = 0, eval_games = 20, output_dir = "OUTPUT" }
engine = { kind = "transformers", temperature = 1.0, max_generation_len = 12, max_model_len = 512 }
learner = { batch_size = 16, activation_checkpointing = false }
league = { env_sampling_strategy = { weighted = { weights = { "openspiel:kuhn_poker" = 2 } } } }
train_envs = [{ env_id = "openspiel:kuhn_poker()", num_players = 2, num_actors = 2, prompt_template = "tiny" }]
[[eval_envs]]
env_id = "openspiel:kuhn_poker"
num_players = 2
fixed_opponent = "scripted:cfr"
[[eval_envs]]
env_id = "openspiel:nim(pile_sizes=3;4;5,is_misere=false)"
num_players = 2
prompt_template = "tiny"
fixed_opponent = "scripted:mcts:10"
"""
LEGAL = (
    "engine.kind=scripted",
    'engine.replies=["\\\\boxed{bet}", "\\\\boxed{[call]}", "\\\\boxed{raise}", "\\\\boxed{fold}"]',
    "engine.max_model_len=4096",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kuhn.toml"
    path.write_text(CONFIG.replace("OUTPUT", str(tmp_path / "outputs")))
    return path


def test_run_on_openspiel_trains_evaluates_and_writes_tags_with_slugs(config: Path, tmp_path: Path) -> None:
    code, out, err = runs.run_torchless("run", config, *LEGAL)
    assert code == 0, out + err
    assert "OpenSpiel exception" not in err
    (directory,) = (tmp_path / "outputs").glob("*/*")
    last = {key: value for line in run_files.metrics(directory) for key, value in line.items()}
    assert last[f"collection-{KUHN}/n"] > 0
    games = list(read_records(directory / "games.jsonl"))
    assert all(game["end"] != "void" for game in games)
    assert {game["env_id"] for game in games} == {KUHN, NIM}
    board = EventAccumulator(str(directory / "tensorboard")).Reload()
    tags = board.Tags()["tensors"]
    assert "collection-openspiel-kuhn_poker/Points" in tags
    assert any(tag.startswith("Results/") and "openspiel-nim-is_misere-False-pile_sizes-3-4-5" in tag for tag in tags)
    assert not any("openspiel:" in tag for tag in tags)


async def test_evaluation_names_openspiel_on_the_command_line_and_counts_in_its_units(
    config: Path, tmp_path: Path
) -> None:
    plan = plan_evaluation(
        ["base"],
        config=config,
        envs=[f"{LEDUC}:2:tiny", f"{KUHN}:2", "openspiel:nim(pile_sizes=3;4;5, is_misere=False)"],
        opponents=["scripted:random"],
        overrides=LEGAL,
    )
    assert [(cell.env.env_id, cell.env.num_players, cell.env.prompt_template) for cell in plan.cells] == [
        (LEDUC, 2, "tiny"),
        (KUHN, 2, "tiny"),
        (NIM, 2, "tiny"),
    ]
    done = await evaluate(plan, tmp_path / "out", 12, say=lambda _: None)
    assert done.played == 36
    rows = list(read_records(tmp_path / "out" / "results.jsonl"))
    assert all(row["end"] != "void" for row in rows)
    kuhn = [row for row in rows if row["env_id"] == KUHN]
    assert {abs(row["reward"]) for row in kuhn} <= {1.0, 2.0}, "chips"
    assert {row["reward"] for row in kuhn if row["own_invalid"]} == {-2.0}
    deals = {(row["seed"], row["pid"]) for row in kuhn}
    assert deals == {(seed, pid) for seed, _ in deals for pid in (0, 1)}, "every deal is played from both seats"


def test_config_with_bad_openspiel_envs_is_refused_with_every_reason(config: Path) -> None:
    text = config.read_text()
    config.write_text(
        text.replace('"openspiel:kuhn_poker"\nnum', '"openspiel:kuhn_poker(deck=3)"\nnum')
        .replace('"scripted:mcts:10"', '"scripted:cfr"\nobservation = "board"')
        .replace("[[eval_envs]]", '[[eval_envs]]\nenv_id = "Nim-v0-train"\nnum_players = 2\nreward_scale = 2.0\n'
                 'fixed_opponent = "scripted:mcts:10"\n[[eval_envs]]', 1)
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load_plan(config)
    problems = "\n".join(caught.value.problems)
    assert "Unknown parameter 'deck'" in problems
    assert "observation = 'board' is for TextArena's envs" in problems
    assert "reward_scale = 2 is for openspiel:NAME only" in problems
    assert "'scripted:mcts:10' cannot play 'Nim-v0-train'" in problems
    config.write_text(text.replace("openspiel:kuhn_poker()", "openspiel:Kuhn Poker"))
    with pytest.raises(ConfigError, match="write openspiel:NAME or openspiel:NAME"):
        load_plan(config)


def test_reward_scale_is_inherited_and_changes_rewards_only(config: Path) -> None:
    config.write_text(config.read_text().replace("num_actors = 2", "num_actors = 2, reward_scale = 0.25"))
    found, problems = read_config(config, ())
    assert found is not None and not problems
    assert [env.reward_scale for env in found.eval_envs] == [0.25, None]


def test_openspiel_env_of_another_person_is_trusted_as_data(config: Path, tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    (directory / "config.toml").write_text(config.read_text())
    assert run_config(directory) == directory / "config.toml"
    plugin = config.read_text().replace('prompt_template = "tiny"', 'action_extraction_fn = "openspiel:kuhn_poker"', 1)
    (directory / "config.toml").write_text(plugin)
    with pytest.raises(ConfigError, match="action_extraction_fn = 'openspiel:kuhn_poker'"):
        run_config(directory)


def test_check_says_that_textarenas_kuhn_pays_no_bets(config: Path) -> None:
    text = config.read_text().replace("openspiel:nim(pile_sizes=3;4;5,is_misere=false)", "KuhnPoker-v0-train")
    config.write_text(text.replace("scripted:mcts:10", "scripted:random"))
    warnings = [text for what, text in load_plan(config).describe() if what == "warning"]
    assert any("textarena/envs/KuhnPoker/env.py" in text for text in warnings)
