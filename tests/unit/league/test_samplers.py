import math
import random
import tomllib
from collections import Counter
from functools import partial

import numpy as np
import pytest
import trueskill
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, TrainEnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.league import samplers
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.opponents import anchors
from unstable_lite.league.ratings import Rating
from unstable_lite.league.samplers import MODEL_SAMPLERS, build_env_sampler, build_model_sampler, check_league
from unstable_lite.league.samplers.model_samplers import nash_weights
from unstable_lite.tracking.run_directory import to_toml

TRAIN = [TrainEnvSpec(env_id=env_id, num_players=2, num_actors=2) for env_id in "ABC"]
EVAL = [EvalEnvSpec(env_id=env_id, num_players=2) for env_id in "XY"]
MIXTURE = samplers.MixtureModelSampler


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


def test_envs_are_drawn_by_weight_or_in_turn_and_apart_from_evaluations():
    uniform = samplers.UniformRandomEnvSampler(TRAIN, EVAL)
    weighted = samplers.WeightedEnvSampler(TRAIN, EVAL, weights={"A": 6, "B": 3, "C": 1})
    for sampler, shares in (
        (uniform, {"A": 1 / 3, "B": 1 / 3, "C": 1 / 3}),
        (weighted, {"A": 0.6, "B": 0.3, "C": 0.1}),
    ):
        counts = Counter(sampler.sample("train").env_id for _ in range(5000))
        assert {env_id: count / 5000 for env_id, count in counts.items()} == pytest.approx(shares, abs=0.03)
        assert {sampler.sample("eval").env_id for _ in range(100)} == set("XY")
        assert sampler.env_list() == "A,B,C"
    alone, beside = (samplers.UniformRandomEnvSampler(TRAIN, EVAL) for _ in range(2))
    for _ in range(50):
        beside.sample("eval")
        assert alone.sample("train") == beside.sample("train")
    envs = [TrainEnvSpec(env_id="A", num_players=n, num_actors=1) for n in (1, 2, 3)]
    sampler = samplers.WeightedEnvSampler(envs, weights={"A": 1})
    assert {sampler.sample("train").num_players for _ in range(100)} == {1, 2, 3}
    sampler = samplers.RoundRobinEnvSampler(TRAIN)
    assert [sampler.sample("train").env_id for _ in range(4)] == ["A", "B", "C", "A"]
    with pytest.raises(ConfigError, match="eval_envs"):
        sampler.sample("eval")


def make_curriculum(**options):
    return samplers.LearningProgressEnvSampler(TRAIN, EVAL, **options)


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
        rng, sampler = random.Random(seed), samplers.LearningProgressEnvSampler(TRAIN, rng_seed=seed)
        own = Counter()
        for _ in range(6000):
            env_id = sampler.sample("train").env_id
            own[env_id] += 1
            p = {"A": 0.5, "B": min(0.95, 0.1 + 0.85 * own["B"] / 3000), "C": 1.0}[env_id]
            sampler.update(env_id, 1.0 if rng.random() < p else -1.0, None)
        played += own
    assert played["A"] < 1.6 * played["C"]
    assert played["B"] > 2 * played["A"]


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.floats(-1, 1)), max_size=60), st.floats(0.01, 1))
def test_curriculum_is_a_distribution_that_includes_every_env(games, min_share):
    sampler = make_curriculum(min_share=min_share)
    for env_id, reward in games:
        sampler.update(env_id, reward, None)
    probabilities = sampler.probabilities()
    assert sum(probabilities) == pytest.approx(1)
    assert min(probabilities) >= min_share / 3 - 1e-12
    if len({reward for _, reward in games}) < 2:
        assert probabilities == pytest.approx([1 / 3] * 3), "no env makes progress"


# models


