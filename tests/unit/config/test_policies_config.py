"""Several policies in a config: each has its own settings, and slots and memory are counted for all of them."""

from typing import Any

import pytest

from fakes.handmade_adapters import fitting, write_adapter
from unstable_lite.config import Config
from unstable_lite.config.reading import parse_config, parse_toml
from unstable_lite.evaluation.plan import _env_specs
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import add_other_opponents, anchors, frozen_adapters, training_opponents
from unstable_lite.planning.defaults import (
    active_checkpoints,
    adapter_slots_needed,
    adapters_in_memory,
    changing_slots,
    holds_games,
    policy_configs,
    resolve_defaults,
)
from unstable_lite.planning.memory import learner_memory, shape_of
from unstable_lite.planning.placement import place
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.staleness import in_flight
from unstable_lite.planning.validation import find_problems
from unstable_lite.tracking.run_directory import to_toml

NIM = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}
EVALUATED = {"env_id": "Nim-v0-train", "num_players": 2}
ROLES = {key: NIM[key] for key in ("num_players", "prompt_template")} | {
    "env_id": "TicTacToe-v0-train",
    "seats": ["main", "exploiter"],
}


def config_of(main: Any = "mirror", exploiter: Any = "policy:main", **sections: Any) -> Config:
    policies = {"main": {"opponents": main}, "exploiter": {"opponents": exploiter, "share": 0.3}}
    league = {"fixed_opponents": ["scripted:random"]} | sections.pop("league", {})
    policies |= sections.pop("policies", {})
    return Config.model_validate({"train_envs": [NIM], "policies": policies, "league": league, **sections})


def test_each_policy_has_the_defaults_of_its_own_algorithm():
    learner = {"learning_rate": 2e-3}
    config = resolve_defaults(config_of(policies={"exploiter": {"algorithm": "a2c", "learner": learner, "share": 0.3}}))
    assert config.buffer.kind == "auto" and config.rewards.final_reward_transformation is None
    main, exploiter = policy_configs(config).values()
    assert (main.algorithm, main.buffer.kind, main.learner.learning_rate) == ("reinforce", "steps", 1e-5)
    assert (exploiter.algorithm, exploiter.buffer.kind, exploiter.learner.learning_rate) == ("a2c", "episodes", 2e-3)
    assert (len(main.rewards.final_reward_transformation or ()), exploiter.rewards.final_reward_transformation) == (
        1,
        (),
    )
    assert (main.run.learning_steps, exploiter.run.learning_steps) == (140, 60)


def test_run_of_one_policy_is_its_own_policy():
    config = resolve_defaults(Config.model_validate({"train_envs": [NIM], "league": {"fixed_opponents": ["base"]}}))
    assert policy_configs(config) == {"": config}


def test_config_that_a_run_records_reads_as_the_same():
    config = make_plan(config_of(train_envs=[NIM, ROLES])).config
    again, problems = parse_config(parse_toml(to_toml(config.model_dump(mode="json")).encode(), "config.toml"))
    assert (again, problems) == (config, [])
    assert make_plan(config).config == config


def test_mistake_in_a_key_of_a_policy_is_the_only_one_that_is_named():
    policies = {"main": {"opponents": "policy:exploiter"}, "exploiter": {"opponents": "policy:main", "shares": 0.3}}
    config, problems = parse_config({"train_envs": [NIM], "policies": policies})
    assert config is not None
    assert [*problems, *find_problems(config)] == ["unknown key 'policies.exploiter.shares'; did you mean 'share'?"]


def test_envs_of_a_policy_are_those_with_a_seat_for_it_and_evaluations_against_others():
    envs = [NIM, ROLES | {"num_players": 3, "seats": ["main", "exploiter", "main"]}]
    envs.append(ROLES | {"env_id": "KuhnPoker-v0-train", "seats": ["main", "main"]})
    evaluated = [EVALUATED | {"fixed_opponent": f"policy:{name}"} for name in ("main", "exploiter")]
    config = config_of(train_envs=envs, eval_envs=evaluated)
    assert [(env.num_actors, env.num_drawn) for env in config.train_envs] == [(1, 1), (3, 0), (2, 0)]
    assert [env.num_actors for env in config.of_policy("main").train_envs] == [1, 2, 2]
    assert [env.num_actors for env in config.of_policy("exploiter").train_envs] == [1, 1]
    assert [env.fixed_opponent for env in config.of_policy("main").eval_envs] == ["policy:exploiter"]


