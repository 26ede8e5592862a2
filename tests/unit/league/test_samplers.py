import json
import math
import random
import tomllib
from collections import Counter

import numpy as np
import pytest
import trueskill
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, TrainEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import anchors
from unstable_lite.league.ratings import Rating
from unstable_lite.league.samplers import (
    MODEL_SAMPLERS,
    BaseEnvSampler,
    BaseModelSampler,
    BiasedRatingDistanceModelSampler,
    FixedOpponentModelSampler,
    LaggedModelSampler,
    LearningProgressEnvSampler,
    MatchQualityModelSampler,
    MirrorModelSampler,
    MixtureModelSampler,
    NoOpponentModelSampler,
    PrioritizedFictitiousModelSampler,
    RandomModelSampler,
    RatingDistanceModelSampler,
    RoundRobinEnvSampler,
    UniformModelSampler,
    UniformRandomEnvSampler,
    WeightedEnvSampler,
    WeightedModelSampler,
    build_env_sampler,
    build_model_sampler,
    check_league,
)
from unstable_lite.tracking.run_directory import to_toml

TRAIN = [TrainEnvSpec(env_id=env_id, num_players=2, num_actors=2) for env_id in "ABC"]
EVAL = [EvalEnvSpec(env_id=env_id, num_players=2) for env_id in "XY"]


def make_registry(num_checkpoints=0, fixed=()):
    registry = ModelRegistry()
    for n in range(1, num_checkpoints + 1):
        registry.add_policy(f"ckpt-{n}", n, n)
    for name in fixed:
        registry.add_fixed(name)
    return registry


def make_config(num_actors=2, **league):
    env = {"env_id": "A", "num_players": 2, "num_actors": num_actors}
    return Config.model_validate({"train_envs": [env], "league": league})


def drawn(sampler, n=2000):
    return Counter(sampler.sample_opponent("A").uid for _ in range(n))


# envs


def test_envs_are_drawn_uniformly():
    sampler = UniformRandomEnvSampler(TRAIN, EVAL)
    counts = Counter(sampler.sample("train").env_id for _ in range(3000))
    assert set(counts) == set("ABC")
    assert all(abs(count - 1000) < 150 for count in counts.values())
    assert {sampler.sample("eval").env_id for _ in range(100)} == set("XY")


def test_evaluations_do_not_change_the_training_draws():
    alone, beside = UniformRandomEnvSampler(TRAIN, EVAL), UniformRandomEnvSampler(TRAIN, EVAL)
    for _ in range(50):
        beside.sample("eval")
        assert alone.sample("train") == beside.sample("train")


def test_evaluation_without_envs_is_a_clear_error():
    with pytest.raises(ConfigError, match="eval_envs"):
        UniformRandomEnvSampler(TRAIN).sample("eval")


def test_env_samplers_continue_from_a_saved_state():
    before, after = UniformRandomEnvSampler(TRAIN, EVAL), UniformRandomEnvSampler(TRAIN, EVAL, rng_seed=1)
    before.sample("train")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for _ in range(20):
        assert before.sample("train") == after.sample("train")
        assert before.sample("eval") == after.sample("eval")


def test_weighted_envs_are_drawn_in_proportion_to_their_weights():
    sampler = WeightedEnvSampler(TRAIN, EVAL, weights={"A": 6, "B": 3, "C": 1})
    counts = Counter(sampler.sample("train").env_id for _ in range(5000))
    assert counts["A"] == pytest.approx(3000, abs=150)
    assert counts["C"] == pytest.approx(500, abs=100)
    assert {sampler.sample("eval").env_id for _ in range(100)} == set("XY")


def test_round_robin_cycles_and_continues_from_a_saved_state():
    before, after = RoundRobinEnvSampler(TRAIN), RoundRobinEnvSampler(TRAIN)
    assert [before.sample("train").env_id for _ in range(4)] == ["A", "B", "C", "A"]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.sample("train").env_id == "B"


def test_envs_of_different_player_counts_alternate_under_one_id():
    envs = [TrainEnvSpec(env_id="A", num_players=n, num_actors=1) for n in (1, 2, 3)]
    sampler = WeightedEnvSampler(envs, weights={"A": 1})
    assert {sampler.sample("train").num_players for _ in range(100)} == {1, 2, 3}


def make_curriculum(**options):
    return LearningProgressEnvSampler(TRAIN, EVAL, **options)


