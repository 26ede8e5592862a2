import math
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.api import build
from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
from unstable_lite.config.reading import REMOVED, parse_config, read_config
from unstable_lite.config.section import Section
from unstable_lite.config.training import LoraConfig
from unstable_lite.errors import ConfigError
from unstable_lite.models import BUILTIN
from unstable_lite.planning.defaults import active_checkpoints, adapter_slots_needed
from unstable_lite.planning.plan import Plan, _opponents, load_plan, make_plan
from unstable_lite.planning.staleness import describe_games
from unstable_lite.planning.validation import find_problems, find_worker_problems
from unstable_lite.reward_transformations import STEP
from unstable_lite.tracking.run_directory import to_toml

ENV = {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
AGAINST = {**ENV, "num_actors": 1}


def problems_of(**sections: Any) -> list[str]:
    config, problems = parse_config({"train_envs": [ENV], **sections})
    assert config is not None
    return problems + find_problems(config)


def plan_of(**sections: Any) -> Plan:
    return make_plan(Config.model_validate({"train_envs": [ENV], **sections}))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_minimal_config_has_the_defaults_of_the_reference():
    config = Config.model_validate({"train_envs": [ENV]})
    learner = config.learner
    assert (learner.batch_size, learner.learning_rate, learner.gradient_clipping) == (384, 1e-5, 0.2)
    assert (config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_dropout) == (32, 32, 0)
    assert (config.engine.temperature, config.engine.max_generation_len, config.engine.max_loras) == (0.6, 4096, 8)
    assert (config.run.learning_steps, config.run.num_collection_workers, config.run.num_eval_workers) == (200, 256, 16)
    assert config.buffer_size == 768
    assert find_problems(config) == []


def names_of(transformations: Any) -> list[str]:
    return [entry if isinstance(entry, str) else entry.name for entry in transformations]


@pytest.mark.parametrize(
    ("algorithm", "kind", "final", "sampling", "largest"),
    [
        ("reinforce", "steps", ["RoleAdvantageByEnvFormatter"], ["NormalizeRewardsByEnv"], 1.5),
        ("a2c", "episodes", [], [], 0.0),
        ("ppo", "episodes", [], [], 0.0),
        ("grpo", "steps", [], [], 1.5),
        ("rloo", "steps", [], [], 1.5),
        ("json:Mine", "steps", ["RoleAdvantageByEnvFormatter"], ["NormalizeRewardsByEnv"], 1.5),
    ],
)
def test_open_keys_are_set_by_the_algorithm_and_shown(algorithm, kind, final, sampling, largest):
    group = {"group_size": 4} if algorithm in ("grpo", "rloo") else {}
    plan = plan_of(algorithm=algorithm, run=group)
    rewards = plan.config.rewards
    assert plan.config.buffer.kind == kind
    assert names_of(rewards.final_reward_transformation) == final
    assert names_of(rewards.sampling_reward_transformation) == sampling
    assert max(step.model_dump().get("reward", 0.0) for step in rewards.step_reward_transformation or ()) == largest
    assert f"sampling: {', '.join(sampling) or 'none'}" in dict(plan.describe())["rewards"]
    assert make_plan(plan.config).config == plan.config


@pytest.mark.parametrize(
    ("opponent", "hint"),
    [
        ("scripted:random", "did you mean 'fixed-scripted:random'?"),
        ("scripted:optimal", "did you mean 'fixed-scripted:optimal'?"),
        ("fixed-scripted:optimel", "did you mean 'fixed-scripted:optimal'?"),
        ("fixed-scripted:optimal", None),
        ("fixed-scripted:random", None),
        ("base", None),
        ("ckpt-2", None),
        ("shout", None),
        ("fixed-size", None),
    ],
)
def test_option_that_names_an_opponent_by_no_uid_is_refused(opponent, hint, monkeypatch):
    monkeypatch.setitem(STEP, "Bonus", lambda against, bonus=1.0: lambda player_traj, step_index, reward: reward)
    evaluated = {"env_id": "TicTacToe-v0-train", "num_players": 2}
    raw = {
        "train_envs": [AGAINST | {"fixed_opponents": ["scripted:optimal"]}],
        "eval_envs": [evaluated | {"fixed_opponent": opponent} for opponent in ("scripted:random", "base")],
        "league": {"opponent_sampling_strategy": "fixed"},
        "rewards": {"step_reward_transformation": [{"name": "Bonus", "against": opponent, "bonus": 2.0}]},
    }
    expected = [f"rewards: Bonus: against = {opponent!r} is the uid of no opponent; {hint}"] if hint else []
    assert find_problems(Config.model_validate(raw)) == expected


def test_critic_with_a_game_changing_baseline_gets_a_warning():
    """tests/integration/learning/test_optima.py shows what a critic learns with a role average and a discount."""
    final = {"final_reward_transformation": ["WinDrawLossFormatter", "RoleAdvantageFormatter"]}
    sampling = {"sampling_reward_transformation": [{"name": "NormalizeRewards", "z_score": True}]}

    def warnings(algorithm: str, gamma: float, rewards: dict[str, Any]) -> list[str]:
        rows = plan_of(algorithm=algorithm, learner={"gamma": gamma}, rewards=rewards).describe()
        return [text for what, text in rows if what == "warning" and text.startswith("rewards.")]

    for algorithm in ("a2c", "ppo"):
        (warning,) = warnings(algorithm, 0.9, final)
        assert "learner.gamma = 0.9" in warning and "RoleAdvantageFormatter" in warning
        (warning,) = warnings(algorithm, 1.0, final | sampling)
        assert "NormalizeRewards" in warning
        assert warnings(algorithm, 0.9, {}) == []
    assert warnings("reinforce", 0.9, final | sampling) == []


def test_given_rewards_are_kept_by_every_algorithm():
    rewards = {"sampling_reward_transformation": ["NormalizeRewards"], "step_reward_transformation": []}
    plan = plan_of(algorithm="a2c", rewards=rewards)
    assert names_of(plan.config.rewards.sampling_reward_transformation) == ["NormalizeRewards"]
    assert plan.config.rewards.step_reward_transformation == ()


def test_none_values_are_left_out_of_nested_tables():
    transforms = ["RewardForFormat", {"name": "mine:Transform", "bound": None, "inner": {"x": None, "y": 1}}]
    config = Config.model_validate({"train_envs": [ENV], "rewards": {"step_reward_transformation": transforms}})
    again = tomllib.loads(to_toml(config.model_dump(mode="json")))["rewards"]["step_reward_transformation"]
    assert again == ["RewardForFormat", {"name": "mine:Transform", "inner": {"y": 1}}]


def test_partial_alarm_section_keeps_the_other_defaults():
    given = {"entropy": {"action": "stop"}, "staleness": {"threshold": 3}}
    alarms = Config.model_validate({"train_envs": [ENV], "alarms": given}).alarms
    default = Config.model_validate({"train_envs": [ENV]}).alarms
    assert alarms.entropy == default.entropy.model_copy(update={"action": "stop"})
    assert alarms.staleness == default.staleness.model_copy(update={"threshold": 3})
    assert alarms.mismatch == default.mismatch


def test_every_mistake_of_form_and_meaning_is_reported_at_once(tmp_path):
    mistakes = {
        'model_nam = "x"': "'model_nam'; did you mean 'model_name'?",
        'run.learning_steps = "many"': "run.learning_steps = 'many'",
        "alarms.mismatch = { treshold = 1 }": "'alarms.mismatch.treshold'; did you mean 'threshold'?",
        "engine.max_generation_len = 9000": "engine.max_generation_len = 9000",
        '[[train_envs]]\nenv_id = "TicTacTo-v0-train"\nnum_players = 2\nnum_actors = 2': "mean 'TicTacToe-v0-train'",
        "[[train_envs]]\nnum_players = 2": "'train_envs.1.env_id'",
    }
    path = written(tmp_path, "\n".join(mistakes))
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    assert [says for says in mistakes.values() if says not in str(caught.value)] == []
    assert all(str(path) in problem for problem in caught.value.problems)


def test_build_reports_problems_of_form_and_of_meaning_together():
    envs = [TrainEnvSpec(env_id="Nimm-v0-train", num_players=2, num_actors=2)]
    with pytest.raises(ConfigError) as caught:
        build(model_name="builtin:tiny", train_envs=envs, lr=3.0)  # type: ignore[arg-type]
    assert "did you mean 'learner.learning_rate'?" in str(caught.value)
    assert "did you mean 'Nim-v0-train'" in str(caught.value)


def test_former_keys_of_a_recorded_config_are_ignored_with_one_line(tmp_path, caplog):
    table = {"run": {"loop_stall_s": 9.0}, "alarms": {"entropy": {"updates": 3}, "decline": {"updates": 1}}}
    table["branching"] = {"share": 0.5}
    path = tmp_path / "config.toml"
    path.write_text(to_toml({**table, "train_envs": [ENV]}))
    assert len(found := read_config(path)[1]) == 4
    assert "branching = {'share': 0.5} is no longer a key: examples/branching.py is an env sampler" in "".join(found)
    (tmp_path / "versions.json").touch()
    config, problems = read_config(path)
    assert config is not None and not problems
    (line,) = caplog.messages
    assert line.endswith("these keys no longer exist and are ignored: run.loop_stall_s, branching, alarms.*.updates")


def test_removed_keys_are_really_gone():
    keys = {
        f"{name}.{key}"
        for name, info in Config.model_fields.items()
        if isinstance(info.default, Section)
        for key in type(info.default).model_fields
    }
    assert not keys & REMOVED.keys()


def test_wandb_that_is_not_installed_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python then finds no such package
    assert any("wandb is not installed; pip install" in one for one in problems_of(tracker={"wandb_project": "p"}))


@pytest.mark.parametrize("section", [{"lora": {"lora_dropout": 0.1}}, {"engine": {"temperature": 1e-6}}])
def test_workers_without_training_may_have_dropout_and_any_temperature(section):
    assert find_worker_problems(Config.model_validate({"train_envs": [ENV], **section})) == []


def test_paths_become_absolute_and_may_start_with_a_tilde(monkeypatch):
    lora = LoraConfig.model_validate({"initial_lora_path": "warm_start", "initial_critic_path": "/a/critic"})
    assert lora.initial_lora_path == Path.cwd() / "warm_start"
    assert lora.initial_critic_path == Path("/a/critic")
    monkeypatch.setenv("HOME", "/home/someone")
    given: dict[str, Any] = {
        "run": {"output_dir": "~/runs"},
        "lora": {"initial_lora_path": "~/warm"},
        "train_envs": [ENV],
    }
    config, problems = parse_config(given)
    assert config is not None and not problems
    assert config.run.output_dir == Path("/home/someone/runs")
    assert config.lora.initial_lora_path == Path("/home/someone/warm")
    _, problems = parse_config({**given, "run": {"output_dir": "~no-such-user/runs"}})
    assert len(problems) == 1 and "run.output_dir" in problems[0]


def test_no_number_of_a_config_may_be_infinite():
    """The test covers every section; the free-form values of `league` and `rewards` are checked later."""
    sections = {name: info.default for name, info in Config.model_fields.items() if isinstance(info.default, Section)}
    keys = [
        (name, key)
        for name, section in sections.items()
        for key, info in type(section).model_fields.items()
        if info.annotation in (float, float | None)
    ]
    assert ("run", "game_timeout_s") in keys and ("engine", "temperature") in keys
    raw = {"train_envs": [ENV], **{name: {key: math.inf for of, key in keys if of == name} for name, _ in keys}}
    _, problems = parse_config(raw)
    assert sorted(problems) == sorted(f"{name}.{key} = inf: Input should be a finite number" for name, key in keys)


@pytest.mark.parametrize("strategy", ["fixed", {"fixed": 0.5, "mirror": 0.5}])
def test_duplicate_group_has_no_other_baseline(strategy):
    sections: dict[str, Any] = {
        "run": {"group_size": 4},
        "rewards": {"group_baseline": "duplicate"},
        "league": {"opponent_sampling_strategy": strategy, "fixed_opponents": ["scripted:random"]},
        "train_envs": [AGAINST],
    }
    assert problems_of(**sections) == []
    plan = plan_of(**sections)
    assert re.search(r"^4 games\b.*\bduplicate\b", dict(plan.describe())["groups"])
    assert "final: none" in dict(plan.describe())["rewards"] and "sampling: none" in dict(plan.describe())["rewards"]


def test_malformed_or_missing_file_gives_one_clear_message(tmp_path):
    for text, says in (("model_name = ", "not TOML"), ("\x00", "not TOML"), ("", "'train_envs'")):
        with pytest.raises(ConfigError, match=says):
            load_plan(written(tmp_path, text))
    for path in (tmp_path / "absent.toml", tmp_path, Path()):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            load_plan(path)


def test_overrides_change_any_key_and_keep_their_types(tmp_path):
    text = "algorithm = 'ppo'\n[[train_envs]]\nenv_id = 'Nim-v0-train'\nnum_players = 2\nnum_actors = 2\n"
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8-sig")  # with a byte order mark
    overrides = (
        "learner.batch_size=64",
        "learner.learning_rate=1e-3",
        "engine.kind=scripted",
        "league.opponent_sampling_strategy={mirror=1.0}",
    )
    config, problems = read_config(path, overrides)
    assert problems == []
    assert (config.algorithm, config.learner.batch_size) == ("ppo", 64)
    assert config.learner.learning_rate == 1e-3
    assert config.engine.kind == "scripted"
    assert config.league.opponent_sampling_strategy == {"mirror": 1.0}


@pytest.mark.parametrize("override", ["batch_size", "=3", "train_envs.env_id=x", "model_name.x=1"])
def test_override_of_an_unknown_key_is_refused(tmp_path, override):
    path = written(tmp_path, 'model_name = "x"\n[[train_envs]]\nenv_id = "x"\n')
    with pytest.raises(ConfigError, match="override"):
        read_config(path, (override,))


def test_plan_describes_devices_and_memory():
    plan = plan_of(engine={"kind": "scripted", "devices": ["cpu", "cpu"]})
    rows = dict(plan.describe())
    assert rows["engine-0"].startswith("scripted on the CPU")
    assert "engine-1" in rows
    assert "reinforce on the CPU" in rows["learner"]
    assert "at least 2" in rows["adapter slots"]
    assert rows["engine memory"] == "up to 1 GB for the KV cache"
    assert rows["games in flight"] == "256 training, 0 evaluation"  # without eval_envs
    assert re.fullmatch(r"about \d+ training", rows["games an update"])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, "about 8.0 training, about 2.0 evaluation; about 60 requests to endpoints"),
        ({"eval_share": 1}, "about 8.0 training, unlimited evaluation; unlimited requests to endpoints"),
        ({"num_eval_workers": 0}, "about 8.0 training; about 40 requests to endpoints"),
        ({"schedule": "sync"}, "about 8.0 training; about 40 requests to endpoints"),
    ],
)
def test_check_predicts_games_and_endpoint_requests(run, expected):
    env = {"env_id": "Nim-v0-train", "num_players": 2}
    league = {"opponent_sampling_strategy": {"fixed": 1.0}, "fixed_opponents": ["vendor/model", "scripted:random"]}
    envs = {"train_envs": [env | {"num_actors": 1}], "eval_envs": [env | {"fixed_opponent": "vendor/model"}]}
    given = {"run": {"eval_share": 0.2} | run, "learner": {"batch_size": 80}, "league": league}
    config = Config.model_validate(given | envs)
    assert describe_games(config, {"Nim-v0-train": [20]}) == expected
    assert describe_games(config, {}).startswith("at least 0.8 training")


