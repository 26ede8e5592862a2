from __future__ import annotations

import importlib.util
import math
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.api import build
from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, TrainEnvSpec
from unstable_lite.config.reading import parse_config, read_config
from unstable_lite.config.section import Section
from unstable_lite.config.training import LoraConfig
from unstable_lite.errors import ConfigError
from unstable_lite.models import BUILTIN
from unstable_lite.planning.adapter_slots import active_checkpoints, adapter_slots_needed
from unstable_lite.planning.plan import load_plan, make_plan
from unstable_lite.planning.validation import find_problems, find_worker_problems
from unstable_lite.tracking.run_directory import to_toml

ENV = {"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
EVAL_ENV = {
    "env_id": "TicTacToe-v0-train",
    "num_players": 2,
    "prompt_template": "tiny",
    "fixed_opponent": "scripted:random",
}


AGAINST = {**ENV, "num_actors": 1}
DUPLICATE: dict[str, Any] = {
    "run": {"group_size": 4},
    "rewards": {"group_baseline": "duplicate"},
    "league": {"opponent_sampling_strategy": "fixed", "fixed_opponents": ["scripted:random"]},
    "train_envs": [AGAINST],
}
NO_BASELINE = {"final_reward_transformation": [], "sampling_reward_transformation": []}


def problems_of(**sections: Any) -> list[str]:
    config, problems = parse_config({"train_envs": [ENV], **sections})
    assert config is not None
    return problems + find_problems(config)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_minimal_config_has_the_defaults_of_the_reference() -> None:
    config = Config.model_validate({"train_envs": [ENV]})
    assert (config.learner.batch_size, config.learner.learning_rate, config.learner.gradient_clipping) == (
        384,
        1e-5,
        0.2,
    )
    assert (config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_dropout) == (32, 32, 0)
    assert (config.engine.temperature, config.engine.max_generation_len, config.engine.max_loras) == (0.6, 4096, 8)
    assert (config.run.learning_steps, config.run.num_collection_workers, config.run.num_eval_workers) == (200, 256, 16)
    assert config.buffer_size == 768
    assert find_problems(config) == []


def names_of(transformations: Any) -> list[str]:
    return [entry if isinstance(entry, str) else entry.name for entry in transformations]


@pytest.mark.parametrize(
    ("algorithm", "kind", "final", "sampling"),
    [
        ("reinforce", "steps", ["RoleAdvantageByEnvFormatter"], ["NormalizeRewardsByEnv"]),
        ("a2c", "episodes", [], []),
        ("ppo", "episodes", [], []),
        ("grpo", "steps", [], []),
        ("rloo", "steps", [], []),
        ("json:Mine", "steps", ["RoleAdvantageByEnvFormatter"], ["NormalizeRewardsByEnv"]),
    ],
)
def test_open_keys_are_set_by_the_algorithm_and_shown(
    algorithm: str, kind: str, final: list[str], sampling: list[str]
) -> None:
    group = {"group_size": 4} if algorithm in ("grpo", "rloo") else {}
    plan = make_plan(Config.model_validate({"train_envs": [ENV], "algorithm": algorithm, "run": group}))
    rewards = plan.config.rewards
    assert plan.config.buffer.kind == kind
    assert names_of(rewards.final_reward_transformation) == final
    assert names_of(rewards.sampling_reward_transformation) == sampling
    assert f"sampling: {', '.join(sampling) or 'none'}" in dict(plan.describe())["rewards"]
    assert make_plan(plan.config).config == plan.config


def test_critic_with_a_game_changing_baseline_gets_a_warning() -> None:
    """tests/integration/learning/test_optima.py shows what a critic learns with a role average and a discount."""
    final = {"final_reward_transformation": ["WinDrawLossFormatter", "RoleAdvantageFormatter"]}
    sampling = {"sampling_reward_transformation": [{"name": "NormalizeRewards", "z_score": True}]}

    def warnings(algorithm: str, gamma: float, rewards: dict[str, Any]) -> list[str]:
        raw = {"train_envs": [ENV], "algorithm": algorithm, "learner": {"gamma": gamma}, "rewards": rewards}
        rows = make_plan(Config.model_validate(raw)).describe()
        return [text for what, text in rows if what == "warning" and text.startswith("rewards.")]

    for algorithm in ("a2c", "ppo"):
        (warning,) = warnings(algorithm, 0.9, final)
        assert "learner.gamma = 0.9" in warning and "RoleAdvantageFormatter" in warning
        (warning,) = warnings(algorithm, 1.0, final | sampling)
        assert "NormalizeRewards" in warning
        assert warnings(algorithm, 0.9, {}) == []
    assert warnings("reinforce", 0.9, final | sampling) == []


def test_critic_algorithms_pay_no_step_rewards_by_default() -> None:
    for algorithm, largest in (("reinforce", 1.5), ("a2c", 0.0)):
        plan = make_plan(Config.model_validate({"train_envs": [ENV], "algorithm": algorithm}))
        steps = [entry.model_dump() for entry in plan.config.rewards.step_reward_transformation or ()]
        assert max(step.get("reward", 0.0) for step in steps) == largest


def test_explicit_transformation_wins() -> None:
    rewards = {"sampling_reward_transformation": ["NormalizeRewards"], "step_reward_transformation": []}
    plan = make_plan(Config.model_validate({"train_envs": [ENV], "algorithm": "a2c", "rewards": rewards}))
    assert names_of(plan.config.rewards.sampling_reward_transformation) == ["NormalizeRewards"]
    assert plan.config.rewards.step_reward_transformation == ()


def test_none_values_are_left_out_of_nested_tables() -> None:
    transforms = ["RewardForFormat", {"name": "mine:Transform", "bound": None, "inner": {"x": None, "y": 1}}]
    config = Config.model_validate({"train_envs": [ENV], "rewards": {"step_reward_transformation": transforms}})
    again = tomllib.loads(to_toml(config.model_dump(mode="json")))["rewards"]["step_reward_transformation"]
    assert again == ["RewardForFormat", {"name": "mine:Transform", "inner": {"y": 1}}]


def test_config_survives_the_way_to_a_worker() -> None:
    config = Config.model_validate({"train_envs": [ENV], "eval_envs": [EVAL_ENV]})
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_partial_alarm_section_keeps_the_other_defaults() -> None:
    given = {"entropy": {"action": "stop"}, "staleness": {"threshold": 3}}
    alarms = Config.model_validate({"train_envs": [ENV], "alarms": given}).alarms
    default = Config.model_validate({"train_envs": [ENV]}).alarms
    assert alarms.entropy == default.entropy.model_copy(update={"action": "stop"})
    assert alarms.staleness == default.staleness.model_copy(update={"threshold": 3})
    assert alarms.mismatch == default.mismatch


def test_every_mistake_of_form_and_meaning_is_reported_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        model_nam = "x"
        [run]
        learning_steps = "many"
        [lora]
        lora_rnak = 8
        [buffer]
        buffer_size = 10
        [alarms]
        entropi = { threshold = 1 }
        mismatch = { treshold = 1 }
        staleness = { action = "wran" }
        [engine]
        max_generation_len = 9000
        [[train_envs]]
        env_id = "TicTacTo-v0-train"
        num_players = 2
        num_actors = 2
        prompt_template = "quen3-zs"
        [[train_envs]]
        num_players = 2
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    text = str(caught.value)
    for part in (
        "'model_nam'; did you mean 'model_name'?",
        "run.learning_steps = 'many'",
        "'lora.lora_rnak'; did you mean 'lora_rank'?",
        "'alarms.entropi'; did you mean 'entropy'?",
        "'alarms.mismatch.treshold'; did you mean 'threshold'?",
        "alarms.staleness.action = 'wran'",
        "buffer.buffer_size = 10",
        "engine.max_generation_len = 9000",
        "did you mean 'TicTacToe-v0-train'",
        "did you mean 'qwen3-zs'?",
        "'train_envs.1.env_id'",
    ):
        assert part in text
    assert all(str(path) in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("sections", "meant"),
    [
        ({"batch_size": 4}, "learner.batch_size"),
        ({"run": {"temperature": 1.0}}, "engine.temperature"),
        ({"lr": 3.0}, "learner.learning_rate"),
        ({"learner": {"lr": 3.0}}, "learning_rate"),
    ],
)
def test_unknown_key_may_stand_for_one_of_another_section(sections: dict[str, Any], meant: str) -> None:
    _, problems = parse_config({"train_envs": [ENV], **sections})
    assert len(problems) == 1 and problems[0].endswith(f"; did you mean {meant!r}?")


def test_build_reports_problems_of_form_and_of_meaning_together() -> None:
    envs = [TrainEnvSpec(env_id="Nimm-v0-train", num_players=2, num_actors=2)]
    with pytest.raises(ConfigError) as caught:
        build(model_name="builtin:tiny", train_envs=envs, lr=3.0)  # type: ignore[arg-type]
    assert "did you mean 'learner.learning_rate'?" in str(caught.value)
    assert "did you mean 'Nim-v0-train'" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "instead"),
    [
        ("run", "mode", "sync", r"run\.schedule .*engine\.when_shared"),
        ("learner", "gradient_checkpointing", False, r"learner\.activation_checkpointing"),
        ("learner", "use_trainer_cache", True, "remove it"),
    ],
)
def test_former_key_is_refused_with_the_new_one(section: str, key: str, value: object, instead: str) -> None:
    config, problems = parse_config({"train_envs": [ENV], section: {key: value}})
    assert config is not None and len(problems) == 1
    assert re.search(rf"^{section}\.{key} = .*{instead}", problems[0])


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"engine": {"top_p": 0.95}}, "engine.top_p = 0.95"),
        ({"engine": {"temperature": 0.009}}, "engine.temperature = 0.009"),
        (
            {"league": {"opponent_sampling_strategy": {"mirror": 1, "fixed": math.inf}}},
            "the weight of 'fixed' is inf",
        ),
        (
            {"league": {"env_sampling_strategy": {"weighted": {"weights": {ENV["env_id"]: math.inf}}}}},
            f"the weight of {ENV['env_id']!r} is inf",
        ),
        (
            {"league": {"opponent_sampling_strategy": {"pfsp": {"prior_games": math.nan}}}},
            "prior_games = nan",
        ),
        (
            {"rewards": {"step_reward_transformation": [{"name": "RewardForFormat", "reward": -math.inf}]}},
            "'RewardForFormat': reward = -inf",
        ),
        ({"engine": {"max_loras": 1}}, "at least 2 adapter slots"),
        ({"engine": {"kind": "vlm"}}, "did you mean 'vllm'?"),
        ({"engine": {"kind": "no_such_module:Engine"}}, "no module 'no_such_module'"),
        ({"algorithm": "reinforc"}, "did you mean 'reinforce'?"),
        ({"model_name": "builtin:tinny"}, "built-in models are builtin:tiny"),
        ({"model_name": "./nowhere"}, "no config.json"),
        ({"run": {"eval_games": 10}}, "eval_envs"),
        ({"run": {"eval_every": 10}}, "run.eval_every needs run.eval_games"),
        ({"run": {"output_dir": __file__ + "/out"}}, "run.output_dir"),
        ({"run": {"name": "ablations/no-kl"}}, "run.name = 'ablations/no-kl'"),
        ({"run": {"name": "two\nlines"}}, "run.name = 'two\\nlines'"),
        ({"run": {"name": "nul\0"}}, "control character"),
        ({"run": {"name": "../up"}}, "slash"),
        ({"run": {"name": ".hidden"}}, "dot"),
        ({"lora": {"initial_lora_path": "/nowhere"}}, "adapter_model.safetensors"),
        ({"league": {"env_sampling_strategy": "randm"}}, "'random'"),
        ({"league": {"env_sampling_strategy": ""}}, "env_sampling_strategy"),
        ({"league": {"opponent_sampling_strategy": ""}}, "opponent_sampling_strategy"),
        ({"rewards": {"step_reward_transformation": ["RewardForFormt"]}}, "'RewardForFormat'"),
        ({"eval_envs": [{**EVAL_ENV, "fixed_opponent": "scripted:perfect"}]}, "scripted:random"),
        ({"eval_envs": [{**EVAL_ENV, "env_id": "Othello-v0-train"}]}, "Othello"),
        ({"train_envs": [{**ENV, "max_turns": 0}]}, "train_envs.0: max_turns = 0"),
        ({"eval_envs": [{**EVAL_ENV, "max_turns": -3}]}, "eval_envs.0: max_turns = -3"),
        ({"train_envs": [{**ENV, "num_players": 0, "num_actors": 0}]}, "num_actors = 0"),
        ({"train_envs": [{**ENV, "num_actors": -1}]}, "num_actors = -1"),
        ({"eval_envs": [{**EVAL_ENV, "num_players": 0}]}, "num_players = 0"),
        (
            {"buffer": {"batch_delay_buffer": 2.5}},
            "learner.batch_size = 384",
        ),
        ({"run": {"group_size": 4}}, "rewards.group_baseline"),
        ({"rewards": {**NO_BASELINE, "group_baseline": "grpo"}}, "run.group_size = 1"),
        (
            {
                "run": {"group_size": 4},
                "rewards": {"group_baseline": "grpo", "sampling_reward_transformation": ["NormalizeRewardsByEnv"]},
            },
            "NormalizeRewardsByEnv is a baseline",
        ),
        (
            {"run": {"group_size": 900}, "rewards": {**NO_BASELINE, "group_baseline": "grpo"}},
            "buffer.buffer_size = 768",
        ),
        (
            {"algorithm": "a2c", "run": {"group_size": 4}, "rewards": {"group_baseline": "grpo"}},
            "critic",
        ),
        ({**DUPLICATE, "run": {"group_size": 3}}, "run.group_size = 3 must be even"),
        ({**DUPLICATE, "run": {}}, "run.group_size = 1"),
        ({**DUPLICATE, "train_envs": [ENV]}, "num_actors = 2 gives it both seats of TicTacToe-v0-train"),
        (
            {**DUPLICATE, "train_envs": [AGAINST, {**AGAINST, "env_id": "LiarsDice-v0-train", "num_players": 3}]},
            "train_envs.1: LiarsDice-v0-train has 3",
        ),
        ({**DUPLICATE, "league": {"opponent_sampling_strategy": "mirror"}}, "'mirror' gives the policy both seats"),
        ({**DUPLICATE, "algorithm": "a2c"}, "a2c uses the critic as baseline"),
        ({**DUPLICATE, "algorithm": "grpo"}, "'duplicate' contradicts algorithm = 'grpo'"),
        (
            {
                **DUPLICATE,
                "rewards": {
                    "group_baseline": "duplicate",
                    "final_reward_transformation": ["RoleAdvantageByEnvFormatter"],
                },
            },
            "RoleAdvantageByEnvFormatter is a baseline",
        ),
        ({"algorithm": "a2c", "buffer": {"kind": "steps"}}, "a2c learns from episodes"),
        ({"buffer": {"kind": "episodes"}}, "reinforce learns from steps"),
        ({"lora": {"initial_critic_path": "/nowhere"}}, "reinforce has no critic"),
        (
            {"algorithm": "ppo", "lora": {"initial_critic_path": "/nowhere"}},
            "lora.initial_critic_path",
        ),
        ({"learner": {"options": {"clip_high": 0.28}}}, "learner.options"),
        *(
            ({"algorithm": algorithm, "lora": {"lora_dropout": 0.1}}, "lora_dropout")
            for algorithm in ("reinforce", "a2c", "ppo")
        ),
        ({"lora": {"target_modules": ["q_proj", "lm_head"]}}, "lora.target_modules: 'lm_head'"),
        ({"algorithm": "ppo", "learner": {"ppo_minibatches": 500}}, "ppo_minibatches"),
        pytest.param(
            {"learner": {"optimizer": "adamw8bit"}},
            "bitsandbytes is not installed",
            marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is installed"),
        ),
        (
            {
                "train_envs": [{**ENV, "num_actors": 1}],
                "league": {"opponent_sampling_strategy": {"lagged": 1.0}, "opponent_lag": [1, 9]},
            },
            "at least 12 adapter slots",
        ),
        (
            {
                "train_envs": [{**ENV, "num_actors": 1}],
                "league": {"opponent_sampling_strategy": "uniform", "max_active_checkpoints": 1},
            },
            "max_active_checkpoints = 1",
        ),
        (
            {
                "league": {"max_active_checkpoints": 5},
                "engine": {"max_loras": 7},
                "run": {"eval_games": 2, "eval_every": 1},
                "eval_envs": [EVAL_ENV],
            },
            "at least 8 adapter slots",
        ),
        ({"alarms": {"identical": {"threshold": 1.0}}}, "alarms.identical.threshold = 1"),
        ({"alarms": {"staleness": {"threshold": -1}}}, "alarms.staleness.threshold = -1"),
        ({"alarms": {"starved": {"threshold": 0}}}, "alarms.starved.threshold = 0"),
        ({"alarms": {"skipped": {"updates": 2}}}, "alarms.skipped.updates"),
    ],
)
def test_impossible_config_is_refused_with_the_key(sections: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in problems_of(**sections)), problems_of(**sections)


