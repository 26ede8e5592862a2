import csv
import math
import random
from pathlib import Path

import pytest

from fakes import runs
from fakes.handmade_adapters import fitting, small, write_adapter, write_run
from unstable_lite.adapters.frozen import FrozenAdapter, find_adapter, keep_copy
from unstable_lite.config import Config
from unstable_lite.config.games import TrainEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation import models
from unstable_lite.evaluation.ladder import Place, RatedGame, places_tables, rate, write_places
from unstable_lite.evaluation.models import check_base, find_models, find_run, find_sides, opponent
from unstable_lite.evaluation.plan import ANCHOR, RUNGS, plan_evaluation
from unstable_lite.tracking.run_directory import to_toml


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", runs.write_small(tmp_path), checkpoints=11)


def test_run_stands_for_all_its_checkpoints_in_numeric_order(run):
    models = find_models(["base", str(run), "scripted:random", "google/gemini-2.0-flash-lite-001"])
    assert [model.name for model in models] == [
        "base",
        *(f"ckpt-{n}" for n in range(1, 12)),
        "scripted:random",
        "google/gemini-2.0-flash-lite-001",
    ]
    assert [model.is_fixed for model in models[-2:]] == [True, True]


def test_models_are_the_same_if_their_weights_and_scales_are(run, tmp_path):
    latest = run / "checkpoints" / "latest"
    latest.symlink_to("ckpt-11")
    assert len(find_models([str(run), str(latest), str(run / "checkpoints" / "ckpt-3")])) == 11
    scales: dict[str, dict[str, object]] = {"a": {}, "b": {"lora_alpha": 16}, "c": {"use_rslora": True}}
    paths = [str(write_adapter(tmp_path / name, small(), **scale)) for name, scale in scales.items()]
    assert len(find_models(paths)) == 3


def test_models_of_one_name_are_distinguished_by_their_runs(run, tmp_path):
    other = write_adapter(tmp_path / "other" / "checkpoints" / "ckpt-1", small(99))
    names = [model.name for model in find_models([str(run / "checkpoints" / "ckpt-1"), str(other)])]
    assert names == ["run/ckpt-1", "other/ckpt-1"]
    first, second = (str(run / "checkpoints" / f"ckpt-{number}") for number in (1, 2))
    copy = write_adapter(tmp_path / "copy", small(2))
    models, opponents = find_sides([first, second], [str(other), str(copy), "base"])
    assert [model.name for model in models] == ["run/ckpt-1", "ckpt-2"]
    assert [model.name for model in opponents] == ["other/ckpt-1", "ckpt-2", "base"]
    assert opponents[1] == models[1]


def test_frozen_players_have_the_same_names_as_in_a_config(run, tmp_path):
    words = ["base", f"run:{run}/newest", f"adapter:{run}/checkpoints/ckpt-3"]
    models = find_models(words)
    assert [model.name for model in models] == words
    assert [model.path and model.path.name for model in models] == [None, "ckpt-11", "ckpt-3"]
    assert find_run(words[1:]) == find_run(words[2:]) == find_run(["base", str(run)]) == run
    assert find_run(["base"]) is None
    assert len(find_models([words[1], str(run / "checkpoints" / "ckpt-11")])) == 1, "the same weights"
    with pytest.raises(ConfigError, match="ckpt-77"):
        find_models([f"run:{run}/ckpt-77"])


def test_opponent_of_a_run_is_the_copy_that_it_played(run, tmp_path):
    name = f"run:{run}/newest"
    kept = keep_copy(name, tmp_path / "opponents")
    write_adapter(run / "checkpoints" / "ckpt-12", small(12))
    assert opponent(name, tmp_path / "opponents").key == kept.key != opponent(name).key
    assert opponent("base") == find_models(["base"])[0]
    with pytest.raises(ConfigError, match="no directory"):
        opponent("adapter:/nowhere")


def test_all_invalid_model_names_are_reported_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    half = write_adapter(tmp_path / "half", small())
    (half / "adapter_model.safetensors").unlink()
    garbled = write_adapter(tmp_path / "garbled", small())
    (garbled / "adapter_model.safetensors").write_bytes(b"not safetensors at all")
    (write_adapter(tmp_path / "no-json", small()) / "adapter_config.json").write_text("{")
    places = {"nowhere": "nowhere'", "empty": "empty", "run": "no checkpoint", "half": "adapter_model.safetensors"}
    places |= {"garbled": "garbled/adapter_model.safetensors", "no-json": "no-json/adapter_config.json"}
    with pytest.raises(ConfigError) as caught:
        find_models(["nonsense", *(str(tmp_path / name) for name in places)])
    says = caught.value.problems
    assert len(says) == 7
    for problem, part in zip(says, ("'nonsense'", *places.values()), strict=True):
        assert part in problem


