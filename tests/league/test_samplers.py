import json
import random
from collections import Counter

import pytest

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import (
    BaseModelSampler,
    FixedOpponentModelSampler,
    LaggedModelSampler,
    MirrorModelSampler,
    MixtureModelSampler,
    NoOpponentModelSampler,
    UniformRandomEnvSampler,
    build_env_sampler,
    build_model_sampler,
    check_league,
)
from unstable_lite.types import EvalEnvSpec, TrainEnvSpec

TRAIN = [TrainEnvSpec(env_id=env_id, num_players=2, num_actors=2) for env_id in "ABC"]
EVAL = [EvalEnvSpec(env_id=env_id, num_players=2) for env_id in "XY"]


def a_registry(num_checkpoints=0, fixed=()):
    registry = ModelRegistry()
    for n in range(1, num_checkpoints + 1):
        registry.add_checkpoint(f"ckpt-{n}", n, n)
    for name in fixed:
        registry.add_fixed(name)
    return registry


def a_config(num_actors=2, **league):
    env = {"env_id": "A", "num_players": 2, "num_actors": num_actors}
    return Config.model_validate({"train_envs": [env], "league": league})


def drawn(sampler, n=2000):
    return Counter(sampler.sample_opponent().uid for _ in range(n))


# envs


def test_envs_are_drawn_uniformly():
    sampler = UniformRandomEnvSampler(TRAIN, EVAL)
    counts = Counter(sampler.sample("train").env_id for _ in range(3000))
    assert set(counts) == set("ABC")
    assert all(abs(count - 1000) < 150 for count in counts.values())
    assert {sampler.sample("eval").env_id for _ in range(100)} == set("XY")


def test_evaluations_do_not_change_what_is_trained_on():
    alone, beside = UniformRandomEnvSampler(TRAIN, EVAL), UniformRandomEnvSampler(TRAIN, EVAL)
    for _ in range(50):
        beside.sample("eval")
        assert alone.sample("train") == beside.sample("train")


def test_an_evaluation_without_envs_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match="eval_envs is empty"):
        UniformRandomEnvSampler(TRAIN).sample("eval")


def test_env_samplers_go_on_where_they_were_saved():
    before, after = UniformRandomEnvSampler(TRAIN, EVAL), UniformRandomEnvSampler(TRAIN, EVAL, rng_seed=1)
    before.sample("train")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for _ in range(20):
        assert before.sample("train") == after.sample("train")
        assert before.sample("eval") == after.sample("eval")


def test_the_env_list_names_the_training_envs():
    assert UniformRandomEnvSampler(TRAIN, EVAL).env_list() == "A,B,C"


# models


def test_mirror_is_always_the_current_policy():
    registry = a_registry(1)
    sampler = MirrorModelSampler(registry, random.Random(0))
    assert sampler.sample_opponent().uid == sampler.get_current_ckpt() == "ckpt-1"
    registry.add_checkpoint("ckpt-2", 2, 2)
    assert sampler.sample_opponent().uid == "ckpt-2"


def test_fixed_opponents_are_drawn_uniformly_and_checkpoints_never():
    registry = a_registry(3, fixed=["x", "y"])
    registry.add_fixed("judge", active=False)
    counts = drawn(FixedOpponentModelSampler(registry, random.Random(0)))
    assert set(counts) == {"fixed-x", "fixed-y"}
    assert abs(counts["fixed-x"] - 1000) < 150


def test_lagged_opponents_come_from_the_window_uniformly():
    sampler = LaggedModelSampler(a_registry(10), random.Random(0), lag_range=(2, 4))
    counts = drawn(sampler)
    assert set(counts) == {"ckpt-6", "ckpt-7", "ckpt-8"}
    assert all(abs(count - 667) < 150 for count in counts.values())


def test_lag_counts_updates_not_checkpoints():
    registry = a_registry()
    for version in (4, 8, 12):
        registry.add_checkpoint(f"ckpt-{version}", version, version)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(3, 5)))) == {"ckpt-8"}


def test_lagged_falls_back_to_the_oldest_there_is():
    assert set(drawn(LaggedModelSampler(a_registry(), random.Random(0)))) == {"base"}
    registry = a_registry(3)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(5, 9)))) == {"base"}
    registry.set_active("base", False)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(5, 9)))) == {"ckpt-1"}


def test_lagged_never_offers_an_inactive_checkpoint():
    registry = a_registry(3)
    registry.set_active("ckpt-2", False)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(1, 2)))) == {"ckpt-1"}


@pytest.mark.parametrize("lag", [(3, 2), (-1, 2)])
def test_a_lag_range_that_is_none_is_refused(lag):
    with pytest.raises(ConfigError, match="opponent_lag"):
        LaggedModelSampler(a_registry(), random.Random(0), lag_range=lag)


def test_a_mixture_draws_in_proportion_to_its_weights():
    config = a_config(opponent_sampling_strategy={"mirror": 6, "lagged": 3, "fixed": 1}, fixed_opponents=["x"])
    registry = a_registry(1)
    counts = drawn(build_model_sampler(config.league, registry, random.Random(0)), 5000)
    assert counts["ckpt-1"] == pytest.approx(3000, abs=150)
    assert counts["base"] == pytest.approx(1500, abs=150)
    assert counts["fixed-x"] == pytest.approx(500, abs=100)