def test_wandb_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python then finds no such package
    assert any("wandb is not installed; pip install" in one for one in problems_of(tracker={"wandb_project": "p"}))
    assert problems_of(tracker={"wandb_project": ""}) == []


def test_fine_tuning_and_custom_algorithms_may_use_dropout() -> None:
    lora = {"lora_dropout": 0.1}
    fine_tuning = find_worker_problems(Config.model_validate({"train_envs": [ENV], "lora": lora}))
    assert not any("lora_dropout" in problem for problem in [*fine_tuning, *problems_of(lora=lora, algorithm="a:B")])


@pytest.mark.parametrize("name", ["", "lr=1e-5, seed 3", "größer", "v1.2_[b]"])
def test_run_name_may_be_any_valid_directory_name(name: str) -> None:
    assert problems_of(run={"name": name}) == []


@pytest.mark.parametrize("content", ['{"hidden_si', "[]", "\ufffe"])
def test_truncated_model_or_tokenizer_config_is_reported(tmp_path: Path, content: str) -> None:
    chat = {**ENV, "prompt_template": "mine"}
    sections: dict[str, Any] = {"train_envs": [chat], "templates": {"mine": {"user": "{observation}", "chat": True}}}
    (tmp_path / "config.json").write_text(content)
    problems = problems_of(model_name=str(tmp_path), run={"name": "a/b"}, **sections)
    assert [problem for problem in problems if problem.startswith(f"{tmp_path}/config.json ")]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert any(
        str(tmp_path / "tokenizer_config.json") in one for one in problems_of(model_name=str(tmp_path), **sections)
    )