def test_adapter_of_another_base_is_refused(tmp_path):
    env = TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2, prompt_template="tiny")
    config = Config(model_name="Qwen/Qwen3-1.7B", train_envs=(env,))
    other = find_models([str(write_adapter(tmp_path / "other", small(), base="Qwen/Qwen3-1.7B-Base"))])
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-1\.7B-Base"):
        check_base(other, config)
    same = find_models([str(write_adapter(tmp_path / "same", small(1, rank=32), base="Qwen/Qwen3-1.7B", r=32))])
    assert check_base(same, config) == 32
    local = find_models([str(write_adapter(tmp_path / "local", small(2), base="/data/models/qwen"))])
    assert check_base(local, config) == 4  # a directory name does not identify its contents


NIM = {"env_id": "Nim-v0-train", "num_players": 2, "prompt_template": "tiny"}
TICTACTOE = NIM | {"env_id": "TicTacToe-v0-train"}
TINY = "builtin:tiny"


def write_config(directory: Path, *opponents: str) -> Path:
    """Write a config that evaluates against these opponents, each in two envs."""
    envs = [env | {"fixed_opponent": name} for name in opponents for env in (NIM, TICTACTOE)]
    league = {"opponent_sampling_strategy": "mirror"}
    config = Config.model_validate({"train_envs": [NIM | {"num_actors": 1}], "eval_envs": envs, "league": league})
    path = directory / "config.toml"
    path.write_text(to_toml(config.model_dump(mode="json")))
    return path


def test_opponent_of_several_envs_is_read_once(tmp_path, monkeypatch):
    rival = f"adapter:{write_adapter(tmp_path / 'rival', fitting(TINY, 1), base=TINY)}"
    trained = [str(write_adapter(tmp_path / str(n), fitting(TINY, n + 2), base=TINY)) for n in range(2)]
    read: list[str] = []

    def find_and_count(name: str, *copies: Path | None) -> FrozenAdapter:
        read.append(name)
        return find_adapter(name, *copies)

    monkeypatch.setattr(models, "find_adapter", find_and_count)
    config = write_config(tmp_path, rival, "scripted:random")
    plan = plan_evaluation(trained, config=config)
    assert sum(cell.opponent.name == rival for cell in plan.cells) == 4
    assert read == [rival]


def test_arguments_of_the_trained_env_are_not_those_of_another(tmp_path):
    env = NIM | {"num_actors": 1, "env_kwargs": {"piles": [2, 3]}, "error_allowance": 2}
    path = tmp_path / "config.toml"
    path.write_text(to_toml(Config.model_validate({"train_envs": [env]}).model_dump(mode="json")))
    of_env = {}
    for env_id in ("Nim-v0-train", "TicTacToe-v0-train"):
        plan = plan_evaluation(["base"], config=path, envs=[f"{env_id}:2"], opponents=["scripted:random"])
        (of_env[env_id],) = ((cell.env.env_kwargs, cell.env.error_allowance) for cell in plan.cells)
    assert of_env == {"Nim-v0-train": ((("piles", (2, 3)),), 2), "TicTacToe-v0-train": ((), 0)}


def test_prompts_are_those_of_the_run_of_the_models_or_of_the_config(tmp_path):
    trained = str(write_adapter(tmp_path / "run" / "checkpoints" / "ckpt-1", fitting(TINY), base=TINY))
    config = write_config(tmp_path / "run", "scripted:random")
    other = write_config(tmp_path, "scripted:random")
    assert plan_evaluation([trained]).run == tmp_path / "run"
    assert plan_evaluation([trained], config=other).run == tmp_path / "run"
    assert plan_evaluation(["base"], config=config).run == tmp_path / "run"
    assert plan_evaluation(["base"], config=other).run is None


def test_settings_of_earlier_results_are_those_of_templates_without_new_keys(tmp_path):
    path = write_config(tmp_path, "scripted:random")
    path.write_text(path.read_text() + '[templates.mine]\nuser = "{observation}"\n')
    made = plan_evaluation(["base"], config=path).settings["templates"]["mine"]
    assert set(made) == {"user", "system", "assistant", "chat", "thinking", "stop", "zero_sum"}


