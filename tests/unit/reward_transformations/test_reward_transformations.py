import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fakes import game_records
from fakes.game_records import CONTEXT, make_trajectory
from unstable_lite import reward_transformations as transforms
from unstable_lite.config import Config
from unstable_lite.config.training import Transformation
from unstable_lite.errors import ConfigError
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.reward_transformations import FINAL, SAMPLING, STEP, build_reward_transformations, build_transforms
from unstable_lite.types import Opponent

FINAL_ARGUMENTS, STEP_ARGUMENTS = ("reward", "pid", "env_id"), ("player_traj", "step_index", "reward")


def make_step(reward=0.0, env_id="E", **changes):
    return game_records.make_step(reward=reward, env_id=env_id, **changes)


def make_context(opponent_kind):
    opponents = (Opponent(pid=1, uid="base", kind=opponent_kind),)
    position = {"turn": 4, "player_turn": 2, "num_turns": 5}
    return structs.replace(CONTEXT, game_idx=3, opponents=opponents, is_cut_off=True, **position)


def rewards_of(steps):
    return [step.reward for step in steps]


# final


@pytest.mark.parametrize("name", ["RoleAdvantageFormatter", "RoleAdvantageByEnvFormatter"])
def test_reward_is_compared_with_the_average_of_earlier_ones_of_the_seat_and_kind_of_opponent(name):
    role = FINAL[name](tau=0.5)
    assert [role(reward, 0, "E") for reward in (1.0, 4.0, 1.0)] == [1.0, 3.0, -2.0]
    # Weights 1/2, 1/4, 1/8, normalized: (4 * 1 + 2 * 4 + 1 * 1) / 7.
    assert role(0.0, 0, "E") == pytest.approx(-13 / 7)
    role = FINAL[name]()
    assert [role(0.1, 0, "E") for _ in range(300)] == [0.1] + [0.0] * 299, "equal rewards have exactly 0"
    role, is_by_env = FINAL[name](tau=0.5), name == "RoleAdvantageByEnvFormatter"
    mirror, scripted = make_context("mirror"), make_context("scripted")
    assert role(1.0, 0, "A", mirror) == 1.0
    assert role(1.0, 1, "A", mirror) == 1.0
    assert role(-1.0, 0, "A", scripted) == -1.0
    assert role(1.0, 0, "B", mirror) == (1.0 if is_by_env else 0.0)
    assert role(1.0, 0, "A", mirror) == 0.0
    assert FINAL[name](0.5, tau=0.0)(1.0, 0, "E") == 0.5, "they start at the configured value"
    for tau in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="tau"):
            FINAL[name](tau=tau)


def test_scores_become_win_draw_and_loss_values():
    transform = transforms.WinDrawLossFormatter(win_reward=2.0, draw_reward=0.5, loss_reward=-3.0)
    assert [transform(score, 0, "E") for score in (0.1, 0.0, -0.1)] == [2.0, 0.5, -3.0]


# step


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (transforms.RewardForFormat(reward=1.5, penalty=-0.5), [1.5, -0.5, 1.5, 1.5]),
        (transforms.PenaltyForInvalidMove(reward=1.0, penalty=-1.0), [1.0, 1.0, -1.0, 1.0]),
        (transforms.PenaltyForCutOff(penalty=-0.5), [0.0, 0.0, 0.0, -0.5]),
    ],
)
def test_steps_are_rewarded_or_penalised_one_by_one(transform, expected):
    whole = structs.replace(make_context("scripted"), is_cut_off=False)
    steps = [make_step(), make_step(is_right=False), make_step(is_invalid=True), make_step()]
    steps[1].context, steps[3].context = whole, make_context("scripted")
    compose = transforms.ComposeStepRewardTransforms([transform])
    assert [compose(make_trajectory(*steps), i, 1.0) - 1.0 for i in range(4)] == expected
    assert repr(transform) in repr(compose)


# sampling


def test_rewards_are_centred_and_scaled_only_with_z_score_which_has_a_floor():
    given = [make_step(r) for r in (1.0, 2.0, 6.0)]
    assert rewards_of(transforms.NormalizeRewards()(given)) == [-2.0, -1.0, 3.0]
    deviation = math.sqrt(14 / 3)
    expected = [-2 / deviation, -1 / deviation, 3 / deviation]
    assert rewards_of(transforms.NormalizeRewards(z_score=True)(given)) == pytest.approx(expected)
    assert rewards_of(given) == [1.0, 2.0, 6.0], "the given steps stay"
    transform = transforms.NormalizeRewards(z_score=True)
    for _ in range(20):
        transform([make_step(reward=1.0), make_step(reward=-1.0)])
    assert rewards_of(transform([make_step(0.01), make_step(-0.01)])) == pytest.approx([0.1, -0.1], rel=1e-3)