def test_warm_start_paths_become_absolute() -> None:
    lora = LoraConfig.model_validate({"initial_lora_path": "warm_start", "initial_critic_path": "/a/critic"})
    assert lora.initial_lora_path == Path.cwd() / "warm_start"
    assert lora.initial_critic_path == Path("/a/critic")


def test_any_temperature_is_allowed_without_training() -> None:
    config = Config.model_validate({"train_envs": [ENV], "engine": {"temperature": 1e-6}})
    assert find_worker_problems(config) == []


def test_no_number_of_a_config_may_be_infinite() -> None:
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


def test_top_p_below_one_can_be_forced() -> None:
    assert problems_of(engine={"top_p": 0.95, "allow_top_p": True}) == []


def test_envs_with_equal_metric_names_are_refused() -> None:
    wider = {**ENV, "prompt_template": "default"}
    (problem,) = problems_of(train_envs=[ENV, wider])
    assert problem.startswith(f"train_envs: {ENV['env_id']} ")
    evaluated = {"env_id": ENV["env_id"], "num_players": 2, "prompt_template": "tiny"}
    against = [{**evaluated, "fixed_opponent": name} for name in ("scripted:random", "scripted:optimal")]
    assert problems_of(eval_envs=against) == []
    (problem,) = problems_of(eval_envs=[*against, {**against[0], "prompt_template": "default"}])
    assert problem.startswith(f"eval_envs: {ENV['env_id']} against scripted:random ")