def test_env_with_a_changing_reward_is_drawn_more_often():
    sampler = make_curriculum(fast=0.1, slow=0.01, min_share=0.3)
    for game in range(200):
        sampler.update("A", 1.0, None)
        sampler.update("B", float(game >= 100), None)
        sampler.update("C", float(game < 150), None)
    steady, rising, falling = sampler.probabilities()
    assert steady == pytest.approx(0.1)
    assert rising > 0.2
    assert falling > 0.2
    counts = Counter(sampler.sample("train").env_id for _ in range(2000))
    assert counts["B"] == pytest.approx(2000 * rising, abs=150)


def test_curriculum_does_not_chase_noise():
    """A is a fair coin, B improves from 10 to 95 % within 3,000 games, C always pays 1."""
    played = Counter()
    for seed in range(4):
        rng, sampler = random.Random(seed), LearningProgressEnvSampler(TRAIN, rng_seed=seed)
        own = Counter()
        for _ in range(6000):
            env_id = sampler.sample("train").env_id
            own[env_id] += 1
            p = {"A": 0.5, "B": min(0.95, 0.1 + 0.85 * own["B"] / 3000), "C": 1.0}[env_id]
            sampler.update(env_id, 1.0 if rng.random() < p else -1.0, None)
        played += own
    assert played["A"] < 1.6 * played["C"]
    assert played["B"] > 2 * played["A"]


def test_variance_factor_matches_simulated_averages():
    fast, slow = 0.05, 0.01
    for games in (2, 30, 300):
        rewards = np.random.default_rng(0).standard_normal((20_000, games))
        ages = np.arange(games)[::-1]
        weights = [(1 - rate) ** ages / ((1 - rate) ** ages).sum() for rate in (fast, slow)]
        simulated = (rewards @ (weights[0] - weights[1])).var()
        sampler = make_curriculum(fast=fast, slow=slow)
        for _ in range(games):
            sampler.update("A", 1.0, None)
        assert sampler._variance_factor("A") == pytest.approx(simulated, rel=0.05)


def test_envs_without_progress_are_drawn_equally():
    sampler = make_curriculum()
    assert sampler.probabilities() == [1 / 3] * 3
    for env_id in "ABCAAB":
        sampler.update(env_id, 0.7, -0.7)
    assert sampler.probabilities() == pytest.approx([1 / 3] * 3)


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.floats(-1, 1)), max_size=60), st.floats(0.01, 1))
def test_curriculum_is_a_distribution_that_includes_every_env(games, min_share):
    sampler = make_curriculum(min_share=min_share)
    for env_id, reward in games:
        sampler.update(env_id, reward, None)
    probabilities = sampler.probabilities()
    assert sum(probabilities) == pytest.approx(1)
    assert min(probabilities) >= min_share / 3 - 1e-12


def test_curriculum_continues_from_a_saved_state():
    before, after = make_curriculum(), make_curriculum()
    for game in range(20):
        before.update("AB"[game % 2], game / 20, None)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.probabilities() == before.probabilities() != [1 / 3] * 3
    for sampler in (before, after):
        sampler.update("A", 1.0, None)
    assert after.probabilities() == before.probabilities()


def test_env_list_names_the_training_envs():
    assert UniformRandomEnvSampler(TRAIN, EVAL).env_list() == "A,B,C"


# models


def test_mirror_is_always_the_current_policy():
    registry = make_registry(1)
    sampler = MirrorModelSampler(registry, random.Random(0))
    assert sampler.sample_opponent("A").uid == sampler.get_current_ckpt() == "ckpt-1"
    registry.add_policy("ckpt-2", 2, 2)
    assert sampler.sample_opponent("A").uid == "ckpt-2"


def test_fixed_opponents_are_drawn_uniformly_and_checkpoints_never():
    registry = make_registry(3, fixed=["x", "y"])
    registry.add_fixed("judge", active=False)
    counts = drawn(FixedOpponentModelSampler(registry, random.Random(0)))
    assert set(counts) == {"fixed-x", "fixed-y"}
    assert abs(counts["fixed-x"] - 1000) < 150


def test_lagged_opponents_come_uniformly_from_the_window():
    sampler = LaggedModelSampler(make_registry(10), random.Random(0), lag_range=(2, 4))
    counts = drawn(sampler)
    assert set(counts) == {"ckpt-6", "ckpt-7", "ckpt-8"}
    assert all(abs(count - 667) < 150 for count in counts.values())


