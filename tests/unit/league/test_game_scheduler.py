import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, TrainEnvSpec
from unstable_lite.errors import ConfigError, OpponentError
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import BaseModelSampler, UniformRandomEnvSampler, build_model_sampler
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


def test_games_use_the_observation_mode_of_their_env():
    shown_short = {"observation": "first-last"}
    scheduler = make_scheduler(train=[make_train_env(**shown_short)], evals=[make_eval_env(**shown_short)])
    assert scheduler.next_train_job().observation == scheduler.next_eval_job().observation == "first-last"
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


@pytest.mark.parametrize(("num_players", "num_actors"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 3)])
def test_current_policy_gets_num_actors_seats_and_only_they_are_collected(num_players, num_actors):
    scheduler = make_scheduler(train=[make_train_env(num_players, num_actors)])
    spec = scheduler.next_train_job()
    assert [agent.pid for agent in spec.agent_specs] == list(range(num_players))
    collected = [agent for agent in spec.agent_specs if agent.collect_data]
    assert [agent.model.uid for agent in collected] == ["ckpt-1"] * num_actors
    assert all(agent.model.kind == "fixed" for agent in spec.agent_specs if not agent.collect_data)


class ByName(BaseModelSampler):
    def sample_opponent(self, env_id):
        return "x"


def test_opponent_that_is_not_a_model_is_refused_with_its_sampler():
    with pytest.raises(ConfigError, match=r"ByName .*'x'.*ModelRef"):
        make_scheduler(f"{__name__}:ByName").next_train_job()


class CountsBySeat(BaseModelSampler):
    def state_dict(self):
        return {"games": {0: 1}}


def test_sampler_state_that_json_would_change_is_refused():
    with pytest.raises(ConfigError, match=r"CountsBySeat: .*state_dict"):
        make_scheduler(f"{__name__}:CountsBySeat").state_dict()


def test_no_opponent_is_sampled_if_the_policy_has_every_seat():
    spec = make_scheduler("none", train=[make_train_env(2, 2)]).next_train_job()
    assert {agent.model.uid for agent in spec.agent_specs} == {"ckpt-1"}
    assert all(agent.collect_data for agent in spec.agent_specs)


def test_opponent_that_is_the_current_policy_is_collected_too():
    spec = make_scheduler("mirror").next_train_job()
    assert [(agent.model.uid, agent.collect_data) for agent in spec.agent_specs] == [("ckpt-1", True)] * 2


def test_lagged_opponent_is_not_collected():
    spec = make_scheduler("lagged").next_train_job()
    assert {(agent.model.uid, agent.collect_data) for agent in spec.agent_specs} == {
        ("ckpt-1", True),
        ("base", False),
    }


def test_each_opponent_seat_gets_its_own_opponent():
    scheduler = make_scheduler(train=[make_train_env(3, 1)])
    mixed = [{agent.model.uid for agent in scheduler.next_train_job().agent_specs} for _ in range(50)]
    assert {"ckpt-1", "fixed-x", "fixed-y"} in mixed


def test_training_seats_are_shuffled_evenly():
    scheduler = make_scheduler()
    seats = Counter(policy_seat(scheduler.next_train_job()) for _ in range(1000))
    assert abs(seats[0] - 500) < 80


def test_all_players_get_the_template_of_the_env():
    env = make_train_env(prompt_template="qwen3-zs", action_extraction_fn="mine", max_turns=7)
    for strategy in ("fixed", "lagged"):
        spec = make_scheduler(strategy, train=[env]).next_train_job()
        assert {agent.prompt_template for agent in spec.agent_specs} == {"qwen3-zs"}
        assert {agent.action_extraction_fn for agent in spec.agent_specs} == {"mine"}
        assert spec.max_turns == 7


def test_new_checkpoint_plays_from_the_next_game():
    scheduler = make_scheduler()
    scheduler.registry.add_policy("ckpt-2", 2, 2)
    assert "ckpt-2" in {agent.model.uid for agent in scheduler.next_train_job().agent_specs}


# groups


def test_games_of_a_group_differ_only_in_their_number():
    scheduler, alone = make_scheduler(group_size=3), make_scheduler()
    seen = set()
    for _ in range(3):
        group = scheduler.next_train_group()
        seen |= {spec.game_idx for spec in group} | {scheduler.next_eval_job().game_idx}
        assert {spec.group_idx for spec in group} == {group[0].game_idx}
        assert len({(spec.seed, spec.agent_specs, spec.env_id, spec.max_turns) for spec in group}) == 1
    assert seen == set(range(12))
    assert alone.next_train_group() == [make_scheduler().next_train_job()]


# evaluation games


@pytest.mark.parametrize("num_players", [2, 3])
def test_evaluation_seats_are_balanced_exactly(num_players):
    scheduler = make_scheduler(evals=[make_eval_env(num_players)])
    seats = Counter(policy_seat(scheduler.next_eval_job()) for _ in range(10 * num_players))
    assert seats == dict.fromkeys(range(num_players), 10)