def test_valid_group_has_no_problems() -> None:
    sections = {"run": {"group_size": 4}, "rewards": {**NO_BASELINE, "group_baseline": "rloo"}}
    assert problems_of(**sections) == []
    plan = make_plan(Config.model_validate({"train_envs": [ENV], **sections}))
    assert re.search(r"^4 games\b.*\brloo\b", dict(plan.describe())["groups"])


@pytest.mark.parametrize("strategy", ["fixed", {"fixed": 0.5, "mirror": 0.5}])
def test_duplicate_group_has_no_problems_and_no_other_baseline(strategy: object) -> None:
    sections = DUPLICATE | {"league": {**DUPLICATE["league"], "opponent_sampling_strategy": strategy}}
    assert problems_of(**sections) == []
    plan = make_plan(Config.model_validate(sections))
    assert re.search(r"^4 games\b.*\bduplicate\b", dict(plan.describe())["groups"])
    assert "final: none" in dict(plan.describe())["rewards"] and "sampling: none" in dict(plan.describe())["rewards"]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_group_algorithms_need_groups_and_have_their_own_baseline(algorithm: str) -> None:
    assert any(f"algorithm = {algorithm!r}" in p for p in problems_of(algorithm=algorithm))
    sections = {"algorithm": algorithm, "run": {"group_size": 4}}
    config, _ = parse_config({"train_envs": [ENV], **sections})
    assert config is not None
    assert config.group_baseline == algorithm
    contradiction = {"group_baseline": "rloo" if algorithm == "grpo" else "grpo"}
    assert any("group_baseline" in problem for problem in problems_of(**sections, rewards=contradiction))