@pytest.mark.parametrize("transform", [transforms.NormalizeRewards, transforms.NormalizeRewardsByEnv])
@pytest.mark.parametrize("z_score", [True, False])
def test_residues_of_equal_rewards_become_zeros(transform, z_score):
    def batch(baselines, reward=1.0):
        steps = [make_step(reward - baseline) for baseline in baselines]
        for step, baseline in zip(steps, baselines, strict=True):
            step.step_info["baseline"] = baseline
        return steps

    seat_1 = [replace(step, pid=1) for step in batch([-0.7, -0.8], reward=-1.0)]
    given = batch([0.7, 0.8, 0.9]) + seat_1
    assert rewards_of(transform(z_score)(given)) == [0.0] * 5
    # One different result of a seat is a signal for that seat only.
    is_zero = [reward == 0 for reward in rewards_of(transform(z_score)(given + batch([0.9], reward=-1.0)))]
    assert is_zero == [False] * 3 + [True] * 2 + [False]


def test_each_env_and_seat_has_its_own_mean_or_previous_result():
    steps = [make_step(1.0, "A"), make_step(10.0, "B"), make_step(3.0, "A"), make_step(30.0, "B")]
    normalized = transforms.NormalizeRewardsByEnv()(steps)
    assert rewards_of(normalized) == [-1.0, -10.0, 1.0, 10.0]
    assert [s.env_id for s in normalized] == ["A", "B", "A", "B"]
    transform = transforms.NormalizeRewardsByEnv()
    transform([make_step(1.0)])
    given = [make_step(-1.0), replace(make_step(1.0), pid=1), replace(make_step(3.0), pid=1)]
    assert rewards_of(transform(given)) == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("transform", [transforms.NormalizeRewards(True), transforms.NormalizeRewardsByEnv(True)])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [1e10 / 3] * 7])
def test_equal_rewards_become_zeros(transform, rewards):
    assert rewards_of(transform([make_step(r) for r in rewards])) == pytest.approx([0.0] * len(rewards), abs=1e-6)


@given(
    rewards=st.lists(st.floats(min_value=-1e100, max_value=1e100), max_size=20),
    envs=st.lists(st.sampled_from("AB"), min_size=20, max_size=20),
    z_score=st.booleans(),
)
def test_normalisation_never_gives_non_finite_rewards(rewards, envs, z_score):
    steps = [make_step(reward, env) for reward, env in zip(rewards, envs, strict=False)]
    for transform in (transforms.NormalizeRewards(z_score), transforms.NormalizeRewardsByEnv(z_score)):
        assert all(math.isfinite(reward) for reward in rewards_of(transform(steps)))


# composition


def test_compositions_apply_in_order_can_be_extended_and_give_the_context_to_a_parameter_of_that_name():
    context = make_context("mirror")
    final = transforms.ComposeFinalRewardTransforms([lambda reward, pid, env_id: reward + 1])
    final.register(lambda reward, pid, env_id, context: reward * context.num_turns)
    assert final(1.0, 0, "E", context) == 10.0

    step = transforms.ComposeStepRewardTransforms([lambda trajectory, index, reward: reward + 1])
    step.register(lambda trajectory, index, reward, *, context: reward * (-1 if context.is_cut_off else 1))
    assert step(make_trajectory(replace(make_step(), context=context)), 0, 1.0) == -2.0

    sampling = transforms.ComposeSamplingRewardTransforms([transforms.NormalizeRewards()])
    sampling.register(lambda steps: list(reversed(steps)))
    assert rewards_of(sampling([make_step(1.0), make_step(3.0)])) == [1.0, -1.0]


@pytest.mark.parametrize(("name", "factor"), [("Doubled", 3), ("ByOpponent", 2)])
def test_custom_class_is_found_by_module_and_name(name, factor):
    entry = Transformation(name=f"{__name__}:{name}", factor=factor)
    compose = transforms.ComposeFinalRewardTransforms(build_transforms([entry], FINAL, FINAL_ARGUMENTS))
    assert compose(2.0, 0, "E", make_context("scripted")) == 2.0 * factor


# by name