def test_lag_counts_updates_not_checkpoints():
    registry = make_registry()
    for version in (4, 8, 12):
        registry.add_policy(f"ckpt-{version}", version, version)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(3, 5)))) == {"ckpt-8"}


def test_lagged_falls_back_to_the_oldest_checkpoint():
    assert set(drawn(LaggedModelSampler(make_registry(), random.Random(0)))) == {"base"}
    registry = make_registry(3)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(5, 9)))) == {"base"}
    registry.set_active("base", False)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(5, 9)))) == {"ckpt-1"}


def test_lagged_never_offers_an_inactive_checkpoint():
    registry = make_registry(3)
    registry.set_active("ckpt-2", False)
    assert set(drawn(LaggedModelSampler(registry, random.Random(0), lag_range=(1, 2)))) == {"ckpt-1"}


@pytest.mark.parametrize("lag", [(3, 2), (-1, 2)])
def test_invalid_lag_range_is_refused(lag):
    with pytest.raises(ConfigError, match="opponent_lag"):
        LaggedModelSampler(make_registry(), random.Random(0), lag_range=lag)


def test_uniform_draws_active_checkpoints_and_random_also_fixed_ones():
    registry = make_registry(3, fixed=["x"])
    registry.set_active("ckpt-1", False)
    counts = drawn(UniformModelSampler(registry, random.Random(0)), 3000)
    assert set(counts) == {"base", "ckpt-2", "ckpt-3"}
    assert all(abs(count - 1000) < 150 for count in counts.values())
    counts = drawn(RandomModelSampler(registry, random.Random(0)), 4000)
    assert set(counts) == {"base", "ckpt-2", "ckpt-3", "fixed-x"}
    assert all(abs(count - 1000) < 150 for count in counts.values())


EQUAL = Rating(25.0, 4.0)


def make_rated_registry(ratings, current=EQUAL):
    """Return a registry of fixed opponents a, b, c, … with these ratings, and the current policy."""
    registry = make_registry(fixed=[chr(ord("a") + index) for index in range(len(ratings))])
    for meta, rating in zip(registry.fixed("A"), ratings, strict=True):
        meta.ratings["E"] = rating
    registry.get("base").ratings["E"] = current
    return registry


RATINGS = st.builds(Rating, st.floats(-60, 110), st.floats(0.5, 9))


def weights_of(sampler_class, registry, **options):
    sampler = sampler_class(registry, random.Random(0), **options)
    return sampler.weights(registry.get(registry.get_current_ckpt()), registry.others("E"), "E")


@given(st.lists(RATINGS, min_size=1, max_size=6), RATINGS)
def test_match_quality_weights_equal_trueskill_quality(ratings, current):
    registry = make_rated_registry(ratings, current)
    env = trueskill.TrueSkill(beta=4.0)
    for weight, rating in zip(weights_of(MatchQualityModelSampler, registry), ratings, strict=True):
        expected = env.quality([(env.create_rating(*current),), (env.create_rating(*rating),)])
        assert weight == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(st.lists(RATINGS, min_size=2, max_size=6), RATINGS)
def test_ts_dist_prefers_the_nearer_and_the_biased_form_the_stronger(ratings, current):
    registry = make_rated_registry(ratings, current)
    near = weights_of(RatingDistanceModelSampler, registry)
    strong = weights_of(BiasedRatingDistanceModelSampler, registry)
    assert sum(near) == pytest.approx(len(ratings) - 1) or sum(near) == len(ratings)
    for a, weight_a, strong_a in zip(ratings, near, strong, strict=True):
        assert weight_a >= -1e-12
        assert strong_a >= 0
        for b, weight_b, strong_b in zip(ratings, near, strong, strict=True):
            if abs(a.mu - current.mu) < abs(b.mu - current.mu) - 1e-6:
                assert weight_a >= weight_b
            if a.mu < b.mu:
                assert strong_a <= strong_b


def test_ts_dist_biased_weighs_by_the_difference_over_25():
    registry = make_rated_registry([Rating(50.0, 1.0), Rating(25.0, 1.0), Rating(0.0, 1.0)])
    stronger, equal, weaker = weights_of(BiasedRatingDistanceModelSampler, registry)
    assert stronger / equal == pytest.approx(2.718281828)
    assert equal / weaker == pytest.approx(2.718281828)