def test_named_opponent_is_refused_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    sections = {"eval_envs": [{**EVAL_ENV, "fixed_opponent": "google/gemini-2.0-flash-lite-001"}]}
    assert any("OPENROUTER_API_KEY" in problem for problem in problems_of(**sections))
    monkeypatch.setenv("OPENROUTER_API_KEY", "secret")
    assert problems_of(**sections) == []


def test_paths_may_start_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_config_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        "algorithm = 'ppo'\n[[train_envs]]\nenv_id = 'Nim-v0-train'\nnum_players = 2\nnum_actors = 1\n",
        encoding="utf-8-sig",
    )
    config, _ = read_config(path)
    assert config is not None and config.algorithm == "ppo"


@pytest.mark.parametrize(("text", "says"), [("model_name = ", "not TOML"), ("\x00", "not TOML"), ("", "'train_envs'")])
def test_malformed_file_gives_one_clear_message(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_plan(written(tmp_path, text))


def test_missing_file_or_directory_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_plan(path)


def test_overrides_change_any_key_and_keep_their_types(tmp_path: Path) -> None:
    path = written(tmp_path, '[[train_envs]]\nenv_id = "TicTacToe-v0-train"\nnum_players = 2\nnum_actors = 2\n')
    overrides = (
        "learner.batch_size=64",
        "learner.learning_rate=1e-3",
        "engine.kind=scripted",
        "league.opponent_sampling_strategy={mirror=1.0}",
    )
    config, problems = read_config(path, overrides)
    assert config is not None
    assert problems == []
    assert config.learner.batch_size == 64
    assert config.learner.learning_rate == 1e-3
    assert config.engine.kind == "scripted"
    assert config.league.opponent_sampling_strategy == {"mirror": 1.0}


@pytest.mark.parametrize("override", ["batch_size", "=3", "train_envs.env_id=x", "model_name.x=1"])
def test_override_of_an_unknown_key_is_refused(tmp_path: Path, override: str) -> None:
    path = written(tmp_path, 'model_name = "x"\n[[train_envs]]\nenv_id = "x"\n')
    with pytest.raises(ConfigError, match="override"):
        read_config(path, (override,))


def test_plan_describes_devices_and_memory() -> None:
    plan = make_plan(
        Config.model_validate({"train_envs": [ENV], "engine": {"kind": "scripted", "devices": ["cpu", "cpu"]}})
    )
    rows = dict(plan.describe())
    assert rows["engine-0"].startswith("scripted on the CPU")
    assert "engine-1" in rows
    assert "reinforce on the CPU" in rows["learner"]
    assert "at least 2" in rows["adapter slots"]
    assert rows["engine memory"] == "up to 1 GB for the KV cache"
    assert rows["games in flight"] == "256 training, 0 evaluation"  # without eval_envs


@pytest.mark.parametrize(
    ("strategy", "num_actors", "max_loras", "active", "needed"),
    [
        ("mirror", 1, 8, 1, 2),
        ("pfsp", 2, 8, 1, 2),
        ("pfsp", 1, 8, 6, 8),
        ("pfsp", 1, 99, 8, 10),
        ("lagged", 1, 10, 8, 10),
    ],
)
def test_plan_fits_the_active_checkpoints_to_the_adapter_slots(
    strategy: str, num_actors: int, max_loras: int, active: int, needed: int
) -> None:
    plan = make_plan(
        Config.model_validate(
            {
                "train_envs": [{**ENV, "num_actors": num_actors}],
                "league": {"opponent_sampling_strategy": strategy, "fixed_opponents": []},
                "engine": {"max_loras": max_loras},
            }
        )
    )
    assert (active_checkpoints(plan.config), adapter_slots_needed(plan.config)) == (active, needed)
    assert ("older checkpoints" in dict(plan.describe())) == (active > 1)


def test_unused_opponent_strategy_is_reported() -> None:
    plan = make_plan(Config.model_validate({"train_envs": [ENV], "league": {"opponent_sampling_strategy": "mirror"}}))
    assert "not used" in plan.opponents()


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("mirror", "mirror"),
        ("lagged", "lagged"),
        ("fixed", "fixed, fixed ones: scripted:random"),
        ("pfsp", "pfsp, fixed ones: scripted:random"),
    ],
)
def test_only_opponents_that_may_be_drawn_are_listed(strategy: str, says: str) -> None:
    league = {"opponent_sampling_strategy": strategy, "fixed_opponents": ["scripted:random"]}
    sections = {"train_envs": [{**ENV, "num_actors": 1}], "engine": {"max_loras": 16}}
    assert make_plan(Config.model_validate({**sections, "league": league})).opponents() == says


