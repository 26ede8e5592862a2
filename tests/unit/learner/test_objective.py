"""The policy's loss as configured, compared with its formula token by token: weights, clipping, regularisation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.learner_fixtures import VOCAB
from fakes.unrolled import (
    MAX_GENERATION_LEN,
    double,
    gradient,
    grads_of,
    importance,
    is_equal,
    largest_difference,
    logprobs,
    policy_loss,
    snapshot,
)
from unstable_lite.errors import RequestError
from unstable_lite.learner import LOGITS_CHUNK_TOKENS
from unstable_lite.learner.algorithms.ppo import GRPOLearner, OldPolicy, proximal_policy
from unstable_lite.learner.losses import adapted_coefficient
from unstable_lite.learner.training import Update, schedule_factor
from unstable_lite.types import Forced, TrainItem

ALGORITHMS = ["reinforce", "a2c", "ppo", "grpo"]
CLIPPED = ["ppo", "grpo"]
AVERAGE = {"kl_coefficient": 0.5, "kl_reference": "average", "kl_average_decay": 0.75}
STAGE = {"kl_coefficient": 0.5, "kl_reference": "stage:2"}


def close(items: list[TrainItem], learner: Any, spread: float) -> list[TrainItem]:
    """Return the items as sampled by a policy whose log-probabilities differ by about `spread` nats."""
    rng, scored = np.random.default_rng(8), learner.policy.score(items)
    noise = [rng.normal(0, spread, len(item.completion_ids)) + rng.normal(0, spread) for item in items]
    moved = [(each.adapter + shift).astype(np.float32) for each, shift in zip(scored, noise, strict=True)]
    rounded = [replace(item, reward=float(np.float32(item.reward))) for item in items]
    return [replace(item, logprobs=logp) for item, logp in zip(rounded, moved, strict=True)]


def start_of(learner: Any, items: list[TrainItem]) -> tuple[OldPolicy, ...]:
    """Return the policy at the start of a clipped update, which `add_gradient` then takes besides the items."""
    is_clipped = isinstance(learner, GRPOLearner)
    return (proximal_policy(learner.policy, items, learner.training.config),) * is_clipped


def perturb(learner: Any, seed: int) -> None:
    """Move the policy, so that it differs from the average."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.policy.parameters.values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def weighted(items: list[TrainItem]) -> list[TrainItem]:
    """Give the items weights of all kinds: of the step, of its tokens, both, 0, and none."""
    rng = np.random.default_rng(5)
    of_tokens = [rng.uniform(0, 2, len(item.completion_ids)).astype(np.float32) for item in items]
    of_tokens[1][0] = 0.0
    found = [replace(item, weight=float(rng.uniform(0, 3))) for item in items]
    found = [replace(item, token_weights=each) for item, each in zip(found, of_tokens, strict=True)]
    found[2], found[3] = replace(items[2], weight=0.0), items[3]
    return found


CAPPED = [
    {"importance_weight_level": level, "importance_weight_mode": mode, "importance_weight_cap": 1.2}
    for level in ("token", "sequence")
    for mode in ("truncate", "mask")
]
CLIP_HIGHER = {"clip_range": 0.1, "clip_range_high": 0.4}
REGULARISED = {"entropy_coefficient": 0.3, "kl_coefficient": 0.5}
FORMULAS: list[tuple[str, dict[str, Any], bool]] = [
    ("reinforce", {"activation_checkpointing": True, "entropy_coefficient": 0.3}, False),
    *((algorithm, settings, False) for algorithm in ("reinforce", "a2c") for settings in CAPPED),
    *((algorithm, CLIP_HIGHER, False) for algorithm in CLIPPED),
    *((algorithm, CLIP_HIGHER | {"importance_weight_level": "sequence"}, False) for algorithm in CLIPPED),
    *((algorithm, REGULARISED, True) for algorithm in ALGORITHMS),
    *((algorithm, settings, False) for algorithm in ALGORITHMS for settings in (AVERAGE, STAGE)),
    # The entropy bonus has no importance weight, even of masked tokens.
    ("reinforce", CAPPED[1] | REGULARISED, True),
    ("grpo", CAPPED[3] | REGULARISED, True),
]