@pytest.mark.parametrize("name", ["match-quality", "ts-dist", "ts-dist-biased", "pfsp"])
def test_weighted_samplers_draw_the_policy_only_without_alternative(name):
    registry = make_registry(2)
    registry.get("base").ratings["E"], registry.get("ckpt-1").ratings["E"] = Rating(20.0, 4.0), Rating(23.0, 4.0)
    sampler = MODEL_SAMPLERS[name](registry, random.Random(0))
    assert set(drawn(sampler)) == {"base", "ckpt-1"}
    registry.set_active("ckpt-1", False)
    assert set(drawn(sampler)) == {"base"}  # ts-dist: its only weight is 0
    registry.set_active("base", False)
    assert set(drawn(sampler)) == {"ckpt-2"}


def make_pfsp(registry, **options):
    return PrioritizedFictitiousModelSampler(registry, random.Random(0), **options)


def test_pfsp_win_rate_counts_a_draw_as_half():
    registry = make_registry(1, fixed=["x", "y"])
    sampler = make_pfsp(registry, prior_games=2, decay=1.0)
    for score in (1.0, 1.0, -1.0, 0.0):
        sampler.update({0: "ckpt-1", 1: "fixed-x"}, {0: score, 1: -score}, "E")
    sampler.update({0: "base", 1: "ckpt-1"}, {0: 1.0, 1: -1.0}, "E")
    assert sampler.win_rate("fixed-x", "E") == pytest.approx((2.5 + 1) / (4 + 2))
    assert sampler.win_rate("base", "E") == pytest.approx(1 / 3)
    assert sampler.win_rate("fixed-y", "E") == 0.5


def test_pfsp_counts_each_opponent_and_no_mirror_games():
    registry = make_registry(1, fixed=["x", "y"])
    sampler = make_pfsp(registry)
    sampler.update({0: "ckpt-1", 1: "ckpt-1"}, {0: 1.0, 1: -1.0}, "E")
    sampler.update({0: "fixed-x", 1: "fixed-y"}, {0: 1.0, 1: -1.0}, "E")
    assert sampler.state_dict()["results"] == {"E": {}}
    sampler.update({0: "fixed-x", 1: "ckpt-1", 2: "fixed-y"}, {0: 1.0, 1: 0.0, 2: -1.0}, "E")
    assert sampler.win_rate("fixed-x", "E") < 0.5 < sampler.win_rate("fixed-y", "E")


def test_pfsp_forgets_old_results():
    sampler = make_pfsp(make_registry(1, fixed=["x"]), decay=0.9)
    for score in [-1.0] * 100 + [1.0] * 100:
        sampler.update({0: "ckpt-1", 1: "fixed-x"}, {0: score, 1: -score}, "E")
    assert sampler.win_rate("fixed-x", "E") > 0.9


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from([-1.0, 0.0, 1.0])), max_size=80))
def test_pfsp_hard_prefers_stronger_and_even_equal_opponents(games):
    registry = make_registry(0, fixed="xyz")
    samplers = {name: make_pfsp(registry, weighting=name) for name in ("hard", "even")}
    for sampler in samplers.values():
        for name, score in games:
            sampler.update({0: "base", 1: f"fixed-{name}"}, {0: score, 1: -score}, "E")
    uids = [meta.uid for meta in registry.others("E")]
    rates = [samplers["hard"].win_rate(uid, "E") for uid in uids]
    hard, even = (sampler.weights(registry.get("base"), registry.others("E"), "E") for sampler in samplers.values())
    assert all(weight > 0 for weight in hard + even)
    assert [weight**0.5 for weight in hard] == pytest.approx([1 - rate for rate in rates])
    assert even == pytest.approx([rate * (1 - rate) for rate in rates])


def test_pfsp_recognises_a_warm_start_as_the_policy_at_both_seats():
    registry = make_registry(0)
    registry.add_policy("initial", 1, 0)
    sampler = make_pfsp(registry)
    for seats in ({0: "initial", 1: "base"}, {0: "base", 1: "initial"}):
        sampler.update(seats, {pid: 1.0 if uid == "initial" else -1.0 for pid, uid in seats.items()}, "E")
    assert sampler.win_rate("base", "E") > 0.5 == sampler.win_rate("initial", "E")