@pytest.mark.parametrize(
    ("updates", "lag_range", "inactive", "expected"),
    [
        pytest.param(range(1, 11), (2, 4), (), {"ckpt-6", "ckpt-7", "ckpt-8"}, id="uniformly from the window"),
        pytest.param((4, 8, 12), (3, 5), (), {"ckpt-8"}, id="a lag counts updates, not checkpoints"),
        pytest.param((), (1, 7), (), {"base"}, id="only the base"),
        pytest.param((1, 2, 3), (5, 9), (), {"base"}, id="the oldest, if the window is empty"),
        pytest.param((1, 2, 3), (5, 9), ("base",), {"ckpt-1"}, id="the oldest active one"),
        pytest.param((1, 2, 3), (1, 2), ("ckpt-2",), {"ckpt-1"}, id="no inactive one"),
    ],
)
def test_lagged_opponents_come_from_the_window(updates, lag_range, inactive, expected):
    registry = ModelRegistry()
    for version in updates:
        registry.add_policy(f"ckpt-{version}", version, version)
    for uid in inactive:
        registry.set_active(uid, False)
    counts = drawn(samplers.LaggedModelSampler(registry, random.Random(0), lag_range=lag_range))
    assert set(counts) == expected
    assert all(count == pytest.approx(2000 / len(expected), abs=150) for count in counts.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mirror", {"ckpt-3"}),
        ("fixed", {"fixed-x", "fixed-y"}),
        ("uniform", {"base", "ckpt-2", "ckpt-3"}),
        ("random", {"base", "ckpt-2", "ckpt-3", "fixed-x", "fixed-y"}),
    ],
)
def test_active_models_of_the_right_kinds_are_drawn_uniformly(name, expected):
    registry = make_registry(2, fixed=["x", "y"])
    sampler = MODEL_SAMPLERS[name](registry, random.Random(0))
    registry.add_policy("ckpt-3", 3, 3)
    registry.add_fixed("judge", active=False)
    registry.set_active("ckpt-1", False)
    counts = drawn(sampler, 3000)
    assert set(counts) == expected
    assert all(count == pytest.approx(3000 / len(expected), abs=150) for count in counts.values())


EQUAL = Rating(25.0, 4.0)


def make_rated_registry(ratings, current=EQUAL):
    """Return a registry of fixed opponents a, b, c, … with these ratings, and the current policy."""
    registry = make_registry(fixed=[chr(ord("a") + index) for index in range(len(ratings))])
    for meta, rating in zip(registry.fixed("A"), ratings, strict=True):
        meta.ratings["E"] = rating
    registry.get("base").ratings["E"] = current
    return registry


RATINGS = st.builds(Rating, st.floats(-60, 110), st.floats(0.5, 9))


def weights_of(name, registry):
    sampler = MODEL_SAMPLERS[name](registry, random.Random(0))
    return sampler.weights(registry.get(registry.get_current_ckpt()), registry.others("E"), "E")


@given(st.lists(RATINGS, min_size=1, max_size=6), RATINGS)
def test_match_quality_weights_equal_trueskill_quality(ratings, current):
    registry = make_rated_registry(ratings, current)
    env = trueskill.TrueSkill(beta=4.0)
    for weight, rating in zip(weights_of("match-quality", registry), ratings, strict=True):
        expected = env.quality([(env.create_rating(*current),), (env.create_rating(*rating),)])
        assert weight == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(st.lists(RATINGS, min_size=2, max_size=6), RATINGS)
def test_ts_dist_weighs_by_the_distance_and_the_biased_form_by_strength(ratings, current):
    registry = make_rated_registry(ratings, current)
    distances = np.array([abs(rating.mu - current.mu) for rating in ratings])
    total = distances.sum()
    near = 1 - distances / total if total else np.ones(len(ratings))
    assert weights_of("ts-dist", registry) == pytest.approx(near, abs=1e-12)
    strong = np.exp([(rating.mu - max(ratings).mu) / 25 for rating in ratings])
    assert weights_of("ts-dist-biased", registry) == pytest.approx(strong)


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
    return samplers.PrioritizedFictitiousModelSampler(registry, random.Random(0), **options)


