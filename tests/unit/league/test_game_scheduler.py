import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.adapters.frozen import FIRST_FROZEN_VERSION
from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, TrainEnvSpec
from unstable_lite.errors import ConfigError, OpponentError
from unstable_lite.league.game_scheduler import GameScheduler, new_game
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import (
    BaseModelSampler,
    MixtureModelSampler,
    UniformRandomEnvSampler,
    build_model_sampler,
)
from unstable_lite.rng import game_seed
from unstable_lite.types import GameRecord, ModelRef, PlayerTrajectory


def make_train_env(num_players=2, num_actors=1, **kwargs):
    return TrainEnvSpec(env_id="T", num_players=num_players, num_actors=num_actors, **kwargs)


def make_eval_env(num_players=2, env_id="V", **kwargs):
    return EvalEnvSpec(env_id=env_id, num_players=num_players, fixed_opponent="judge", **kwargs)


def make_scheduler(
    strategy="fixed", train=None, evals=None, run_seed=0, env_sampler=UniformRandomEnvSampler, **options
):
    registry = ModelRegistry()
    registry.add_policy("ckpt-1", 1, 1)
    league = LeagueConfig(opponent_sampling_strategy=strategy, fixed_opponents=("x", "y"))
    train = train or [make_train_env()]
    config = Config(train_envs=tuple(train), league=league)
    model_sampler = build_model_sampler(config, registry, random.Random(run_seed))
    envs = env_sampler(train, evals or [make_eval_env()])
    return GameScheduler(model_sampler, envs, run_seed, **options)


def make_record(spec, rewards, end="natural"):
    return GameRecord(spec=spec, turns=[], trajectories=[], rewards=dict(enumerate(rewards)), outcomes={}, end=end)


def policy_seat(spec):
    (agent,) = [agent for agent in spec.agent_specs if agent.model.kind == "checkpoint"]
    return agent.pid


# training games


@pytest.mark.parametrize("strategy", ["fixed", "lagged"])
def test_games_and_all_their_players_are_set_up_as_their_env_says(strategy):
    settings = {"observation": "first-last", "prompt_template": "qwen3-zs", "action_extraction_fn": "mine"}
    settings["max_turns"] = 7
    envs = {"train": [make_train_env(**settings)], "evals": [make_eval_env(**settings)]}
    scheduler = make_scheduler(strategy, **envs)
    for spec in (scheduler.next_train_job(), scheduler.next_eval_job()):
        assert (spec.observation, spec.max_turns) == ("first-last", 7)
        players = {(agent.prompt_template, agent.action_extraction_fn) for agent in spec.agent_specs}
        assert players == {("qwen3-zs", "mine")}
    assert make_scheduler().next_train_job().observation == "env"


def test_unavailable_opponent_is_redrawn_and_checked_once_per_game():
    asked = []

    def can_play(model):
        asked.append(model.name)
        return model.name == "y"

    scheduler = make_scheduler(train=[make_train_env(num_players=4)])
    for _ in range(20):
        asked.clear()
        spec = scheduler.next_train_job(can_play)
        assert {agent.model.name for agent in spec.agent_specs} == {None, "y"}
        assert len(asked) == len(set(asked))
    with pytest.raises(OpponentError, match="play"):
        scheduler.next_train_job(lambda _model: False)


def test_eval_env_with_an_unavailable_opponent_is_skipped():
    scheduler = make_scheduler(evals=[make_eval_env(), EvalEnvSpec(env_id="W", num_players=2, fixed_opponent="other")])
    specs = [scheduler.next_eval_job(can_play=lambda model: model.name == "judge") for _ in range(10)]
    assert {spec.env_id for spec in specs} == {"V"}
    assert Counter(policy_seat(spec) for spec in specs) == {0: 5, 1: 5}
    with pytest.raises(OpponentError, match="play"):
        scheduler.next_eval_job(can_play=lambda _model: False)


@pytest.mark.parametrize(
    ("strategy", "num_players", "num_actors", "own", "others"),
    [
        ("fixed", 1, 1, 1, set()),
        ("fixed", 2, 1, 1, {"fixed-x", "fixed-y"}),
        ("fixed", 2, 2, 2, set()),
        ("fixed", 4, 1, 1, {"fixed-x", "fixed-y"}),
        ("fixed", 4, 3, 3, {"fixed-x", "fixed-y"}),
        ("none", 2, 2, 2, set()),
        ("lagged", 2, 1, 1, {"base"}),
        ("mirror", 2, 1, 2, set()),  # an opponent that is the current policy is collected, too
    ],
)
def test_only_the_seats_of_the_current_policy_are_collected(strategy, num_players, num_actors, own, others):
    scheduler = make_scheduler(strategy, train=[make_train_env(num_players, num_actors)])
    met = set()
    for _ in range(20):
        spec = scheduler.next_train_job()
        assert [agent.pid for agent in spec.agent_specs] == list(range(num_players))
        collected = [agent.model.uid for agent in spec.agent_specs if agent.collect_data]
        assert collected == ["ckpt-1"] * own
        met |= {agent.model.uid for agent in spec.agent_specs if not agent.collect_data}
    assert met == others