@pytest.mark.parametrize(
    ("strategy", "num_actors", "max_loras", "active", "needed"),
    [
        ("lagged", 1, None, 8, 10),
        ("pfsp", 1, None, 6, 8),
        ("mirror", 1, 8, 1, 2),
        ("pfsp", 2, 8, 1, 2),
        ("pfsp", 1, 8, 6, 8),
        ("pfsp", 1, 99, 8, 10),
        ("lagged", 1, 10, 8, 10),
    ],
)
def test_plan_fits_the_active_checkpoints_to_the_adapter_slots(strategy, num_actors, max_loras, active, needed):
    league = {"opponent_sampling_strategy": strategy, "fixed_opponents": []}
    engine = {"max_loras": max_loras} if max_loras else {}
    plan = plan_of(train_envs=[{**ENV, "num_actors": num_actors}], league=league, engine=engine)
    if max_loras is None:
        assert plan.config.engine.max_loras == (needed if needed <= 8 else needed + 4)
        assert needed <= 8 or not any("adapter slots" in text for name, text in plan.describe() if name == "warning")
    assert (active_checkpoints(plan.config), adapter_slots_needed(plan.config)) == (active, needed)
    assert ("older checkpoints" in dict(plan.describe())) == (active > 1)


@pytest.mark.parametrize(
    ("strategy", "num_actors", "says"),
    [
        ("mirror", 1, "mirror"),
        ("lagged", 1, "lagged"),
        ("fixed", 1, "fixed, fixed ones: scripted:random"),
        ("pfsp", 1, "pfsp, fixed ones: scripted:random"),
        ({"mirror": 0.3, "fixed": 0.7}, 1, "mirror 0.3, fixed 0.7, fixed ones: scripted:random"),
        ({"mirror": 1, "lagged": {"weight": 2, "lag_range": [1, 5]}}, 1, "mirror 1, lagged 2 lag_range=[1, 5]"),
        ("mirror", 2, "mirror (not used"),
    ],
)
def test_only_opponents_that_may_be_drawn_are_listed(strategy, num_actors, says):
    league = {"opponent_sampling_strategy": strategy, "fixed_opponents": ["scripted:random"]}
    envs = [{**ENV, "num_actors": num_actors}]
    shown = _opponents(plan_of(train_envs=envs, engine={"max_loras": 16}, league=league).config)
    assert shown == says or (num_actors == 2 and "not used" in shown)