def test_pfsp_continues_from_a_saved_state():
    registry = make_registry(1, fixed="xy")
    before, after = make_pfsp(registry), make_pfsp(registry)
    before.update({0: "ckpt-1", 1: "fixed-x"}, {0: 1.0, 1: -1.0}, "E")
    drawn(before, 5)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.win_rate("fixed-x", "E") == before.win_rate("fixed-x", "E") != 0.5
    assert [before.sample_opponent("A") for _ in range(20)] == [after.sample_opponent("A") for _ in range(20)]


def test_mixture_draws_in_proportion_to_its_weights():
    config = make_config(1, opponent_sampling_strategy={"mirror": 6, "lagged": 3, "fixed": 1}, fixed_opponents=["x"])
    registry = make_registry(1)
    counts = drawn(build_model_sampler(config, registry, random.Random(0)), 5000)
    assert counts["ckpt-1"] == pytest.approx(3000, abs=150)
    assert counts["base"] == pytest.approx(1500, abs=150)
    assert counts["fixed-x"] == pytest.approx(500, abs=100)


def test_mixture_continues_from_a_saved_state():
    config = make_config(opponent_sampling_strategy={"mirror": 1, "lagged": 1})
    before = build_model_sampler(config, make_registry(9), random.Random(0))
    after = build_model_sampler(config, make_registry(9), random.Random(1))
    drawn(before, 10)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [before.sample_opponent("A") for _ in range(20)] == [after.sample_opponent("A") for _ in range(20)]


def test_mixture_passes_results_to_its_parts():
    seen = []

    class Watching(MirrorModelSampler):
        def update(self, uids, scores, env_id):
            seen.append((uids, scores, env_id))

    registry, rng = make_registry(), random.Random(0)
    MixtureModelSampler(registry, rng, [Watching(registry, rng)], [1.0]).update({0: "base"}, {0: 1.0}, "E")
    assert seen == [({0: "base"}, {0: 1.0}, "E")]


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, 1.0]])
def test_mixture_needs_one_positive_weight_per_part(weights):
    registry, rng = make_registry(), random.Random(0)
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
        ("uniform", UniformModelSampler),
        ("random", RandomModelSampler),
        ("match-quality", MatchQualityModelSampler),
        ("ts-dist", RatingDistanceModelSampler),
        ("ts-dist-biased", BiasedRatingDistanceModelSampler),
        ("pfsp", PrioritizedFictitiousModelSampler),
        ({"mirror": 1.0}, MixtureModelSampler),
    ],
)
def test_strategies_are_found_by_name(strategy, sampler_class):
    config = make_config(opponent_sampling_strategy=strategy)
    assert type(build_model_sampler(config, make_registry(), random.Random(0))) is sampler_class


def test_lag_comes_from_the_config():
    config = make_config(opponent_sampling_strategy={"lagged": 1}, opponent_lag=[2, 3])
    assert set(drawn(build_model_sampler(config, make_registry(9), random.Random(0)))) == {"ckpt-6", "ckpt-7"}


def test_strategy_table_sets_weights_and_options():
    strategy = {"mirror": 3, "pfsp": {"weight": 1, "prior_games": 8.0, "weighting": "even"}, "lagged": {}}
    config = make_config(opponent_sampling_strategy=strategy, fixed_opponents=[])
    mixture = build_model_sampler(config, make_registry(1), random.Random(0))
    assert mixture.weights == [3, 1, 1.0]
    mixture.update({0: "ckpt-1", 1: "base"}, {0: 1.0, 1: -1.0}, "E")
    assert mixture.samplers[1].win_rate("base", "E") == pytest.approx(5 / 9)


@pytest.mark.parametrize(
    ("strategy", "sampler_class"),
    [
        ("random", UniformRandomEnvSampler),
        ("round-robin", RoundRobinEnvSampler),
        ("learning-progress", LearningProgressEnvSampler),
        ({"weighted": {"weights": {"A": 2}}}, WeightedEnvSampler),
        ({"learning-progress": {"min_share": 0.5}}, LearningProgressEnvSampler),
    ],
)
def test_env_strategies_are_found_by_name_and_survive_toml(strategy, sampler_class):
    config = make_config(env_sampling_strategy=strategy)
    again = Config.model_validate(tomllib.loads(to_toml(config.model_dump(mode="json"))))
    assert again == config
    sampler = build_env_sampler(again)
    assert type(sampler) is sampler_class
    assert sampler.sample("train").env_id == "A"