@pytest.mark.parametrize(("algorithm", "settings", "has_weights"), FORMULAS)
def test_gradient_matches_the_formula(make_learner, make_items, monkeypatch, algorithm, settings, has_weights):
    monkeypatch.setitem(LOGITS_CHUNK_TOKENS, False, 5)
    learner = make_learner(algorithm, learner={"max_tokens_per_micro_batch": 60, **settings})
    learner.policy.follow(decay=0.0)
    perturb(learner, 1)  # away from the moving reference
    double(learner)
    config, rng = learner.training.config, np.random.default_rng(4)
    items, old = close(make_items(9), learner, spread=0.5), None
    if has_weights:
        items = weighted(items)
    if algorithm in CLIPPED:
        now = proximal_policy(learner.policy, items, config)
        old = [logp + torch.tensor(rng.normal(0, 0.1, len(logp)) + rng.normal(0, 0.4)) for logp in now.logp]
        trained = learner.add_gradient(items, OldPolicy(old, now.reference_logp, now.trained))
        low, high = (trained.clipping_metrics(0.1, limit)["clip_fraction"] for limit in (0.1, 0.4))
        assert 0.1 < high < low < 1, "some ratio is allowed only by the higher limit"
    else:
        trained = learner.add_gradient(items)
    ours, start = grads_of(learner.policy.parameters), old or [logprobs(learner, item) for item in items]
    if "importance_weight_cap" in settings:
        logps = [(one.tolist(), item.logprobs.tolist()) for one, item in zip(start, items, strict=True)]
        weights = [importance(*both, t, config) for both in logps for t in range(len(both[0]))]
        assert 0.1 < np.mean([weight in (0.0, 1.2) for weight in weights]) < 0.9
    loss = policy_loss(learner, items, [item.reward for item in items], old)
    expected = gradient(loss, learner.policy.parameters)
    # The formula's penalty has the gradient of the KL, but another value.
    assert config.kl_coefficient or trained.loss == pytest.approx(loss.item(), abs=1e-6)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-3
    assert largest_difference(ours, expected) < 1e-7


# weights of steps and tokens


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weight_zero_has_no_gradient_and_the_critic_depends_on_no_weight(make_learner, make_items, algorithm):
    plain, other = (make_learner(algorithm, learner=REGULARISED) for _ in range(2))
    before, items = snapshot(other), make_items(6, turns=2)
    torch.manual_seed(3)
    metrics = plain.update(items, 1).metrics
    assert (metrics["weight_mean"], metrics["weight_zero"]) == (1.0, 0.0)
    torch.manual_seed(3)
    result = other.update([replace(item, weight=0.0) for item in items], 1)
    assert result.skipped is None
    assert result.metrics["policy_grad_norm"] == 0.0
    assert (result.metrics["weight_mean"], result.metrics["weight_zero"]) == (0.0, 1.0)
    after, trained = snapshot(other), snapshot(plain)
    for name in other.policy.parameters:
        assert torch.equal(before[name], after[name]) and not torch.equal(after[name], trained[name])
    for name in other.training.critic.parameters if other.training.critic is not None else ():
        assert torch.equal(after[name], trained[name]) and not torch.equal(before[name], after[name])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": -1.0}, "weight -1.0"),
        ({"weight": math.nan}, "weight nan"),
        ({"weight": math.inf}, "weight inf"),
        ({"token_weights": np.ones(99, np.float32)}, r"\(99,\) for a completion of"),
        ({"token_weights": np.float32([-1.0])}, "token_weights"),
    ],
)
def test_learner_refuses_bad_weights_by_item(make_learner, make_items, change, says):
    items = make_items(3)
    item = replace(items[1], completion_ids=items[1].completion_ids[:1], logprobs=items[1].logprobs[:1])
    with pytest.raises(RequestError, match=f"item 1 has .*{says}"):
        make_learner().update([items[0], replace(item, **change)], 1)


def reference(learner: Any) -> dict[str, Tensor]:
    """Return the moving reference, by the names of the policy's parameters."""
    named, own = learner.policy.model.named_parameters(), f".{learner.policy.moving_reference}."
    return {name.replace(own, ".default."): p.detach().clone() for name, p in named if own in name}


def state(learner: Any) -> dict[str, Tensor]:
    return snapshot(learner) | {f"reference/{name}": tensor for name, tensor in reference(learner).items()}