def test_each_env_cycles_through_its_own_seats():
    evals = [make_eval_env(env_id="V"), make_eval_env(env_id="W")]
    scheduler = make_scheduler(evals=evals)
    seats = Counter()
    for _ in range(4):
        for env in evals:
            spec = scheduler.next_eval_job(env)
            seats[spec.env_id, policy_seat(spec)] += 1
    assert set(seats.values()) == {2}


def test_each_sampling_of_an_env_cycles_through_its_own_seats():
    scheduler, seats = make_scheduler(), Counter()
    for _ in range(4):
        for temperature in (None, 0.0):
            spec = scheduler.next_eval_job(make_eval_env(temperature=temperature))
            seats[temperature, policy_seat(spec)] += 1
    assert set(seats.values()) == {2}


def test_quota_is_balanced_even_while_other_evaluations_run():
    scheduler = make_scheduler()
    seats = Counter()
    for _ in range(4):
        seats[policy_seat(scheduler.next_eval_job(make_eval_env(), label="quota"))] += 1
        scheduler.next_eval_job()
    assert seats == {0: 2, 1: 2}


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


def test_other_seats_of_an_evaluation_have_the_fixed_opponent():
    spec = make_scheduler(evals=[make_eval_env(3)]).next_eval_job(label="before")
    assert Counter(agent.model.uid for agent in spec.agent_specs) == {"ckpt-1": 1, "fixed-judge": 2}
    assert not any(agent.collect_data for agent in spec.agent_specs)
    assert spec.kind == "eval"
    assert spec.eval_label == "before"


def test_base_may_be_the_opponent_of_an_evaluation_even_of_itself():
    scheduler = make_scheduler(evals=[make_eval_env().model_copy(update={"fixed_opponent": "base"})])
    base = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
    for number, model in enumerate([base, scheduler.registry.current]):
        spec = scheduler.next_eval_job(model=model, number=number)
        seated = {agent.pid: agent.model for agent in spec.agent_specs}
        assert seated[number] == model
        assert (seated[1 - number].uid, seated[1 - number].adapter_version) == ("fixed-base", 0)
        assert seated[1 - number] != model, "the evaluated model differs from the opponent"
    assert not scheduler.registry.get("fixed-base").active, "it is not drawn in training"


def test_base_as_an_opponent_is_not_trained_even_while_it_is_the_policy():
    train = [make_train_env(fixed_opponents=("base",))]
    scheduler = make_scheduler(train=train)
    scheduler.registry.load_state_dict(ModelRegistry().state_dict())  # the base is the policy
    specs = [scheduler.next_train_job() for _ in range(20)]
    for spec in specs:
        assert {(agent.model.uid, agent.collect_data) for agent in spec.agent_specs} == {
            ("base", True),
            ("fixed-base", False),
        }


def test_opponent_is_drawn_for_the_env_of_the_game():
    train = [make_train_env(), TrainEnvSpec(env_id="U", num_players=2, num_actors=1, fixed_opponents=("z",))]
    scheduler = make_scheduler(train=train)
    met = {
        (spec.env_id, agent.model.name)
        for spec in (scheduler.next_train_job() for _ in range(100))
        for agent in spec.agent_specs
        if not agent.collect_data
    }
    assert met == {("T", "x"), ("T", "y"), ("U", "z")}


def test_single_player_evaluation_has_no_opponent():
    scheduler = make_scheduler(evals=[make_eval_env(1)])
    (agent,) = scheduler.next_eval_job().agent_specs
    assert agent.model.uid == "ckpt-1"
    assert "fixed-judge" not in scheduler.registry.get_all_models()


def test_given_model_is_evaluated_instead_of_the_current_one():
    base = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
    spec = make_scheduler().next_eval_job(model=base)
    assert spec.agent_specs[policy_seat(spec)].model == base


def test_evaluation_opponent_is_not_trained_against():
    scheduler = make_scheduler()
    scheduler.next_eval_job()
    opponents = {a.model.uid for _ in range(100) for a in scheduler.next_train_job().agent_specs}
    assert opponents == {"ckpt-1", "fixed-x", "fixed-y"}


# seeds and numbers


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 10**6))
def test_seeds_of_training_and_evaluation_never_overlap(run_seed, train_number, eval_number):
    train, evaluation = game_seed(run_seed, "train", train_number), game_seed(run_seed, "eval", eval_number)
    assert train % 2 == 0
    assert evaluation % 2 == 1
    assert 0 <= train < 2**31
    assert 0 <= evaluation < 2**31


def test_seeds_differ_between_games_and_runs():
    seeds = {game_seed(run_seed, "train", n) for run_seed in (0, 1) for n in range(1000)}
    assert len(seeds) > 1995


@given(st.lists(st.booleans(), max_size=30))
def test_games_are_numbered_uniquely_and_seeded_per_kind(is_eval):
    scheduler, only_train, only_eval = make_scheduler(), make_scheduler(), make_scheduler()
    specs = []
    for evaluate in is_eval:
        specs.append(scheduler.next_eval_job() if evaluate else scheduler.next_train_job())
        twin = only_eval.next_eval_job() if evaluate else only_train.next_train_job()
        assert specs[-1].seed == twin.seed
        assert specs[-1].agent_specs == twin.agent_specs
    assert [spec.game_idx for spec in specs] == list(range(len(specs)))