def test_custom_class_in_a_mixture_survives_toml():
    config = make_config(opponent_sampling_strategy={f"{__name__}:Oldest": 0.5, "pfsp": {"weight": 0.5}})
    assert Config.model_validate(tomllib.loads(to_toml(config.model_dump(mode="json")))) == config


def test_fixed_opponents_are_registered_only_if_they_may_play():
    registry = make_registry()
    build_model_sampler(make_config(1, opponent_sampling_strategy="mirror"), registry, random.Random(0))
    assert registry.fixed("A") == []
    config = make_config(1, opponent_sampling_strategy="fixed", fixed_opponents=["x"])
    build_model_sampler(config, registry, random.Random(0))
    assert [meta.name for meta in registry.fixed("A")] == ["x"]


def make_two_envs(strategy, **league):
    envs = [
        {"env_id": "A", "num_players": 2, "num_actors": 1},
        {"env_id": "B", "num_players": 2, "num_actors": 1, "fixed_opponents": ["y", "base"]},
    ]
    return Config.model_validate(
        {
            "train_envs": envs,
            "league": {"opponent_sampling_strategy": strategy, "fixed_opponents": ["x", "y"], **league},
        }
    )


@pytest.mark.parametrize("strategy", ["fixed", "random", "pfsp", "match-quality", "ts-dist", "ts-dist-biased"])
def test_each_env_draws_only_its_own_fixed_opponents(strategy):
    registry = make_registry()
    sampler = build_model_sampler(make_two_envs(strategy), registry, random.Random(0))
    of_env = {env_id: {sampler.sample_opponent(env_id).uid for _ in range(300)} - {"base"} for env_id in "AB"}
    assert of_env == {"A": {"fixed-x", "fixed-y"}, "B": {"fixed-y", "fixed-base"}}


def test_results_of_one_env_do_not_change_pfsp_in_another():
    registry = make_registry()
    sampler = build_model_sampler(make_two_envs("pfsp"), registry, random.Random(0))
    for _ in range(50):
        for uids, score in (({0: "base", 1: "fixed-y"}, 1.0), ({0: "base", 1: "fixed-x"}, -1.0)):
            sampler.update(uids, {0: score, 1: -score}, "A")
    assert sampler.win_rate("fixed-y", "A") > 0.9 > 0.5 == sampler.win_rate("fixed-y", "B")
    current = registry.get("base")
    in_a, in_b = (sampler.weights(current, registry.others(env_id), env_id) for env_id in "AB")
    assert in_a[0] > 50 * in_a[1], "the opponent that wins in A is drawn there"
    assert in_b == [0.25, 0.25]
    after = build_model_sampler(make_two_envs("pfsp"), make_registry(), random.Random(1))
    after.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [after.win_rate("fixed-y", env_id) for env_id in "AB"] == [sampler.win_rate("fixed-y", e) for e in "AB"]


@pytest.mark.parametrize("strategy", ["match-quality", "ts-dist", "ts-dist-biased"])
def test_samplers_by_rating_use_the_rating_of_the_env(strategy):
    registry = make_registry()
    sampler = build_model_sampler(make_two_envs(strategy, fixed_opponents=["y", "z"]), registry, random.Random(0))
    registry.get("base").ratings["A"] = registry.get("fixed-z").ratings["A"] = Rating(25.0, 1.0)
    registry.get("fixed-y").ratings["A"] = Rating(60.0, 1.0)
    metas = [registry.get("fixed-y"), registry.get("fixed-z")]
    strong, even = sampler.weights(registry.get("base"), metas, "A")
    assert (strong > even) == (strategy == "ts-dist-biased")
    assert len(set(sampler.weights(registry.get("base"), metas, "B"))) == 1, "no game was played in B"


def test_frozen_player_at_the_other_seat_is_never_taken_for_the_policy():
    registry = make_registry(1)
    registry.add_fixed("base")
    sampler = make_pfsp(registry)
    sampler.update({0: "ckpt-1", 1: "fixed-base"}, {0: 1.0, 1: -1.0}, "E")
    sampler.update({0: "fixed-base", 1: "ckpt-1"}, {0: -1.0, 1: 1.0}, "E")
    assert sampler.win_rate("fixed-base", "E") == pytest.approx(3 / 4, abs=0.01)
    assert sampler.win_rate("ckpt-1", "E") == 0.5