OWN, X, Y = "ckpt-1", "fixed-x", "fixed-y"
TEAMS = {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("games", "teams", "rates"),
    [
        pytest.param([((OWN, X), (s, -s)) for s in (1, 1, -1, 0)], None, {X: 3.5 / 6, Y: 0.5}, id="a draw is a half"),
        pytest.param([(("base", OWN), (1, -1))], None, {"base": 1 / 3}, id="the newest checkpoint is the policy"),
        pytest.param(
            [((OWN, "initial"), (-1, 1))] * 2, None, {"initial": 1 / 4}, id="an older checkpoint is an opponent"
        ),
        pytest.param(
            [((X, OWN), (-1, 1)), (("fixed-base", OWN), (-1, 1))],
            None,
            {"fixed-base": 2 / 3},
            id="a frozen player is one",
        ),
        pytest.param([((OWN, OWN), (1, -1)), ((X, Y), (1, -1))], None, {OWN: 0.5, X: 0.5, Y: 0.5}, id="not its games"),
        pytest.param([((X, OWN, Y), (1, 0, -1))], None, {X: 1 / 3, Y: 2 / 3}, id="each opponent"),
        pytest.param([((OWN, X, Y, OWN), (1, 1, -1, -1))], TEAMS, {X: 0.5, Y: 0.5}, id="in both teams"),
        pytest.param([((OWN, X, Y, Y), (1, 1, -1, -1))], TEAMS, {X: 0.5, Y: 2 / 3}, id="rivals and no partners"),
    ],
)
def test_pfsp_win_rates_are_those_of_the_policy_against_each_rival(games, teams, rates):
    registry = make_registry(0, fixed=["x", "y", "base"])
    registry.add_policy("initial", 1, 0)  # like the base, it has no updates
    registry.add_policy(OWN, 2, 1)
    sampler = make_pfsp(registry, prior_games=2, decay=1.0)
    for uids, scores in games:
        sampler.update(dict(enumerate(uids)), dict(enumerate(map(float, scores))), "E", teams)
    assert {uid: sampler.win_rate(uid, "E") for uid in rates} == pytest.approx(rates)


def test_pfsp_recognises_a_warm_start_as_the_policy_at_both_seats():
    registry = make_registry(0)
    registry.add_policy("initial", 1, 0)
    sampler = make_pfsp(registry)
    for seats in (("initial", "base"), ("base", "initial")):
        sampler.update(dict(enumerate(seats)), {pid: float(uid == "initial") for pid, uid in enumerate(seats)}, "E")
    assert sampler.win_rate("base", "E") > 0.5 == sampler.win_rate("initial", "E")


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


# by name


def test_strategy_table_sets_weights_and_options():
    strategy = {"mirror": 3, "pfsp": {"weight": 1, "prior_games": 8.0, "weighting": "even"}, "lagged": {}}
    lagged = make_config(1, opponent_sampling_strategy={"lagged": 1}, opponent_lag=[2, 3])
    assert check_league(lagged) == []
    assert set(drawn(build_model_sampler(lagged, make_registry(9), random.Random(0)))) == {"ckpt-6", "ckpt-7"}
    config = make_config(opponent_sampling_strategy=strategy, fixed_opponents=[])
    mixture = build_model_sampler(config, make_registry(1), random.Random(0))
    assert mixture.weights == [3, 1, 1.0]
    mixture.update({0: "ckpt-1", 1: "base"}, {0: 1.0, 1: -1.0}, "E")
    assert mixture.samplers[1].win_rate("base", "E") == pytest.approx(5 / 9)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *((name, name) for name in ("random", "round-robin", "learning-progress")),
        ({"weighted": {"weights": {"A": 2}}}, "weighted"),
        ({"learning-progress": {"min_share": 0.5}}, "learning-progress"),
    ],
)
def test_strategies_are_found_by_name_survive_toml_and_have_no_problem(strategy, name):
    opponents = {f"{__name__}:Oldest": 0.5, "pfsp": {"weight": 0.5}}
    config = make_config(env_sampling_strategy=strategy, opponent_sampling_strategy=opponents)
    again = Config.model_validate(tomllib.loads(to_toml(config.model_dump(mode="json"))))
    assert again == config
    assert check_league(config) == []
    sampler = build_env_sampler(again)
    assert type(sampler) is samplers.ENV_SAMPLERS[name]
    assert sampler.sample("train").env_id == "A"