@pytest.mark.parametrize(
    ("main", "exploiter", "league", "run", "sizes", "needed", "max_loras"),
    [
        ("mirror", "policy:main", {}, {}, [1, 1], 6, 14),
        ("mirror", "policy:main", {}, {"eval_games": 2, "eval_every": 1}, [1, 1], 8, 16),
        ("lagged", "policy:main", {"opponent_lag": [1, 2]}, {}, [3, 1], 9, 17),
        ("lagged", "uniform", {"opponent_lag": [1, 2]}, {}, [3, 3], 12, 19),
        ("mirror", "policy:main/past", {"opponent_lag": [1, 2]}, {}, [3, 1], 9, 16),
        ("policy:exploiter/past", "policy:main/past", {"opponent_lag": [1, 2]}, {}, [3, 3], 12, 18),
        ("mirror", "policy:main/past", {"max_active_checkpoints": 2}, {}, [2, 2], 10, 18),
    ],
)
def test_slots_are_the_sum_over_the_policies(main, exploiter, league, run, sizes, needed, max_loras):
    evaluated = [EVALUATED | {"fixed_opponent": "policy:exploiter"}]
    plan = make_plan(config_of(main, exploiter, league=league, run=run, eval_envs=evaluated))
    config = plan.config
    assert [active_checkpoints(own) for own in policy_configs(config).values()] == sizes
    assert (active_checkpoints(config), adapter_slots_needed(config)) == (sum(sizes), needed)
    assert config.engine.max_loras == max_loras, "games of up to four updates may be in flight for each policy"
    assert {own.engine.max_loras for own in policy_configs(config).values()} == {config.engine.max_loras // 2}
    short = config_of(main, exploiter, league=league, run=run, eval_envs=evaluated, engine={"max_loras": 3})
    assert any("the league of main, exploiter needs at least" in text for text in find_problems(short))


def test_pools_divide_the_slots_that_others_leave():
    config = config_of(
        "uniform", "policy:main/past", engine={"max_loras": 9}, policies={"third": {"opponents": "pfsp"}}
    )
    assert [active_checkpoints(own) for own in policy_configs(config).values()] == [2, 1, 2]
    wide = config.changed(engine={"max_loras": 15})
    assert [active_checkpoints(own) for own in policy_configs(wide).values()] == [4, 1, 4]
    assert adapter_slots_needed(wide) == 14
    assert [active_checkpoints(own) for own in policy_configs(wide, num_frozen=2).values()] == [3, 1, 3]


def test_frozen_players_count_once_and_leave_the_rest_to_the_policies(tmp_path):
    name = f"adapter:{write_adapter(tmp_path / 'a', fitting('builtin:tiny'), base='builtin:tiny', r=4)}"
    config = make_plan(config_of("fixed", {"fixed": 1, "policy:main": 1}, league={"fixed_opponents": [name]})).config
    assert frozen_adapters(config) == [name]
    assert (adapter_slots_needed(config), config.engine.max_loras) == (5, 13)
    assert changing_slots(config) == 12
    for num_frozen, slots in ((None, 6), (3, 5)):
        main = policy_configs(config, num_frozen)["main"]
        assert changing_slots(main, num_frozen) == slots
        assert in_flight(main, {}, num_frozen).limit == 384 * (slots - 2) / 2, "steps of at most slots - 1 updates"


def test_games_hold_adapters_if_any_policy_meets_checkpoints():
    for exploiter, holds in (("mirror", False), ("policy:main", True), ("policy:main/past", True), ("lagged", True)):
        config = config_of("mirror", exploiter, league={"adapter_policy": "turn"}, run={"num_eval_workers": 0})
        assert holds_games(config) == holds
        assert not holds_games(config.of_policy("main"))


@pytest.mark.parametrize(("opponent", "holds"), [("policy:main", True), ("scripted:random", False)])
def test_evaluations_against_a_policy_hold_its_adapter(opponent, holds):
    sections = {"league": {"adapter_policy": "turn"}, "run": {"num_eval_workers": 0}}
    assert (
        holds_games(config_of("mirror", "mirror", eval_envs=[EVALUATED | {"fixed_opponent": opponent}], **sections))
        == holds
    )


def test_fixed_opponents_are_those_of_all_policies_and_no_policy_is_one():
    envs = [NIM, NIM | {"env_id": "KuhnPoker-v0-train", "fixed_opponents": ["base"]}, ROLES]
    evaluated = [EVALUATED | {"fixed_opponent": name} for name in ("policy:main", "scripted:optimal")]
    config = config_of({"policy:exploiter": 1}, "fixed", train_envs=envs, eval_envs=evaluated)
    assert training_opponents(config) == {"Nim-v0-train": ("scripted:random",), "KuhnPoker-v0-train": ("base",)}
    assert training_opponents(config.of_policy("main")) == {}
    assert anchors(config) == {"Nim-v0-train": "scripted:random", "KuhnPoker-v0-train": "base"}
    registry = ModelRegistry()
    add_other_opponents(config, registry)
    assert [meta.name for meta in registry.get_all_models().values() if meta.kind == "fixed"] == [
        "scripted:optimal",
        "scripted:random",
        "base",
    ]


def test_learner_holds_the_adapters_of_every_policy_beside_one_base():
    ppo = {"algorithm": "ppo", "learner": {"kl_coefficient": 0.1, "kl_reference": "average"}}
    config = config_of(policies={"third": ppo})
    shape = shape_of(config.model_name)
    assert shape is not None
    one, of_ppo, whole = (learner_memory(shape, each) for each in (*map(config.of_policy, ("main", "third")), config))
    assert whole.adapter == 2 * one.adapter + of_ppo.adapter > 4 * one.adapter
    assert (whole.base, whole.head, whole.kept_per_token) == (one.base, one.head, one.kept_per_token)
    small, large = (place(each)._least("cpu") for each in (config.changed(policies={}), config))
    assert small is not None and large is not None
    assert large[1] - small[1] == whole.adapter - one.adapter
    assert adapters_in_memory(config) == config.engine.max_loras + 3 * 2 + 9 * 4


def test_check_describes_each_policy():
    learner = {"learning_rate": 2e-3, "batch_size": 96}
    exploiter = {"algorithm": "a2c", "learner": learner, "share": 0.3, "opponents": {"policy:main/past": 1, "fixed": 1}}
    plan = make_plan(config_of(policies={"exploiter": exploiter}, engine={"max_loras": 24}))
    rows = list(plan.describe())
    main, other = (text for name, text in rows if name == "policy")
    assert main == "main: 70% of the updates, about 140; against mirror; 7 older checkpoints"
    assert other == (
        "exploiter: 30% of the updates, about 60; against policy:main/past 1, fixed 1, fixed ones: scripted:random; "
        "a2c; learner.learning_rate = 0.002; learner.batch_size = 96"
    )
    for name in ("back-pressure", "games an update", "buffer", "rewards"):
        assert [text.partition(":")[0] for row, text in rows if row == name] == ["main", "exploiter"]
    assert dict(rows)["a further policy"].startswith("4.4 MiB more in the learner")
    assert dict(rows)["learner"].startswith("reinforce and a2c on the CPU")
    assert [text for name, text in rows if name == "warning" and "no other policy plays it" in text] == [
        "policies.exploiter: no other policy plays it; name 'policy:exploiter' in the opponents of another or as "
        "fixed_opponent of an eval env, or give it a seat"
    ]


def without_a_game(config: Config) -> list[str]:
    """Return the policies that `check` says no other one plays."""
    warnings = [text for name, text in make_plan(config).describe() if name == "warning"]
    return [text.partition(":")[0].removeprefix("policies.") for text in warnings if "no other policy plays it" in text]


def test_policy_is_played_by_seats_evaluations_and_as_a_kept_player_but_not_by_opponents_that_no_env_draws():
    kept = {"exploiter": {"opponents": "policy:main", "restart": {"at_updates": 5}}}
    assert without_a_game(config_of("population", policies=kept)) == []
    assert without_a_game(config_of(train_envs=[NIM, ROLES])) == []
    assert without_a_game(config_of(eval_envs=[EVALUATED | {"fixed_opponent": "policy:exploiter"}])) == []
    both = [NIM | {"num_actors": 2}]
    assert without_a_game(config_of("policy:exploiter", train_envs=both)) == ["main", "exploiter"]
    apart = [env | {"num_actors": 2, "seats": [name] * 2} for env, name in ((NIM, "main"), (ROLES, "exploiter"))]
    assert without_a_game(config_of(train_envs=apart)) == ["main", "exploiter"]


def test_check_says_how_many_updates_a_policy_has_if_its_schedule_spans_a_lineage():
    rule = {"opponents": "policy:main", "share": 0.5, "restart": {"at_updates": 5}}
    texts = [text for name, text in make_plan(config_of(policies={"exploiter": rule})).describe() if name == "policy"]
    assert texts[1].startswith("exploiter: 50% of the updates, about 100;")


@pytest.mark.parametrize("name", ["main", "exploiter"])
@pytest.mark.parametrize(("rule", "is_reached"), [({"at_updates": 99}, True), ({"at_updates": 100}, False)])
def test_check_warns_of_a_restart_that_the_policy_does_not_reach(name, rule, is_reached):
    policies = {"exploiter": {"opponents": "policy:main", "share": 0.5}, "main": {"opponents": "mirror"}}
    policies[name]["restart"] = rule
    texts = [text for name, text in make_plan(config_of(policies=policies)).describe() if name == "warning"]
    said = f"policies.{name}.restart.at_updates = 100: the policy makes only 100 updates"
    assert any(text.startswith(said) for text in texts) != is_reached


def test_check_predicts_games_and_slots_of_all_policies():
    config = config_of(learner={"batch_size": 64}, engine={"max_loras": 8})
    slots = {own.engine.max_loras for own in policy_configs(config).values()}
    assert (slots, config.buffer.max_staleness) == ({4}, 8)
    rows = list(make_plan(config).describe())
    loaded = [int(text.split()[2]) for name, text in rows if name == "adapters loaded"]
    games = [int(text.split()[2]) for name, text in rows if name == "back-pressure"]
    alone = dict(make_plan(config.of_policy("main")).describe())
    assert 0 < games[0] < int(alone["back-pressure"].split()[1]), "each policy has half of the slots"
    warnings = [text for name, text in rows if name == "warning"]
    assert sum("with engine.max_loras = 18 more could be in flight" in text for text in warnings) == 2
    assert any(f"opponents will need {sum(loaded)} adapter slots" in text for text in warnings)


def test_micro_batch_is_limited_by_the_steps_of_a_batch_if_all_policies_learn_from_steps():
    learner = {"batch_size": 2}
    sections = {"learner": learner, "engine": {"max_model_len": 512, "max_generation_len": 16}}
    assert place(config_of(**sections))._largest_micro_batch() == (1024, 512)
    assert place(config_of(**sections, policies={"third": {"algorithm": "a2c"}}))._largest_micro_batch()[0] == 16384


def test_shares_above_one_are_the_only_problem():
    (problem,) = find_problems(
        config_of(policies={"main": {"share": 0.9, "opponents": "mirror"}, "third": {"opponents": "pfsp"}})
    )
    assert problem == "policies: the shares sum to 1.2; let all of them sum to 1, or leave one out to take the rest"


def test_baselines_of_a_policy_with_a_critic_get_a_warning():
    rewards = {"sampling_reward_transformation": ["NormalizeRewards"]}
    config = config_of(policies={"third": {"algorithm": "a2c", "opponents": "mirror"}}, rewards=rewards)
    texts = [text for name, text in make_plan(config).describe() if name == "warning" and "NormalizeRewards" in text]
    assert [text.partition(":")[0] for text in texts] == ["policies.third"]


def test_env_with_seats_is_evaluated_as_it_is_trained():
    (spec,) = _env_specs(config_of(train_envs=[ROLES]), [])
    assert (spec.env_id, spec.num_players) == ("TicTacToe-v0-train", 2)