class OldOpponent(BaseModelSampler):
    def sample_opponent(self):
        return self.registry.current


class OldWeights(WeightedModelSampler):
    def weights(self, current, others):
        return [1.0 for _ in others]


@pytest.mark.parametrize(("name", "says"), [("OldOpponent", "(self, env_id: str)"), ("OldWeights", "env_id: str)")])
def test_sampler_that_does_not_take_the_env_is_refused_with_the_arguments(name, says):
    (problem,) = check_league(make_config(1, opponent_sampling_strategy=f"{__name__}:{name}", fixed_opponents=["x"]))
    assert name in problem and says in problem
    with pytest.raises(ConfigError, match="env_id"):
        globals()[name](make_registry(), random.Random(0))


class Oldest(BaseModelSampler):
    def sample_opponent(self, env_id):
        return self.registry.checkpoints()[0].ref


def test_custom_sampler_is_found_by_module_and_name():
    config = make_config(1, opponent_sampling_strategy=f"{__name__}:Oldest", fixed_opponents=["x"])
    registry = make_registry(3)
    assert build_model_sampler(config, registry, random.Random(0)).sample_opponent("A").uid == "base"
    assert [meta.name for meta in registry.fixed("A")] == ["x"]


class NoSampler:
    def __init__(self, *args, **keywords):
        pass


class Undecided(BaseModelSampler):
    pass


class UndecidedEnv(BaseEnvSampler):
    pass


class EnvById(BaseEnvSampler):
    def _choose_train(self):
        return self.train_env_specs[0].env_id


class TakesNoEnvs(BaseEnvSampler):
    def __init__(self, goal=0.5):
        super().__init__([])


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("env", "NoSampler", "unstable_lite.samplers.BaseEnvSampler"),
        ("env", "UndecidedEnv", "_choose_train"),
        ("env", "EnvById", "'A'"),
        ("env", "TakesNoEnvs", "too many positional arguments"),
        ("opponent", "NoSampler", "unstable_lite.samplers.BaseModelSampler"),
        ("opponent", "Undecided", "sample_opponent"),
    ],
)
def test_custom_sampler_that_cannot_draw_is_refused_before_the_run(key, name, message):
    league = {"opponent_sampling_strategy": "mirror", f"{key}_sampling_strategy": f"{__name__}:{name}"}
    (problem,) = check_league(make_config(1, **league))
    assert message in problem


@pytest.mark.parametrize("weights", [[math.nan, 1.0], [-1.0, 3.0], [1.0]])
def test_invalid_weights_are_refused(weights):
    class Odd(WeightedModelSampler):
        def weights(self, current, others, env_id):
            return weights

    with pytest.raises(ConfigError, match="2 opponents"):
        Odd(make_registry(fixed=["x", "y"]), random.Random(0)).sample_opponent("A")


def test_unknown_strategies_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'mirror'"):
        build_model_sampler(make_config(opponent_sampling_strategy="miror"), make_registry(), random.Random(0))
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        build_env_sampler(make_config(env_sampling_strategy="randm"))


def test_missing_opponent_is_a_clear_error():
    with pytest.raises(ConfigError, match="'none'"):
        NoOpponentModelSampler(make_registry(), random.Random(0)).sample_opponent("A")
    with pytest.raises(ConfigError, match="fixed_opponents"):
        FixedOpponentModelSampler(make_registry(), random.Random(0)).sample_opponent("A")


# check


@pytest.mark.parametrize(
    "strategy", ["mirror", "fixed", "lagged", "pfsp", {"mirror": 0.6, "lagged": 0.3, "fixed": 0.1}]
)
@pytest.mark.parametrize("num_actors", [1, 2])
def test_valid_league_has_no_problems(strategy, num_actors):
    assert check_league(make_config(num_actors, opponent_sampling_strategy=strategy)) == []


def test_default_league_is_valid_for_self_play():
    assert check_league(make_config(num_actors=2)) == []