def check_resume(learner: Any, resumed: Any, directory: Path, items: list[TrainItem]) -> None:
    """Save one learner, load the other, and compare them to the last bit after one more update."""
    learner.training.save(directory)
    resumed.training.load(directory)
    version = learner.training.version + 1
    for each in (learner, resumed):
        torch.manual_seed(5)
        assert each.update(items, version).skipped is None
    assert is_equal(state(learner), state(resumed))


# the entropy's target


@pytest.mark.parametrize("algorithm", ["reinforce", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_entropy_coefficient_rises_below_the_target_and_falls_above(make_learner, make_items, tmp_path, algorithm):
    for target, factor in ((5.7, math.exp(0.1)), (0.001, math.exp(-0.1))):
        settings = {"entropy_coefficient": 0.01, "entropy_target": target}
        learner = make_learner(algorithm, learner=settings)
        used = [learner.update(make_items(6), version).metrics for version in (1, 2)]
        assert used[0]["entropy_coefficient"] == 0.01
        expected = 0.01 * math.exp(0.1 * max(-1.0, (target - used[0]["entropy"]) / target))
        assert used[1]["entropy_coefficient"] == pytest.approx(expected)
        assert (expected > 0.01) == (factor > 1)
        directory = tmp_path / str(target)
        directory.mkdir()
        resumed = make_learner(algorithm, has_signal=False, learner=settings)
        check_resume(learner, resumed, directory, make_items(6, seed=3))
        assert resumed.training.entropy_coefficient == learner.training.entropy_coefficient


def test_adapted_coefficient_is_the_one_of_the_loss(make_learner, make_items):
    adapted = make_learner(learner={"entropy_coefficient": 0.2, "entropy_target": 1.0})
    adapted.training.entropy_coefficient = 0.7
    constant = make_learner(learner={"entropy_coefficient": 0.7})
    items = make_items(5)
    for each in (adapted, constant):
        each.add_gradient(items)
    assert is_equal(*(grads_of(each.policy.parameters) for each in (adapted, constant)))
    assert adapted.update([replace(item, reward=math.nan) for item in items], 1).skipped is not None
    assert adapted.training.entropy_coefficient == 0.7, "a skipped update keeps it"


def test_entropy_coefficient_stays_within_a_factor_of_its_start():
    coefficient = 0.01
    for _ in range(200):
        coefficient = adapted_coefficient(coefficient, entropy=0.0, start=0.01, target=1.0)
    assert coefficient == pytest.approx(1.0)
    for _ in range(200):
        coefficient = adapted_coefficient(coefficient, entropy=9.0, start=0.01, target=1.0)
    assert coefficient == pytest.approx(0.0001)
    assert adapted_coefficient(0.02, entropy=1.0, start=0.01, target=1.0) == 0.02


# the moving average of the adapter


def adapter_of(learner: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.policy.parameters.items()}


def test_average_follows_the_adapter_once_per_update_and_resumes_bit_for_bit(make_learner, make_items, tmp_path):
    learner, resumed = (make_learner("ppo", has_signal=False, learner=AVERAGE) for _ in range(2))
    expected, adapter = reference(learner), learner.policy.parameters
    assert is_equal(expected, adapter)
    for version in (1, 2, 3):
        metrics = learner.update(make_items(6, seed=version, turns=2), version).metrics
        assert "kl_to_average" in metrics
        assert {"kl_to_base", "kl_to_initial"}.isdisjoint(metrics)
        expected = {name: 0.75 * average + 0.25 * adapter[name] for name, average in expected.items()}
        assert largest_difference(reference(learner), expected) < 1e-6
        assert not is_equal(reference(learner), adapter)
    check_resume(learner, resumed, tmp_path, make_items(6, seed=9, turns=2))
    before = reference(learner)
    assert learner.update([replace(item, reward=math.nan) for item in make_items(3)], 5).skipped is not None
    assert is_equal(before, reference(learner))


def test_moving_reference_is_made_only_for_its_penalty(make_learner, tmp_path):
    for settings in ({}, {"kl_reference": "average"}, {"kl_coefficient": 0.1}, {"kl_reference": "stage:50"}):
        learner = make_learner(learner=settings)
        learner.training.save(tmp_path)
        names = [name for name, _ in learner.policy.model.named_parameters()]
        assert not [name for name in names if ".average." in name or ".stage." in name]
        assert not any(path.is_dir() for path in tmp_path.iterdir())


# the reference of a stage, and coefficients that move


@pytest.mark.parametrize("saved_at", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_stage_of_two_updates_is_copied_every_second_update_and_resumes_bit_for_bit(
    make_learner, make_items, tmp_path, saved_at
):
    settings = {"learner": STAGE | {"coefficient_schedule": "linear"}, "run": {"learning_steps": 8}}
    learner, resumed = (make_learner("ppo", has_signal=False, **settings) for _ in range(2))
    after = [adapter_of(learner)]
    for version in (1, 2, 3, 4, 5):
        metrics = learner.update(make_items(6, seed=version, turns=2), version).metrics
        assert {"kl_to_base", "kl_to_initial", "kl_to_average"}.isdisjoint(metrics)
        # In an odd update the policy still is the reference.
        assert (metrics["kl_to_stage"] > 1e-9) == (version % 2 == 0)
        after.append(adapter_of(learner))
        assert is_equal(reference(learner), after[version - version % 2])
        if version == saved_at:
            learner.training.save(tmp_path)
            before, random_state = reference(learner), torch.get_rng_state()
            assert learner.update([replace(make_items(1)[0], reward=math.nan)], version + 1).skipped is not None
            assert is_equal(before, reference(learner)), "a skipped update copies nothing"
            torch.set_rng_state(random_state)
    torch.manual_seed(99)
    resumed.training.load(tmp_path)
    for version in range(saved_at + 1, 6):
        last = resumed.update(make_items(6, seed=version, turns=2), version).metrics
    assert is_equal(state(resumed), state(learner))
    assert last["kl_coefficient"] == metrics["kl_coefficient"] == 0.5 * 4 / 8


def test_nothing_is_remembered_of_an_earlier_stage(make_learner, make_items):
    learner = make_learner(has_signal=False, learner=STAGE | {"kl_reference": "stage:1"})
    items, before = make_items(6), adapter_of(learner)
    for version in (1, 2, 3):
        assert learner.update(items, version).metrics["kl_to_stage"] == pytest.approx(0.0, abs=1e-9)
    assert largest_difference(adapter_of(learner), before) > 1e-4


@pytest.mark.parametrize("algorithm", ["reinforce", pytest.param("grpo", marks=pytest.mark.nightly)])
def test_gradient_of_each_update_has_the_coefficients_of_the_schedule(make_learner, make_items, algorithm):
    settings = {"coefficient_schedule": "linear", "learning_rate": 1e-2, "learning_rate_warmup": 2}
    learner = make_learner(algorithm, learner=REGULARISED | settings, run={"learning_steps": 4})
    double(learner)
    items = close(make_items(5), learner, spread=0.5)
    for version, factor in enumerate((1.0, 0.75, 0.5, 0.25), 1):
        Update(learner.training, items)  # sets the coefficients, also if it is not taken
        learner.training.completion_len = float(MAX_GENERATION_LEN)
        start = start_of(learner, items)
        learner.add_gradient(items, *start)
        old = [logp.double() for logp in start[0].logp] if start else None
        loss = policy_loss(learner, items, [item.reward for item in items], old, factor=factor)
        expected = gradient(loss, learner.policy.parameters)
        assert largest_difference(grads_of(learner.policy.parameters), expected) < 1e-7
        metrics = learner.update(items, version).metrics
        assert metrics["entropy_coefficient"] == pytest.approx(0.3 * factor)
        assert metrics["kl_coefficient"] == pytest.approx(0.5 * factor)


def test_coefficients_are_reported_only_if_they_are_set(make_learner, make_items):
    for settings in ({}, {"entropy_coefficient": 0.1}, {"kl_coefficient": 0.2}):
        metrics = make_learner(learner=settings).update(make_items(4), 1).metrics
        assert {name: metrics[name] for name in metrics if name.endswith("_coefficient")} == settings


# the learning rate and the moments


def test_warmup_comes_before_each_schedule():
    def rates(schedule: str, warmup: int) -> list[float]:
        return [schedule_factor(schedule, step, 8, warmup) for step in range(9)]

    assert rates("constant", 0) == [1.0] * 9
    assert rates("constant", 3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 6)
    assert rates("linear", 0) == [1 - step / 8 for step in range(9)]
    assert rates("linear", 4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates("cosine", 4) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, *((1 + math.cos(math.pi * part / 4)) / 2 for part in range(5))]
    )
    assert schedule_factor("cosine", 20, 8, 4) == 0.0
    inverse = [0.25, 0.5, 0.75, *(n**-0.5 for n in range(1, 7))]
    assert rates("inverse_sqrt", 3) == pytest.approx(inverse)


def test_learning_rates_of_policy_and_critic_warm_up_together(make_learner, make_items):
    settings = {"learning_rate": 8e-3, "critic_learning_rate": 4e-3, "learning_rate_warmup": 1}
    learner = make_learner("a2c", learner=settings)
    for version, factor in ((1, 0.5), (2, 1.0), (3, 1.0)):
        metrics = learner.update(make_items(4, turns=2), version).metrics
        assert (metrics["lr"], metrics["critic_lr"]) == pytest.approx((8e-3 * factor, 4e-3 * factor))
        assert [group["lr"] for group in learner.training.optimizer.param_groups] == [8e-3 * factor, 4e-3 * factor]


def test_keys_that_a_resume_adds_or_changes_take_effect(make_learner, make_items, tmp_path):
    learner = make_learner(learner={"entropy_coefficient": 0.3})
    learner.update(make_items(4), 1)
    learner.training.save(tmp_path)
    for settings, coefficient in (
        ({"entropy_coefficient": 0.1}, 0.1),
        ({"entropy_coefficient": 0.2, "entropy_target": 1.0} | AVERAGE, 0.2),
        ({"entropy_coefficient": 0.2} | STAGE, 0.2),
    ):
        resumed = make_learner(learner=settings)
        resumed.training.load(tmp_path)
        assert resumed.training.entropy_coefficient == coefficient
        if "kl_reference" in settings:
            assert is_equal(reference(resumed), adapter_of(learner))


def with_forced(items: list[TrainItem]) -> list[TrainItem]:
    """Put forced ids into all items but the first, also before the first and after the last token."""
    rng = np.random.default_rng(3)
    places = [int(rng.integers(0, len(item.completion_ids) + 1)) for item in items]
    places[1], places[2] = 0, len(items[2].completion_ids)
    forced = [Forced(at=at, ids=rng.integers(0, VOCAB, 3).astype(np.int32)) for at in places]
    return [items[0]] + [replace(item, forced=one) for item, one in zip(items[1:], forced[1:], strict=True)]


def parts(item: TrainItem) -> list[TrainItem]:
    """Return the two generations as steps: the forced ids are only in the prompt of the second."""
    if (forced := item.forced) is None:
        return [item]
    first, second = item.completion_ids[: forced.at], item.completion_ids[forced.at :]
    logp = item.logprobs[: forced.at], item.logprobs[forced.at :]
    plain = replace(item, forced=None)
    prompt = np.concatenate([item.prompt_ids, first, forced.ids])
    both = (
        replace(plain, completion_ids=first, logprobs=logp[0]),
        replace(plain, prompt_ids=prompt, completion_ids=second, logprobs=logp[1]),
    )
    return [part for part in both if len(part.completion_ids)]


@pytest.mark.parametrize("algorithm", ["reinforce", "grpo"])
def test_gradient_is_that_of_two_steps(make_learner, make_items, algorithm):
    learner = make_learner(algorithm, learner={"max_tokens_per_micro_batch": 60})
    double(learner)
    items = with_forced(make_items(7))
    steps = [part for item in items for part in parts(item)]
    advantages = [float(np.float32(step.reward)) for step in steps]
    # The loss is divided by the number of turns, not by that of the generations.
    length = MAX_GENERATION_LEN * len(items) / len(steps)
    learner.add_gradient(items, *start_of(learner, items))
    with torch.no_grad():
        old = [logprobs(learner, step) for step in steps] if algorithm in CLIPPED else None
    expected = policy_loss(learner, steps, advantages, old, length)
    ours = grads_of(learner.policy.parameters)
    theirs = gradient(expected, learner.policy.parameters)
    assert max(g.abs().max().item() for g in theirs.values()) > 1e-2
    assert largest_difference(ours, theirs) < 1e-7