def sampler_of_two_envs(strategy, fixed_opponents=("x", "y")):
    config = make_config(1, opponent_sampling_strategy=strategy, fixed_opponents=fixed_opponents)
    (env,) = config.train_envs
    envs = (env, env.model_copy(update={"env_id": "B", "fixed_opponents": ("y", "base")}))
    return build_model_sampler(config.model_copy(update={"train_envs": envs}), make_registry(), random.Random(0))


@pytest.mark.parametrize(
    ("strategy", "of_a", "of_b"),
    [
        *(
            (strategy, {"fixed-x", "fixed-y"}, {"fixed-y", "fixed-base"})
            for strategy in ("fixed", "random", "pfsp", "match-quality", "ts-dist", "ts-dist-biased")
        ),
        ("mirror", set(), set()),
    ],
)
def test_each_env_draws_only_its_own_fixed_opponents_if_any(strategy, of_a, of_b):
    sampler = sampler_of_two_envs(strategy)
    of_env = [{sampler.sample_opponent(env_id).uid for _ in range(300)} - {"base"} for env_id in "AB"]
    registered = [{meta.uid for meta in sampler.registry.fixed(env_id)} for env_id in "AB"]
    assert of_env == registered == [of_a, of_b]


def test_results_of_one_env_do_not_change_pfsp_in_another():
    sampler = sampler_of_two_envs("pfsp")
    registry = sampler.registry
    for _ in range(50):
        for uids, score in (({0: "base", 1: "fixed-y"}, 1.0), ({0: "base", 1: "fixed-x"}, -1.0)):
            sampler.update(uids, {0: score, 1: -score}, "A")
    assert sampler.win_rate("fixed-y", "A") > 0.9 > 0.5 == sampler.win_rate("fixed-y", "B")
    current = registry.get("base")
    in_a, in_b = (sampler.weights(current, registry.others(env_id), env_id) for env_id in "AB")
    assert in_a[0] > 50 * in_a[1], "the opponent that wins in A is drawn there"
    assert in_b == [0.25, 0.25]


@pytest.mark.parametrize("strategy", ["match-quality", "ts-dist", "ts-dist-biased"])
def test_samplers_by_rating_use_the_rating_of_the_env(strategy):
    sampler = sampler_of_two_envs(strategy, ("y", "z"))
    registry = sampler.registry
    registry.get("base").ratings["A"] = registry.get("fixed-z").ratings["A"] = Rating(25.0, 1.0)
    registry.get("fixed-y").ratings["A"] = Rating(60.0, 1.0)
    metas = [registry.get("fixed-y"), registry.get("fixed-z")]
    strong, even = sampler.weights(registry.get("base"), metas, "A")
    assert (strong > even) == (strategy == "ts-dist-biased")
    assert len(set(sampler.weights(registry.get("base"), metas, "B"))) == 1, "no game was played in B"


class OldOpponent(samplers.BaseModelSampler):
    def sample_opponent(self):
        return self.registry.current


class OldWeights(samplers.WeightedModelSampler):
    def weights(self, current, others):
        return [1.0 for _ in others]


class Oldest(samplers.BaseModelSampler):
    def sample_opponent(self, env_id):
        return self.registry.checkpoints()[0].ref


class NoSampler:
    def __init__(self, *args, **keywords):
        pass


class Undecided(samplers.BaseModelSampler):
    pass


class UndecidedEnv(samplers.BaseEnvSampler):
    pass


class EnvById(samplers.BaseEnvSampler):
    def _choose_train(self):
        return self.train_env_specs[0].env_id


class TakesNoEnvs(samplers.BaseEnvSampler):
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
        ("opponent", "OldOpponent", "(self, env_id: str)"),
        ("opponent", "OldWeights", "env_id: str)"),
    ],
)
def test_custom_sampler_that_cannot_draw_is_refused_before_the_run(key, name, message):
    league = {"opponent_sampling_strategy": "mirror", f"{key}_sampling_strategy": f"{__name__}:{name}"}
    (problem,) = check_league(make_config(1, fixed_opponents=["x"], **league))
    assert name in problem and message in problem