class ByName(BaseModelSampler):
    def sample_opponent(self, env_id):
        return "x"


def test_sampler_with_an_invalid_opponent_or_state_is_refused():
    with pytest.raises(ConfigError, match=r"ByName .*'x'.*ModelRef"):
        make_scheduler(f"{__name__}:ByName").next_train_job()
    with pytest.raises(ConfigError, match=r"CountsBySeat: .*state_dict"):
        make_scheduler(f"{__name__}:CountsBySeat").state_dict()


class CountsBySeat(BaseModelSampler):
    def state_dict(self):
        return {"games": {0: 1}}


def test_training_seats_are_shuffled_evenly_and_get_their_own_opponents():
    scheduler = make_scheduler()
    seats = Counter(policy_seat(scheduler.next_train_job()) for _ in range(1000))
    assert abs(seats[0] - 500) < 80
    scheduler = make_scheduler(train=[make_train_env(3, 1)])
    mixed = [{agent.model.uid for agent in scheduler.next_train_job().agent_specs} for _ in range(50)]
    assert {"ckpt-1", "fixed-x", "fixed-y"} in mixed


# evaluation games


@pytest.mark.parametrize("num_players", [2, 3])
@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([{}], id="one env"),
        pytest.param([{"env_id": "V"}, {"env_id": "W"}], id="each env"),
        pytest.param([{"temperature": None}, {"temperature": 0.0}], id="each sampling of an env"),
        pytest.param([{"label": "quota"}, {}], id="a quota beside other evaluations"),
    ],
)
def test_each_kind_of_evaluation_cycles_through_its_own_seats(num_players, turns):
    scheduler, seats = make_scheduler(evals=[make_eval_env(num_players)]), Counter()
    for _ in range(4 * num_players):
        for kind, changes in enumerate(turns):
            env = {name: value for name, value in changes.items() if name != "label"}
            spec = scheduler.next_eval_job(make_eval_env(num_players, **env), label=changes.get("label"))
            seats[kind, policy_seat(spec)] += 1
    assert seats == {(kind, seat): 4 for kind in range(len(turns)) for seat in range(num_players)}


def test_evaluations_with_a_quota_share_seeds_from_every_seat():
    scheduler, env = make_scheduler(), make_eval_env(3)
    played = {}
    for label in ("before", "after"):
        specs = [scheduler.next_eval_job(env, label=label, number=number) for number in range(30)]
        played[label] = [(spec.seed, policy_seat(spec)) for spec in specs]
        scheduler.next_eval_job()
        scheduler.next_train_job()
    assert played["before"] == played["after"]
    assert len(set(played["before"])) == 30
    seeds = Counter(seed for seed, _ in played["before"])
    assert set(seeds.values()) == {3}
    assert all(seed % 2 for seed in seeds)
    resumed = make_scheduler()  # no state is kept: a repeated evaluation plays the same seeds
    assert resumed.next_eval_job(env, label="after", number=4).seed == played["after"][4][0]


def test_other_seats_of_an_evaluation_have_the_fixed_opponent_if_any():
    spec = make_scheduler(evals=[make_eval_env(3)]).next_eval_job(label="before")
    assert Counter(agent.model.uid for agent in spec.agent_specs) == {"ckpt-1": 1, "fixed-judge": 2}
    assert not any(agent.collect_data for agent in spec.agent_specs)
    assert spec.kind == "eval"
    assert spec.eval_label == "before"
    scheduler = make_scheduler(evals=[make_eval_env(1)])
    assert [agent.model.uid for agent in scheduler.next_eval_job().agent_specs] == ["ckpt-1"]
    assert "fixed-judge" not in scheduler.registry.get_all_models()