def test_default_config_builds_the_documented_transforms():
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}
    config = resolve_defaults(Config.model_validate({"train_envs": [env]}))
    final, step, sampling = build_reward_transformations(config.rewards)
    assert repr(final.transforms) == "[RoleAdvantageByEnvFormatter(default_role_adv=0.0, tau=0.05)]"
    assert repr(step.transforms) == (
        "[RewardForFormat(reward=1.5, penalty=0), PenaltyForInvalidMove(reward=1.0, penalty=-1.0)]"
    )
    assert repr(sampling.transforms) == "[NormalizeRewardsByEnv(z_score=True)]"


def test_every_registered_transform_can_be_built_and_all_mistakes_are_reported_at_once():
    for registry, arguments in ((FINAL, "reward pid env_id"), (STEP, "traj index reward"), (SAMPLING, "steps")):
        built = build_transforms(registry, registry, arguments.split())
        assert [type(t).__name__ for t in built] == list(registry)
    with pytest.raises(ConfigError) as caught:
        build_transforms(["Nope", Transformation(name="RewardForFormat", a=1, b=2)], STEP, STEP_ARGUMENTS)
    assert len(caught.value.problems) == 3


class Doubled:
    def __init__(self, factor: float = 2):
        self.factor = factor

    def __call__(self, reward, pid, env_id):
        return self.factor * reward


class ByOpponent(Doubled):
    def __call__(self, reward, pid, env_id, context):
        return reward if context.opponent_kinds == "mirror" else self.factor * reward


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("RewardForFormt", "did you mean 'RewardForFormat'"),
        (Transformation(name="RewardForFormat", rewrd=1), "did you mean 'reward'"),
        (Transformation(name="RewardForFormat", reward="much"), "float"),
        (Transformation(name="RewardForFormat", reward=True), "float"),
        ("no_such_module:Transform", "no_such_module"),
        ("math:Transform", "'Transform'"),
        (":Transform", ":Transform"),
    ],
)
def test_mistake_in_a_name_or_keyword_gets_a_suggestion(entry, says):
    with pytest.raises(ConfigError, match=says):
        build_transforms([entry], STEP, STEP_ARGUMENTS)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nonsense", "NameError: name 'nonsense' is not defined"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import no_such_module", "'no_such_module'"),
        ("def Transform(): return {}['a key']", "KeyError: 'a key'"),
        ("class Transform: pass", "call"),
        ("class Transform:\n    def __call__(self, traj, reward): pass", "(player_traj, step_index, reward)"),
        ("def Transform(traj, index, reward): return reward", "class"),
        ("class Transform:\n    def __call__(self, *_): pass\n    def state_dict(self): return {}", "load_state_dict"),
    ],
)
def test_fault_in_a_custom_module_is_reported_with_its_name(tmp_path, monkeypatch, source, says):
    (tmp_path / "of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_a_user", raising=False)
    with pytest.raises(ConfigError, match=rf"'of_a_user:Transform'.*{re.escape(says)}"):
        build_transforms(["of_a_user:Transform"], STEP, STEP_ARGUMENTS)


@pytest.mark.parametrize(
    ("returned", "says"), [(None, "None"), ([], r"\[\]"), *((value, "reward") for value in (math.nan, math.inf, "1"))]
)
def test_sampling_transform_that_returns_no_steps_or_rewards_is_named(returned, says):
    def forgetful(steps):
        return returned if not returned else [replace(step, reward=returned) for step in steps]

    with pytest.raises(ConfigError, match=rf"forgetful.* {says}"):
        transforms.ComposeSamplingRewardTransforms([forgetful])([make_step(1.0)])
    (step,) = transforms.ComposeSamplingRewardTransforms([lambda steps: [replace(steps[0], reward=np.float32(2))]])(
        [make_step(1.0)]
    )
    assert type(step.reward) is float


class Keeps:
    def __init__(self, state):
        self.state = state

    def __call__(self, reward, pid, env_id):
        return reward

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state", [{"average": {0: 0.5}}, {"seen": {1}}, {"sums": np.zeros(2)}, {"pair": (1, 2)}, {"average": math.nan}]
)
def test_state_that_json_would_change_is_refused_on_save_and_that_of_other_parts_on_load(state):
    with pytest.raises(ConfigError, match=r"Keeps: .*state_dict"):
        transforms.ComposeFinalRewardTransforms([Keeps(state)]).state_dict()
    for lasting in ({"average": {"0": np.float64(0.5)}}, {"all": [1, math.inf, None]}):
        saved = transforms.ComposeFinalRewardTransforms([Keeps(lasting)]).state_dict()
        assert saved["states"] == [lasting]
    with pytest.raises(ConfigError, match="RoleAdvantageByEnvFormatter"):
        transforms.ComposeFinalRewardTransforms([transforms.RoleAdvantageByEnvFormatter()]).load_state_dict(saved)