class Odd(samplers.WeightedModelSampler):
    def __init__(self, registry, rng, given):
        super().__init__(registry, rng)
        self.given = given

    def weights(self, current, others, env_id):
        return self.given


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        *((partial(Odd, given=weights), "2 opponents") for weights in ([math.nan, 1.0], [-1.0, 3.0], [1.0])),
        *((partial(MIXTURE, samplers=["one"], weights=weights), "weight") for weights in ([], [0.0], [1.0, 1.0])),
        (samplers.NoOpponentModelSampler, "'none'"),
        (samplers.FixedOpponentModelSampler, "fixed_opp"),
    ],
)
def test_invalid_weights_and_draws_from_nothing_are_refused(sampler, says):
    with pytest.raises(ConfigError, match=says):
        sampler(make_registry(2), random.Random(0)).sample_opponent("A")


# check


@pytest.mark.parametrize(
    ("num_actors", "league", "message"),
    [
        (1, {}, "'none'"),
        (3, {}, "num_players = 2"),
        (1, {"opponent_sampling_strategy": "fixed", "fixed_opponents": []}, "fixed_opponents"),
        (1, {"opponent_sampling_strategy": {"fixed": 1}, "fixed_opponents": []}, "fixed_opponents"),
        (2, {"opponent_lag": [7, 1]}, "opponent_lag"),
        (2, {"opponent_lag": [-1, 2]}, "opponent_lag"),
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
    for fixed, anchor in ((("base", "run:x/best"), "base"), (("base", "scripted:greedy"), "scripted:greedy")):
        env = TrainEnvSpec(env_id="A", num_players=2, num_actors=1, fixed_opponents=fixed)
        config = Config(train_envs=(env,), league=LeagueConfig(opponent_sampling_strategy="fixed"))
        assert anchors(config) == {"A": anchor}, "a frozen player is the anchor only if there is no other"


# populations


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([[0.5]], [1]),
        ([[0.5, 0.8], [0.2, 0.5]], [1, 0]),
        ([[0.5, 1, 0], [0, 0.5, 1], [1, 0, 0.5]], [1 / 3, 1 / 3, 1 / 3]),
        ([[0.5, 1, 0.25], [0, 0.5, 1], [0.75, 0, 0.5]], [0.4, 0.2, 0.4]),
        ([[0.5, 0.5], [0.5, 0.5]], [0.5, 0.5]),
    ],
)
def test_nash_weights_are_a_mixture_that_no_player_beats(points, expected):
    weights = nash_weights(tuple(map(tuple, points)))
    assert sum(weights) == pytest.approx(1)
    assert max(float(np.dot(row, weights)) for row in points) < 0.5 + 0.02
    assert weights == pytest.approx(expected, abs=0.06)


def test_population_is_the_kept_players_and_before_them_the_current_policy():
    registry = ModelRegistry(policy="main")
    strategy = {"population": {"meta": "nash"}}
    config = make_config(1, opponent_sampling_strategy=strategy, fixed_opponents=[])
    sampler = build_model_sampler(config, registry, random.Random(0))
    registry.add_policy("main/initial", 1, 0)
    assert sampler.sample_opponent("E") == registry.current
    for number in (1, 2):
        registry.add_policy(f"main/ckpt-{number}", number + 1, number)
        registry.population[f"main/ckpt-{number}"] = None
    registry.add_policy("main/ckpt-3", 4, 3)
    of_each = drawn(sampler, 200)
    assert set(of_each) == {"main/ckpt-1", "main/ckpt-2"} and min(of_each.values()) > 60, "they have not met"
    for _ in range(50):
        registry.update_ratings({0: "main/ckpt-1", 1: "main/ckpt-2"}, {0: 1.0, 1: -1.0}, "E")
    assert set(drawn(sampler, 50)) == {"main/ckpt-1"}
    registry.set_active("main/ckpt-1", False)
    assert sampler.sample_opponent("E").uid == "main/ckpt-2", "only loaded players can play"