def test_a_mixture_goes_on_where_it_was_saved():
    config = a_config(opponent_sampling_strategy={"mirror": 1, "lagged": 1})
    before = build_model_sampler(config.league, a_registry(9), random.Random(0))
    after = build_model_sampler(config.league, a_registry(9), random.Random(1))
    drawn(before, 10)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [before.sample_opponent() for _ in range(20)] == [after.sample_opponent() for _ in range(20)]


def test_a_mixture_passes_results_on_to_its_parts():
    seen = []

    class Watching(MirrorModelSampler):
        def update(self, uids, scores, env_id):
            seen.append((uids, scores, env_id))

    registry, rng = a_registry(), random.Random(0)
    MixtureModelSampler(registry, rng, [Watching(registry, rng)], [1.0]).update({0: "base"}, {0: 1.0}, "E")
    assert seen == [({0: "base"}, {0: 1.0}, "E")]


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, 1.0]])
def test_a_mixture_without_one_positive_weight_each_is_refused(weights):
    registry, rng = a_registry(), random.Random(0)
    with pytest.raises(ConfigError, match="weight"):
        MixtureModelSampler(registry, rng, [MirrorModelSampler(registry, rng)], weights)


# by name


@pytest.mark.parametrize(
    ("strategy", "sampler_class"),
    [
        ("none", NoOpponentModelSampler),
        ("mirror", MirrorModelSampler),
        ("fixed", FixedOpponentModelSampler),
        ("lagged", LaggedModelSampler),
        ({"mirror": 1.0}, MixtureModelSampler),
    ],
)
def test_strategies_are_found_by_name(strategy, sampler_class):
    league = a_config(opponent_sampling_strategy=strategy).league
    assert type(build_model_sampler(league, a_registry(), random.Random(0))) is sampler_class


def test_the_lag_comes_from_the_config():
    league = a_config(opponent_sampling_strategy={"lagged": 1}, opponent_lag=[2, 3]).league
    assert set(drawn(build_model_sampler(league, a_registry(9), random.Random(0)))) == {"ckpt-6", "ckpt-7"}


def test_fixed_opponents_are_registered_only_where_they_may_play():
    registry = a_registry()
    build_model_sampler(a_config(opponent_sampling_strategy="mirror").league, registry, random.Random(0))
    assert registry.fixed() == []
    league = a_config(opponent_sampling_strategy="fixed", fixed_opponents=["x"]).league
    build_model_sampler(league, registry, random.Random(0))
    assert [meta.name for meta in registry.fixed()] == ["x"]


class Oldest(BaseModelSampler):
    def sample_opponent(self):
        return self.registry.checkpoints()[0].ref


def test_a_users_own_sampler_is_found_by_module_and_name():
    league = a_config(opponent_sampling_strategy=f"{__name__}:Oldest", fixed_opponents=["x"]).league
    registry = a_registry(3)
    assert build_model_sampler(league, registry, random.Random(0)).sample_opponent().uid == "base"
    assert [meta.name for meta in registry.fixed()] == ["x"]


def test_unknown_strategies_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'mirror'"):
        build_model_sampler(a_config(opponent_sampling_strategy="miror").league, a_registry(), random.Random(0))
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        build_env_sampler(a_config(env_sampling_strategy="randm"))


def test_asking_for_an_opponent_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match="'none'"):
        NoOpponentModelSampler(a_registry(), random.Random(0)).sample_opponent()
    with pytest.raises(ConfigError, match="fixed_opponents is empty"):
        FixedOpponentModelSampler(a_registry(), random.Random(0)).sample_opponent()


# check


@pytest.mark.parametrize("strategy", ["mirror", "fixed", "lagged", {"mirror": 0.6, "lagged": 0.3, "fixed": 0.1}])
@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_sound_league_has_no_problems(strategy, num_actors):
    assert check_league(a_config(num_actors, opponent_sampling_strategy=strategy)) == []


def test_the_default_league_is_sound_for_mirror_self_play():
    assert check_league(a_config(num_actors=2)) == []


@pytest.mark.parametrize(
    ("num_actors", "league", "message"),
    [
        (1, {}, "'none'"),
        (3, {}, "must be between 1 and num_players = 2"),
        (0, {}, "must be between 1 and num_players = 2"),
        (1, {"opponent_sampling_strategy": "fixed", "fixed_opponents": []}, "fixed_opponents is empty"),
        (1, {"opponent_sampling_strategy": {"fixed": 1}, "fixed_opponents": []}, "fixed_opponents is empty"),
        (2, {"opponent_lag": [7, 1]}, "opponent_lag"),
        (2, {"opponent_sampling_strategy": {}}, "empty table"),
        (2, {"opponent_sampling_strategy": {"none": 1}}, "mixture"),
        (1, {"opponent_sampling_strategy": "miror"}, "did you mean 'mirror'"),
        (1, {"opponent_sampling_strategy": {"laged": 1}}, "did you mean 'lagged'"),
        (2, {"env_sampling_strategy": "uniform"}, "env_sampling_strategy"),
    ],
)
def test_every_problem_of_a_league_is_found_before_the_run(num_actors, league, message):
    (problem,) = check_league(a_config(num_actors, **league))
    assert message in problem


def test_all_problems_are_reported_at_once():
    assert len(check_league(a_config(1, opponent_lag=[7, 1], env_sampling_strategy="uniform"))) == 3