def test_same_run_seed_gives_the_same_games():
    def games(run_seed):
        scheduler = make_scheduler({"mirror": 1, "fixed": 1}, run_seed=run_seed)
        return [scheduler.next_train_job() for _ in range(30)]

    assert games(1) == games(1)
    assert games(1) != games(2)


def test_global_random_stream_is_neither_read_nor_advanced():
    scheduler, twin = make_scheduler(), make_scheduler()
    random.seed(0)
    state = random.getstate()
    games = [scheduler.next_train_job() for _ in range(5)] + [scheduler.next_eval_job()]
    assert random.getstate() == state
    random.seed(1)
    assert games == [twin.next_train_job() for _ in range(5)] + [twin.next_eval_job()]


# results


def test_training_and_evaluation_games_are_rated():
    scheduler = make_scheduler()
    for spec in (scheduler.next_train_job(), scheduler.next_eval_job()):
        rewards = [-1.0, -1.0]
        rewards[policy_seat(spec)] = 1.0
        scheduler.update(make_record(spec, rewards))
        assert scheduler.registry.get("ckpt-1").ratings[spec.env_id].mu > 25


def test_void_game_changes_no_rating():
    scheduler = make_scheduler()
    before = scheduler.registry.state_dict()
    scheduler.update(make_record(scheduler.next_train_job(), [], end="void"))
    assert scheduler.registry.state_dict() == before


class Recording(UniformRandomEnvSampler):
    def update(self, env_id, avg_actor_reward, avg_opponent_reward):
        self.seen = (env_id, avg_actor_reward, avg_opponent_reward)


def test_env_sampler_gets_the_results_of_actors_and_opponents():
    scheduler = make_scheduler(train=[make_train_env(3, 2)], env_sampler=Recording)
    spec = scheduler.next_train_job()
    rewards = [1.0 if agent.collect_data else -1.0 for agent in spec.agent_specs]
    scheduler.update(make_record(spec, rewards))
    assert scheduler._env_sampler.seen == ("T", 1.0, -1.0)


def test_mirror_game_reports_no_opponent_result():
    scheduler = make_scheduler("none", train=[make_train_env(2, 2)], env_sampler=Recording)
    scheduler.update(make_record(scheduler.next_train_job(), [1.0, -1.0]))
    assert scheduler._env_sampler.seen == ("T", 0.0, None)


def test_env_sampler_gets_no_evaluation_results():
    scheduler = make_scheduler(env_sampler=Recording)
    scheduler.update(make_record(scheduler.next_eval_job(), [1.0, -1.0]))
    assert not hasattr(scheduler._env_sampler, "seen")


# restart


def test_restored_scheduler_continues_with_the_same_games():
    strategy = {"mirror": 1, "lagged": 1, "fixed": 1}
    before, after = make_scheduler(strategy), make_scheduler(strategy)
    for _ in range(7):
        before.next_train_job()
        before.next_eval_job()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.registry.load_state_dict(json.loads(json.dumps(before.registry.state_dict())))
    for _ in range(20):
        assert after.next_train_job() == before.next_train_job()
        assert after.next_eval_job() == before.next_eval_job()


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


@pytest.mark.parametrize("strategy", ["mirror", "pfsp", {"mirror": 1, "lagged": 1}, {"mirror": 1, "pfsp": 1}], ids=str)
def test_replaced_samplers_start_from_scratch_with_a_message(strategy):
    before, after = make_scheduler({"mirror": 1, "fixed": 1}), make_scheduler(strategy)
    before.next_train_job()
    (message,) = after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert "MirrorModelSampler" in message and "FixedOpponentModelSampler" in message
    assert after.next_train_job().game_idx == before.next_train_job().game_idx


def test_mixture_of_one_differs_from_that_sampler_alone():
    alone, mixture = make_scheduler("mirror"), make_scheduler({"mirror": 1})
    assert len(mixture.load_state_dict(alone.state_dict())) == 1
    assert len(alone.load_state_dict(mixture.state_dict())) == 1


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
        record.trajectories = [
            PlayerTrajectory(
                pid=agent.pid,
                env_id=spec.env_id,
                game_idx=spec.game_idx,
                model=agent.model,
                steps=[None] * steps_of_env[spec.env_id],
            )
            for agent in collected
        ]
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


def test_state_of_shares_by_steps_survives_a_restart():
    first = make_scheduler({"mirror": 0.3, "fixed": 0.7}, shares_by="steps")
    for _ in range(50):
        first.update(make_record(first.next_train_job(), [1.0, -1.0]))
    second = make_scheduler({"mirror": 0.3, "fixed": 0.7}, shares_by="steps", run_seed=0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.next_train_job() for _ in range(50)] == [second.next_train_job() for _ in range(50)]