def test_chat_template_requires_a_tokenizer_that_has_one(tmp_path: Path) -> None:
    chat = [{**ENV, "prompt_template": "chat"}]
    assert problems_of(train_envs=chat) == []
    assert any("no tokenizer" in p for p in problems_of(train_envs=chat, engine={"kind": "scripted"}))
    for file in BUILTIN["builtin:tiny"].glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    assert problems_of(train_envs=chat, model_name=str(tmp_path)) == []
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace("chat_template", "no_chat_template"))
    assert any("no chat template" in p for p in problems_of(train_envs=chat, model_name=str(tmp_path)))


def test_custom_templates_and_extractions_are_checked_with_the_rest(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [templates.mine]
        user = "{observaton}"
        [templates.other]
        usr = "{observation}"
        [[train_envs]]
        env_id = "Nim-v0-train"
        num_players = 2
        num_actors = 2
        prompt_template = "mine"
        action_extraction_fn = "no_such_module:f"
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load_plan(path)
    text = str(caught.value)
    for says in (
        "'templates.other.usr'",
        "templates.mine.user: ",
        "{observaton}",
        "'no_such_module'",
    ):
        assert says in text, text
    assert "prompt_template = 'mine'" not in text


@pytest.mark.parametrize(
    ("opponents", "says"),
    [
        ({"max_usd": 5}, "opponents.max_usd"),
        ({"base_url": "api.example.com"}, "opponents.base_url"),
        *(
            ({"base_url": url}, "OPENAI_API_KEY")
            for url in ("https://me:key@example.com/v1", "https://example.com/v1?key=k", "https://example.com/v1#k")
        ),
        ({"pause_s": 1000}, "opponents.max_pause_s"),
        ({"api_key": "sk"}, "'opponents.api_key'"),
        ({"max_requests": 0}, "opponents.max_requests = 0"),
    ],
)
def test_invalid_limits_and_endpoints_of_opponents_are_refused(opponents: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in problems_of(opponents=opponents)), problems_of(opponents=opponents)


def test_eval_env_inherits_from_the_training_env_of_the_same_id() -> None:
    played = {"prompt_template": "tiny", "max_turns": 30, "observation": "first-last"}
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