def test_chat_template_requires_a_tokenizer_that_has_one(tmp_path):
    chat = [{**ENV, "prompt_template": "chat"}]
    assert problems_of(train_envs=chat) == []
    assert any("no tokenizer" in p for p in problems_of(train_envs=chat, engine={"kind": "scripted"}))
    shutil.copytree(BUILTIN["builtin:tiny"], tmp_path, dirs_exist_ok=True)
    assert problems_of(train_envs=chat, model_name=str(tmp_path)) == []
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace("chat_template", "no_chat_template"))
    assert any("no chat template" in p for p in problems_of(train_envs=chat, model_name=str(tmp_path)))


def test_eval_env_inherits_from_the_training_env_of_the_same_id():
    played = {"prompt_template": "tiny", "max_turns": 30, "observation": "first-last", "error_allowance": 2}
    train = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2, **played}
    left_open = {"env_id": "Nim-v0-train", "num_players": 2, "fixed_opponent": "scripted:random"}
    given = {**left_open, "fixed_opponent": "scripted:optimal", "prompt_template": "default", "max_turns": 30}
    elsewhere = {**left_open, "env_id": "TicTacToe-v0-train"}
    raw = {"train_envs": [train], "eval_envs": [left_open, given, elsewhere]}
    as_objects = Config(
        train_envs=(TrainEnvSpec(**train),),
        eval_envs=tuple(EvalEnvSpec(**env) for env in (left_open, given, elsewhere)),
    )
    config = Config.model_validate(raw)
    assert as_objects == config
    inheriting, other, alone = config.eval_envs
    assert {key: getattr(inheriting, key) for key in played} == played
    assert inheriting.fixed_opponent == "scripted:random"
    assert (other.prompt_template, other.observation) == ("default", "first-last")
    assert alone == EvalEnvSpec(**elsewhere)
    assert Config.model_validate(config.model_dump()) == config
    (difference,) = [text for what, text in make_plan(config).describe() if what == "differs"]
    assert re.search(r"^Nim-v0-train .*scripted:optimal .*prompt_template = 'default'.*'tiny'", difference)