def test_base_may_be_the_opponent_even_of_itself():
    scheduler = make_scheduler(evals=[make_eval_env().model_copy(update={"fixed_opponent": "base"})])
    base = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
    for number, model in enumerate([base, scheduler.registry.current]):
        spec = scheduler.next_eval_job(model=model, number=number)
        seated = {agent.pid: agent.model for agent in spec.agent_specs}
        assert seated[number] == model
        assert (seated[1 - number].uid, seated[1 - number].adapter_version) == ("fixed-base", 0)
        assert seated[1 - number] != model, "the evaluated model differs from the opponent"
    assert not scheduler.registry.get("fixed-base").active, "it is not drawn in training"
    scheduler = make_scheduler(train=[make_train_env(fixed_opponents=("base",))])
    scheduler.registry.load_state_dict(ModelRegistry().state_dict())  # the base is the policy
    for _ in range(20):
        players = {(agent.model.uid, agent.collect_data) for agent in scheduler.next_train_job().agent_specs}
        assert players == {("base", True), ("fixed-base", False)}


# seeds and numbers


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 10**6))
def test_seeds_of_training_and_evaluation_never_overlap(run_seed, train_number, eval_number):
    train, evaluation = game_seed(run_seed, "train", train_number), game_seed(run_seed, "eval", eval_number)
    assert (train % 2, evaluation % 2) == (0, 1)
    assert 0 <= train < 2**31 and 0 <= evaluation < 2**31


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 3))
def test_games_are_numbered_uniquely_and_seeded_per_kind_and_group(is_eval, group_size):
    scheduler, only_train, only_eval = (make_scheduler(group_size=group_size) for _ in range(3))
    specs = []
    for evaluate in is_eval:
        group = [scheduler.next_eval_job()] if evaluate else scheduler.next_train_group()
        twin = only_eval.next_eval_job() if evaluate else only_train.next_train_group()[0]
        for spec in group:
            assert (spec.seed, spec.agent_specs, spec.env_id) == (twin.seed, twin.agent_specs, twin.env_id)
            assert spec.group_idx == (group[0].game_idx if group_size > 1 and not evaluate else None)
        specs += group
    assert [spec.game_idx for spec in specs] == list(range(len(specs)))


def test_same_run_seed_gives_the_same_games_with_any_global_stream():
    def games(run_seed, global_seed):
        random.seed(global_seed)
        state, scheduler = random.getstate(), make_scheduler({"mirror": 1, "fixed": 1}, run_seed=run_seed)
        found = [scheduler.next_train_job() for _ in range(30)] + [scheduler.next_eval_job()]
        assert random.getstate() == state, "the global stream belongs to the games"
        return found

    assert games(1, 0) == games(1, 1) != games(2, 0)
    assert len({game_seed(run_seed, "train", n) for run_seed in (0, 1) for n in range(1000)}) > 1995


# results


class Recording(UniformRandomEnvSampler):
    def update(self, env_id, avg_actor_reward, avg_opponent_reward):
        self.seen = (env_id, avg_actor_reward, avg_opponent_reward)


@pytest.mark.parametrize(
    ("num_players", "num_actors", "expected"), [(3, 2, ("T", 1.0, -1.0)), (2, 2, ("T", 1.0, None))]
)
def test_training_and_evaluation_games_are_rated_and_only_training_games_change_samplers(
    num_players, num_actors, expected
):
    scheduler = make_scheduler("pfsp", train=[make_train_env(num_players, num_actors)], env_sampler=Recording)
    spec = scheduler.next_eval_job()
    scheduler.update(make_record(spec, [1.0 if pid == policy_seat(spec) else -1.0 for pid in range(2)]))
    rating = scheduler.registry.get("ckpt-1").ratings
    assert rating["V"].mu > 25
    assert not hasattr(scheduler._env_sampler, "seen") and not scheduler._samplers[""].state_dict()["results"]
    spec = scheduler.next_train_job()
    scheduler.update(make_record(spec, [1.0 if agent.collect_data else -1.0 for agent in spec.agent_specs]))
    assert scheduler._env_sampler.seen == expected
    is_rated, met = "T" in rating and rating["T"].mu > 25, scheduler._samplers[""].state_dict()["results"]["T"]
    assert is_rated == bool(met) == (num_players > num_actors), "a game against itself says nothing"


class Old(BaseModelSampler):
    """Sampler of an earlier version, whose `update` knows no teams."""

    def sample_opponent(self, env_id):
        return self.registry.fixed(env_id)[0].ref

    def update(self, uids, scores, env_id):
        self.seen = (dict(uids), dict(scores), env_id)


