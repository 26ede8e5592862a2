"""Ids of envs have one spelling; files of questions in a config: order in evaluations, and what `check` says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.config import Config
from unstable_lite.config.env_ids import canonical_env_id, slug, with_slugs
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.reading import parse_config
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.models import BASE_MODEL, NO_OPPONENT
from unstable_lite.evaluation.plan import Cell, plan_evaluation, read_key
from unstable_lite.evaluation.probing import with_positions
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.questions import read_questions
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.trust import run_config
from unstable_lite.planning.validation import find_engine_problems, find_problems
from unstable_lite.tracking.run_directory import default_run_name

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "prompt_template": "tiny", "observation": "board"}


def write(path: Path, n: int = 3) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": i}) + "\n" for i in range(n)))
    return path


def config_of(tmp_path: Path, *paths: Path, **run: Any) -> Config:
    envs = [{"env_id": f"questions:{path}", "num_players": 1, "prompt_template": "tiny"} for path in paths]
    return Config.model_validate(
        {
            "run": {"eval_games": 5, "output_dir": tmp_path / "outputs"} | run,
            "engine": {"max_generation_len": 16, "max_model_len": 512},
            "train_envs": [NIM | {"num_actors": 2}],
            "eval_envs": envs,
        }
    )


def test_path_becomes_absolute_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert canonical_env_id("questions:sets/a b.jsonl") == f"questions:{tmp_path}/sets/a b.jsonl"
    assert canonical_env_id("questions:~/a.jsonl") == "questions:/home/me/a.jsonl"
    assert canonical_env_id("questions:/a/b.jsonl") == "questions:/a/b.jsonl"


@pytest.mark.parametrize(
    "path", ["", "a.json", ".jsonl", "a\n.jsonl", "a\0.jsonl", "a | b.jsonl", "~absent-user/a.jsonl"]
)
def test_id_without_a_path_is_refused(path):
    _, problems = parse_config(
        {"train_envs": [NIM | {"num_actors": 1}], "eval_envs": [{"env_id": f"questions:{path}", "num_players": 1}]}
    )
    assert problems[0].startswith("eval_envs.0.env_id") and ("write" in problems[0] or "Write" in problems[0])


def test_names_of_files_tags_and_runs_have_no_directory(tmp_path):
    assert slug("questions:/home/me/AIME 2024.jsonl") == "questions-AIME-2024"
    assert with_slugs("evaluation-questions:/a b/c.jsonl (none, greedy)/n") == "evaluation-questions-c (none, greedy)/n"
    assert with_slugs("collection-questions:/a/b.jsonl/reward") == "collection-questions-b/reward"
    assert slug(SPIEL_NIM) == "openspiel-nim-is_misere-False-pile_sizes-3-4-5"
    assert slug("openspiel:goofspiel(num_turns=-1)") != slug("openspiel:goofspiel(num_turns=1)")
    assert slug("Nim-v0-train") == "Nim-v0-train"
    assert with_slugs("learner/loss") == "learner/loss"
    env_id = f"questions:{write(tmp_path / 'set.jsonl')}"
    config = Config.model_validate({"train_envs": [{"env_id": env_id, "num_players": 1, "num_actors": 1}]})
    assert default_run_name(config) == "unstable-lite-builtin-tiny-questions-set"


def test_check_names_files_of_one_name_a_bad_file_and_reward_scale(tmp_path):
    config = config_of(tmp_path, write(tmp_path / "a" / "set.jsonl"), write(tmp_path / "b" / "set.jsonl"))
    assert any("questions-set; rename" in problem for problem in find_engine_problems(config))
    config = config_of(tmp_path, tmp_path / "absent.jsonl")
    (problem,) = find_problems(config)
    assert problem.startswith("eval_envs.0: env_id") and "absent.jsonl cannot be read" in problem
    (env,) = config_of(tmp_path, write(tmp_path / "set.jsonl")).eval_envs
    scaled = config.model_copy(update={"eval_envs": (env.model_copy(update={"reward_scale": 0.5}),)})
    assert any("reward_scale" in problem for problem in find_problems(scaled))


@pytest.mark.parametrize(
    ("games", "says"), [(2, "2 games of an evaluation ask the first 2"), (7, "7 games of an evaluation ask all")]
)
def test_check_says_how_many_questions_an_evaluation_asks(tmp_path, games, says):
    path = write(tmp_path / "set.jsonl")
    rows = dict(make_plan(config_of(tmp_path, path, eval_games=games)).describe())
    assert rows["questions"] == f"3 in {path}; {says}"


def test_evaluations_of_a_run_ask_in_the_order_of_the_file(tmp_path):
    config = config_of(tmp_path, write(tmp_path / "set.jsonl"))
    registry = ModelRegistry()
    registry.add_policy("ckpt-1", 1, 1)
    (env,) = config.eval_envs
    scheduler = GameScheduler(build_model_sampler(config, registry, random.Random(0)), build_env_sampler(config))

    def question(number: int | None) -> str:
        spec = scheduler.next_eval_job(env, number=number)
        assert spec.seed % 2 == 1
        return environment_of(spec, spec.seed).observe()[1]

    for _ in range(2):
        assert [question(number) for number in range(5)] == ["0?", "1?", "2?", "0?", "1?"]
    assert [question(None) for _ in range(4)] == ["0?", "1?", "2?", "0?"]  # while training


def test_changed_file_is_another_cell_of_an_evaluation(tmp_path):
    path = write(tmp_path / "set.jsonl")
    env = EvalEnvSpec(env_id=f"questions:{path}", num_players=1)
    cell = Cell(model=BASE_MODEL, opponent=NO_OPPONENT, env=env)
    key = cell.key
    assert read_key(key).env_id == env.env_id
    write(path, 4)
    read_questions.cache_clear()
    assert cell.key != key


def test_eval_takes_a_path_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "2024.jsonl")
    (tmp_path / "nim.toml").write_text(
        'model_name = "builtin:tiny"\n[[train_envs]]\nenv_id = "Nim-v0-train"\nnum_players = 2\nnum_actors = 2\n'
        'observation = "board"\nprompt_template = "tiny"\n'
    )

    def planned(word: str) -> EvalEnvSpec:
        plan = plan_evaluation(["base"], config=tmp_path / "nim.toml", envs=[word])
        return plan.cells[0].env

    for word in ("questions:2024.jsonl", f"questions:{tmp_path}/2024.jsonl:1:tiny"):
        env = planned(word)
        assert (env.env_id, env.num_players, env.observation) == (f"questions:{tmp_path}/2024.jsonl", 1, "env")
    with pytest.raises(ConfigError, match="set num_players = 1"):
        planned("questions:2024.jsonl:2")


def test_questions_in_another_persons_run_need_no_trust(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.toml").write_text(
        '[[eval_envs]]\nenv_id = "questions:/theirs/set.jsonl"\n'
        '[league.env_sampling_strategy.weighted.weights]\n"questions:/theirs/set.jsonl" = 2\n'
    )
    assert run_config(theirs) == theirs / "config.toml"
    (theirs / "config.toml").write_text('[[eval_envs]]\naction_extraction_fn = "questions:/theirs/set.jsonl"\n')
    with pytest.raises(ConfigError, match="would run code"):
        run_config(theirs)


def test_probes_leave_questions_out(tmp_path):
    path = write(tmp_path / "set.jsonl")
    envs = (EvalEnvSpec(env_id=f"questions:{path}", num_players=1), EvalEnvSpec.model_validate(NIM))
    cells = [Cell(model=BASE_MODEL, opponent=NO_OPPONENT, env=env) for env in envs]
    said: list[str] = []
    assert with_positions(cells, said.append) == cells[1:]
    assert len(said) == 1 and "left out" in said[0] and "set.jsonl" in said[0]
    with pytest.raises(ConfigError, match="no env to probe"):
        with_positions(cells[:1], said.append)


SPIEL_NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("openspiel:kuhn_poker", "openspiel:kuhn_poker"),
        ("openspiel:kuhn_poker()", "openspiel:kuhn_poker"),
        ("openspiel:nim(pile_sizes=3;4;5,is_misere=False)", SPIEL_NIM),
        ("openspiel: nim( pile_sizes = 3;4;5 , is_misere = false )", SPIEL_NIM),
        ("openspiel:goofspiel(num_turns=-1)", "openspiel:goofspiel(num_turns=-1)"),
        ("Nim-v0-train", "Nim-v0-train"),
        ("my_module:Nim-v0", "my_module:Nim-v0"),
    ],
)
def test_each_game_has_one_spelling(written, canonical):
    assert canonical_env_id(written) == canonical
    assert EvalEnvSpec(env_id=written, num_players=2).env_id == canonical


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("openspiel:", "write openspiel:NAME"),
        ("openspiel:Kuhn", "write openspiel:NAME"),
        ("openspiel:kuhn_poker(players=3", "write openspiel:NAME"),
        ("openspiel:kuhn_poker(players=3)!", "write openspiel:NAME"),
        ("openspiel:kuhn_poker(3)", "'3' is not a parameter"),
        ("openspiel:kuhn_poker(players=3,)", "'' is not a parameter"),
        ("openspiel:kuhn_poker(players=2,players=3)", "the parameter 'players' twice"),
        ("openspiel:chess(fen=8/8)", "'fen=8/8' is not a parameter"),
        ("openspiel:misere(game=kuhn_poker())", "'game=kuhn_poker()' is not a parameter"),
    ],
)
def test_id_that_cannot_be_parsed_says_why(written, says):
    with pytest.raises(ValueError, match="openspiel") as caught:
        canonical_env_id(written)
    assert says in str(caught.value)