@pytest.mark.parametrize(
    ("num_actors", "league", "message"),
    [
        (1, {}, "'none'"),
        (3, {}, "num_players = 2"),
        (0, {}, "num_players = 2"),
        (1, {"opponent_sampling_strategy": "fixed", "fixed_opponents": []}, "fixed_opponents"),
        (1, {"opponent_sampling_strategy": {"fixed": 1}, "fixed_opponents": []}, "fixed_opponents"),
        (2, {"opponent_lag": [7, 1]}, "opponent_lag"),
        (1, {"opponent_lag": [7, 1], "opponent_sampling_strategy": "lagged"}, "opponent_lag"),
        (2, {"opponent_sampling_strategy": {}}, "empty table"),
        (2, {"opponent_sampling_strategy": {"none": 1}}, "mixture"),
        (1, {"opponent_sampling_strategy": "miror"}, "did you mean 'mirror'"),
        (1, {"opponent_sampling_strategy": {"laged": 1}}, "did you mean 'lagged'"),
        (2, {"env_sampling_strategy": "uniform"}, "env_sampling_strategy"),
        (1, {"opponent_sampling_strategy": {"mirror": 0}}, "the weight of 'mirror' is 0"),
        (1, {"opponent_sampling_strategy": {"pfsp": {"weight": True}}}, "the weight of 'pfsp' is True"),
        (1, {"opponent_sampling_strategy": {"pfsp": {"wieghting": "hard"}}}, "did you mean 'weighting'"),
        (1, {"opponent_sampling_strategy": {"pfsp": {"weighting": "had"}}}, "did you mean 'hard'"),
        (1, {"opponent_sampling_strategy": {"pfsp": {"decay": 0.0}}}, "decay = 0.0"),
        (1, {"opponent_sampling_strategy": {"mirror": {"k": 1}}}, "unknown keyword 'k'"),
        (2, {"env_sampling_strategy": {"weighted": {}}}, "'weights'"),
        (2, {"env_sampling_strategy": {"weighted": {"weights": {}}}}, "'A'"),
        (2, {"env_sampling_strategy": {"weighted": {"weights": {"A": 1, "a": 1}}}}, "'a'"),
        (2, {"env_sampling_strategy": {"weighted": {"weights": {"A": -1}}}}, "the weight of 'A' is -1"),
        (2, {"env_sampling_strategy": {"learning-progress": {"slow": 0.5}}}, "slow < fast"),
        (2, {"env_sampling_strategy": {"random": {}, "round-robin": {}}}, "options"),
        (2, {"env_sampling_strategy": {}}, "options"),
        (2, {"env_sampling_strategy": {"weighted": 3}}, "table"),
        (2, {"env_sampling_strategy": {"name": "weighted", "weights": {"A": 1}}}, "{ weighted = { … } }"),
        (1, {"opponent_sampling_strategy": {"name": "pfsp", "weighting": "hard"}}, "{ pfsp = { … } }"),
    ],
)
def test_every_problem_of_a_league_is_found_before_the_run(num_actors, league, message):
    (problem,) = check_league(make_config(num_actors, **league))
    assert message in problem


def test_all_problems_are_reported_at_once():
    assert len(check_league(make_config(1, opponent_lag=[7, 1], env_sampling_strategy="uniform"))) == 3


def test_anchor_is_random_play_or_the_first_fixed_opponent():
    evaluated = [("A", "x"), ("A", "scripted:random"), ("B", "x"), ("B", "y")]
    config = Config(
        train_envs=(
            TrainEnvSpec(env_id="B", num_players=2, num_actors=2),
            TrainEnvSpec(env_id="C", num_players=2, num_actors=1),
            TrainEnvSpec(env_id="D", num_players=2, num_actors=2),
        ),
        eval_envs=tuple(EvalEnvSpec(env_id=env_id, num_players=2, fixed_opponent=name) for env_id, name in evaluated),
        league=LeagueConfig(opponent_sampling_strategy="fixed", fixed_opponents=("z",)),
    )
    assert anchors(config) == {"A": "scripted:random", "B": "x", "C": "z"}


def test_frozen_player_is_the_anchor_only_if_there_is_no_other():
    env = TrainEnvSpec(env_id="A", num_players=2, num_actors=1, fixed_opponents=("base", "run:x/best"))
    config = Config(train_envs=(env,), league=LeagueConfig(opponent_sampling_strategy="fixed"))
    assert anchors(config) == {"A": "base"}
    met = env.model_copy(update={"fixed_opponents": ("base", "scripted:greedy")})
    assert anchors(config.model_copy(update={"train_envs": (met,)})) == {"A": "scripted:greedy"}