def test_every_opponent_that_is_not_found_is_named(tmp_path):
    config = write_config(tmp_path, f"adapter:{tmp_path}/nowhere", f"run:{tmp_path}/none/best", "scripted:random")
    trained = str(write_adapter(tmp_path / "trained", small()))
    with pytest.raises(ConfigError) as caught:
        plan_evaluation([trained], config=config)
    absent, no_run = caught.value.problems
    assert "nowhere" in absent and "not a run directory" in no_run


STRENGTH = {"scripted:random": -300.0, ANCHOR: 0.0, "scripted:mcts:100": 150.0, "scripted:mcts:1000": 250.0}
ENV = "openspiel:tic_tac_toe"


def meet(one: str, other: str, games: int, strengths: dict[str, float], env_id: str = ENV) -> list[RatedGame]:
    """Return games whose points follow the strengths; a fifth of the games is drawn where both are equally strong."""
    rng, found = random.Random(f"{one} {other} {env_id}"), []
    expected = 1 / (1 + 10 ** ((strengths[other] - strengths[one]) / 400))
    drawn = 0.8 * min(expected, 1 - expected)
    for _ in range(games):
        draw = rng.random()
        is_win = draw < expected - drawn / 2
        outcome = "win" if is_win else "draw" if draw < expected + drawn / 2 else "loss"
        found.append(RatedGame(env_id, one, other, outcome))
    return found


def ladder_games(models: dict[str, float], games: int = 2000, env_id: str = ENV) -> list[RatedGame]:
    strengths = STRENGTH | models
    pairs = [(one, other) for i, one in enumerate(RUNGS) for other in RUNGS[i + 1 :]]
    pairs += [(model, rung) for model in models for rung in RUNGS]
    return [game for pair in pairs for game in meet(*pair, games, strengths, env_id)]


def ladder(models: dict[str, float], games: int = 2000) -> list[Place]:
    return rate(ladder_games(models, games))


def test_strengths_are_found_within_their_intervals():
    models = {"weak": -250.0, "strong": 120.0}
    places = ladder(models)
    ranked = ["scripted:mcts:1000", "scripted:mcts:100", "strong", ANCHOR, "weak", "scripted:random"]
    assert [place.model for place in places] == ranked
    for place in places:
        assert place.rating == pytest.approx((STRENGTH | models)[place.model], abs=25)
        if place.model == ANCHOR:
            assert place.rating == 0 and math.isnan(place.low)
        else:
            assert place.low < place.rating < place.high < place.low + 60
    (weak,) = (place for place in places if place.model == "weak")
    assert (weak.games, set(weak.points)) == (8000, set(RUNGS))


def test_rating_depends_on_no_other_model_and_on_no_other_env():
    one, others = {"one": 40.0}, {"two": 500.0, "three": -500.0}
    games = ladder_games(one | others, 50) + ladder_games(one, 50, env_id="openspiel:connect_four")
    beside = {(place.env_id, place.model): place for place in rate(games)}
    alone = [place for env_id in (ENV, "openspiel:connect_four") for place in rate(ladder_games(one, 50, env_id))]
    assert all(place == beside[place.env_id, place.model] for place in alone)


def test_games_that_were_all_lost_give_a_finite_rating_below_the_anchor():
    games = [RatedGame(ENV, "m", rung, "loss") for rung in RUNGS for _ in range(20)]
    games += [
        game for i, one in enumerate(RUNGS) for other in RUNGS[i + 1 :] for game in meet(one, other, 20, STRENGTH)
    ]
    (place,) = (place for place in rate(games) if place.model == "m")
    assert -1500 < place.low < place.rating < place.high < 0
    assert set(place.points.values()) == {0.0}
    assert place.rating - place.low > place.high - place.rating, "losses alone bound a rating from above only"


def test_anchor_has_no_interval_in_the_file_and_the_table_has_a_row_for_each_model(tmp_path):
    places = ladder({"m": 0.0}, games=10)
    write_places(tmp_path, places)
    with (tmp_path / "ladder.csv").open(newline="") as file:
        (anchor,) = (row for row in csv.DictReader(file) if row["model"] == ANCHOR)
    assert (anchor["low"], anchor["high"], anchor[f"points against {ANCHOR}"]) == ("", "", "")
    (table,) = places_tables(places)
    assert [*table.columns[0].cells] == [place.model for place in places]
    assert table.row_count == 5