def test_teams_reach_ratings_and_samplers_even_older_ones():
    scheduler = make_scheduler("pfsp", train=[make_train_env(4, 1)], env_sampler=Recording)
    older = Old(scheduler.registry, random.Random(0))
    scheduler._samplers[""] = MixtureModelSampler(
        scheduler.registry, random.Random(0), [scheduler._samplers[""], older], [1, 1]
    )
    spec = scheduler.next_train_job()
    own = policy_seat(spec)
    opponents = [agent.model.uid for agent in spec.agent_specs if agent.pid != own]
    record = make_record(spec, [1.0 if pid // 2 == own // 2 else -1.0 for pid in range(4)])
    record.teams = {pid: str(pid // 2) for pid in range(4)}
    scheduler.update(record)
    assert scheduler.registry.get("ckpt-1").wins == 1
    assert older.seen[2] == "T"
    assert set(scheduler._samplers[""].samplers[0].state_dict()["results"]["T"]) <= set(opponents)
    assert scheduler._env_sampler.seen == ("T", 1.0, -1.0)


# restart


def test_games_in_flight_are_saved_and_dropped_after_a_restart():
    scheduler = make_scheduler(group_size=2)
    trained, other = scheduler.next_train_group()
    evaluated, void = scheduler.next_eval_job(), scheduler.next_train_job()
    scheduler.update(make_record(trained, [1.0, -1.0]))
    scheduler.update(make_record(void, [], end="void"))
    state = json.loads(json.dumps(scheduler.state_dict()))
    assert state["in_flight"] == [other.game_idx, evaluated.game_idx]
    restored = make_scheduler(group_size=2)
    restored.load_state_dict(state)
    assert restored.state_dict() == state | {"in_flight": []}


@pytest.mark.parametrize("strategy", ["mirror", "pfsp", {"mirror": 1, "lagged": 1}, {"mirror": 1}], ids=str)
@pytest.mark.parametrize("saved", ["lagged", {"mirror": 1, "fixed": 1}], ids=str)
def test_replaced_samplers_start_from_scratch_with_a_message(strategy, saved):
    before, after = make_scheduler(saved), make_scheduler(strategy)
    before.next_train_job()
    (message,) = after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert before.samplers[0].kind in message and after.samplers[0].kind in message
    assert after.next_train_job().game_idx == before.next_train_job().game_idx
    alone, mixture = make_scheduler("mirror"), make_scheduler({"mirror": 1})
    assert len(mixture.load_state_dict(alone.state_dict())) == len(alone.load_state_dict(mixture.state_dict())) == 1


# shares


def shares_of_steps(shares_by, strategy, steps_of_env):
    """Return shares of the steps by env and by self-play; each seat brings `steps_of_env` steps."""
    envs = [TrainEnvSpec(env_id=env_id, num_players=2, num_actors=1) for env_id in steps_of_env]
    scheduler = make_scheduler(strategy, train=envs, shares_by=shares_by)
    steps = Counter()
    for _ in range(4000):
        spec = scheduler.next_train_job()
        record = make_record(spec, [1.0, -1.0])
        collected = [agent for agent in spec.agent_specs if agent.collect_data]
        shared = {"env_id": spec.env_id, "game_idx": spec.game_idx, "steps": [None] * steps_of_env[spec.env_id]}
        record.trajectories = [PlayerTrajectory(pid=agent.pid, model=agent.model, **shared) for agent in collected]
        steps[spec.env_id, len(collected) == 2] += len(collected) * steps_of_env[spec.env_id]
        scheduler.update(record)
    return {kind: count / steps.total() for kind, count in steps.items()}


def test_shares_by_steps_are_shares_of_the_collected_steps():
    given_ = {"mirror": 0.3, "fixed": 0.7}
    by_steps = shares_of_steps("steps", given_, {"short": 2, "long": 20})
    expected = {(env_id, is_mirror): 0.5 * (0.3 if is_mirror else 0.7) for env_id, is_mirror in by_steps}
    assert by_steps == pytest.approx(expected, abs=0.06)
    by_games = shares_of_steps("games", given_, {"short": 2, "long": 20})
    assert by_games["long", True] == pytest.approx(0.3 * 2 * 20 / (1.3 * 22), abs=0.06)


def test_average_plays_as_one_checkpoint_drawn_for_each_game():
    registry = ModelRegistry()
    average = registry.add_fixed("average:other/linear/ckpt-1,3", active=False)
    after = registry.add_fixed("adapter:x", active=False)
    assert (average.adapter_version, after.adapter_version) == (FIRST_FROZEN_VERSION, FIRST_FROZEN_VERSION + 2)
    env, drawn = EvalEnvSpec(env_id="Nim-v0-train", num_players=3), Counter[int]()
    for seed in range(1000):
        spec = new_game(env, [average, average, after], 0, "eval", seed)
        one, other, fixed = (agent.model for agent in spec.agent_specs)
        assert one == other and (one.uid, one.name, fixed) == (average.uid, average.name, after)
        drawn[one.adapter_version - FIRST_FROZEN_VERSION] += 1
    assert drawn.total() == drawn[0] + drawn[1] == 1000
    assert drawn[1] / 1000 == pytest.approx(0.75, abs=0.05)
