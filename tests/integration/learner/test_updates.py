"""Whole updates of A2C, PPO and GRPO compared with their formulas, and the requirements of all algorithms."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW

from fakes.learner_fixtures import update_and_save
from fakes.unrolled import (
    double,
    gradient,
    is_equal,
    largest_difference,
    logprobs,
    mean_length,
    policy_loss,
    returns,
    snapshot,
    value,
    value_loss,
    z_scores,
)
from unstable_lite.learner import LEARNERS, worker
from unstable_lite.learner.batching import length
from unstable_lite.transport.messages import Update, Updated
from unstable_lite.types import TrainItem

CRITICS = ["a2c", "ppo"]
CLIPPED = ["ppo", "grpo"]
ALGORITHMS = ["reinforce", "ppo"]
"""Both functions that make an update, one without a critic and one with it: A2C and GRPO are the other way round."""


def apply(
    gradients: dict[str, torch.Tensor], parameters: dict[str, Any], optimizer: AdamW, largest_norm: float
) -> None:
    """Make an optimizer step by hand, with the norm limited as in the formula."""
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
    for name, parameter in parameters.items():
        parameter.grad = gradients[name] * min(1.0, largest_norm / (norm + 1e-6))
    optimizer.step()


def adamw(parameters: dict[str, Any], learning_rate: float) -> AdamW:
    return AdamW(list(parameters.values()), lr=learning_rate, weight_decay=0.01)


@pytest.mark.parametrize("normalize_adv", [True, False])
def test_a2c_update_matches_the_formulas(make_learner, make_items, normalize_adv):
    settings = {"gamma": 0.9, "gae_lambda": 0.7, "critic_learning_rate": 2e-3, "normalize_adv": normalize_adv}
    settings |= {"max_tokens_per_micro_batch": 60, "gradient_clipping": 0.05}
    learner, twin = (make_learner("a2c", learner=settings) for _ in range(2))
    items = make_items(8, turns=3)
    for each in (learner, twin):
        double(each)
    policy, critic = twin.policy.parameters, twin.training.critic.parameters
    optimizers = adamw(policy, 1e-3), adamw(critic, 2e-3)
    for version in (1, 2):
        assert learner.update(items, version).skipped is None
        values = [value(twin, item).item() for item in items]
        advantages = returns(items, values, 0.9, 0.7)
        targets = [advantage + each for advantage, each in zip(advantages, values, strict=True)]
        weights = z_scores(advantages) if normalize_adv else advantages
        policy_gradient = gradient(policy_loss(twin, items, weights, length=mean_length(items)), policy)
        apply(gradient(value_loss(twin, items, targets), critic), critic, optimizers[1], 0.05)
        apply(policy_gradient, policy, optimizers[0], 0.05)
    assert largest_difference(learner.policy.parameters, policy) < 1e-6
    assert largest_difference(learner.training.critic.parameters, critic) < 1e-6


@pytest.mark.parametrize("algorithm", CLIPPED)
def test_update_in_several_steps_matches_the_formulas(make_learner, make_items, algorithm):
    settings = {"ppo_epochs": 3, "ppo_minibatches": 2, "clip_range": 0.1, "learning_rate": 3e-3}
    settings |= {"critic_learning_rate": 2e-3, "gamma": 0.9, "gae_lambda": 0.7}
    learner, twin = (make_learner(algorithm, learner=settings) for _ in range(2))
    for each in (learner, twin):
        double(each)
    items = make_items(7, turns=3)
    torch.manual_seed(11)
    result = learner.update(items, 1)
    assert result.skipped is None
    assert result.metrics["clip_fraction"] > 0.1
    assert result.metrics["approx_kl"] > 0

    has_critic = algorithm == "ppo"
    weights, targets, optimizers = [item.reward for item in items], [0.0] * 7, [adamw(twin.policy.parameters, 3e-3)]
    if has_critic:
        values = [value(twin, item).item() for item in items]
        advantages = returns(items, values, 0.9, 0.7)
        targets = [advantage + each for advantage, each in zip(advantages, values, strict=True)]
        weights = z_scores(advantages)
        optimizers.append(adamw(twin.training.critic.parameters, 2e-3))
    weights = [float(np.float32(weight)) for weight in weights]
    twin.policy.model.set_adapter("default")
    old = [logprobs(twin, item).detach() for item in items]
    torch.manual_seed(11)
    for _ in range(3):
        order = torch.randperm(7).tolist()
        for rows in (order[:4], order[4:]):
            batch = [items[row] for row in rows]
            of_rows = [weights[row] for row in rows], [old[row] for row in rows]
            loss = policy_loss(twin, batch, *of_rows, mean_length(items))
            apply(gradient(loss, twin.policy.parameters), twin.policy.parameters, optimizers[0], 0.2)
            if has_critic:
                loss = value_loss(twin, batch, [targets[row] for row in rows])
                apply(
                    gradient(loss, twin.training.critic.parameters), twin.training.critic.parameters, optimizers[1], 0.2
                )
    assert largest_difference(learner.policy.parameters, twin.policy.parameters) < 1e-5
    if has_critic:
        assert largest_difference(learner.training.critic.parameters, twin.training.critic.parameters) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kl_to_the_base_costs_one_forward_pass_and_none_if_off(make_learner, make_items, algorithm):
    forwards = []
    for coefficient in (0.0, 0.1):
        flags = {"activation_checkpointing": False}
        learner = make_learner(algorithm, learner=flags | {"kl_coefficient": coefficient})
        calls: list[int] = []
        learner.policy.base.model.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        metrics = learner.update(make_items(3), 1).metrics
        forwards.append(len(calls))
        assert ("kl_to_base" in metrics) == ("kl_k1" in metrics) == bool(coefficient)
    assert forwards[1] - forwards[0] == 1


OF_ALL = """loss logp_mean avg_train_len pct_truncated step samples_seen lr policy_grad_norm entropy
importance_weight_mean importance_weight_clipped num_items num_tokens padding_share staleness_mean staleness_max
dropped_too_long weight_mean weight_zero tokens_per_s seconds zero_advantage grad_clipped
tokens_computed tokens_repeated"""
OF_CRITIC = """value_loss value_mae value_dir_acc value_dir_n num_steps grad_norm critic_lr critic_grad_norm
explained_variance value_mean return_mean"""


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo", "grpo"])
def test_update_reports_every_metric_as_a_finite_number(make_learner, make_items, algorithm):
    """The metrics of the reference are among them, under its names."""
    metrics = make_learner(algorithm).update(make_items(6, turns=2), 1).metrics
    names = OF_ALL + " policy_loss logp_std" * (algorithm != "reinforce")
    names += f" {OF_CRITIC}" * (algorithm in CRITICS) + " clip_fraction approx_kl" * (algorithm in CLIPPED)
    assert metrics.keys() == set(names.split())
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values()), metrics
    assert 0 < metrics["entropy"] < math.log(300)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_update_returns_the_logprobs_before_its_steps(make_learner, make_items, algorithm):
    learner = make_learner(algorithm, learner={"max_train_len": 18, "max_tokens_per_micro_batch": 40})
    items = make_items(8, turns=2)
    before = [scored.adapter for scored in learner.policy.score(items)]
    reported = learner.update(items, 1).logprobs
    lengths = [len(item.completion_ids) if length(item) <= 18 else 0 for item in items]
    assert [len(logprobs) for logprobs in reported] == lengths
    assert 0 in lengths
    for trained, whole in zip(reported, before, strict=True):
        assert trained == pytest.approx(whole[: len(trained)], abs=1e-4)


def poisoned_by_reward(learner: Any, items: list[TrainItem]) -> list[TrainItem]:
    return [*items[:-1], replace(items[-1], reward=math.nan)]


def poisoned_by_logprobs(learner: Any, items: list[TrainItem]) -> list[TrainItem]:
    return [*items[:-1], replace(items[-1], logprobs=np.full_like(items[-1].logprobs, np.nan))]


def poisoned_by_a_later_step(learner: Any, items: list[TrainItem]) -> list[TrainItem]:
    """Set a learning rate that makes the policy non-finite; the gradient of the first step is still finite."""
    learner.training.config = learner.training.config.model_copy(update={"learning_rate": 1e30})
    return items


def poisoned_in_the_critic(learner: Any, items: list[TrainItem]) -> list[TrainItem]:
    learner.training.config = learner.training.config.model_copy(update={"critic_learning_rate": 1e30})
    return items


@pytest.mark.parametrize(
    ("algorithm", "poison"),
    [
        ("reinforce", poisoned_by_reward),
        pytest.param("reinforce", poisoned_by_logprobs, marks=pytest.mark.nightly),
        pytest.param("ppo", poisoned_by_reward, marks=pytest.mark.nightly),
        ("ppo", poisoned_by_a_later_step),
        ("ppo", poisoned_in_the_critic),
    ],
)
def test_non_finite_step_rolls_back_the_whole_update(make_learner, make_items, tmp_path, algorithm, poison):
    """Dropout, shuffling and the memory of earlier returns continue as if the batch had not been there."""
    settings: dict[str, Any] = {"learner": {"ppo_epochs": 3, "ppo_minibatches": 2}, "lora": {"lora_dropout": 0.2}}
    learner, clean = (make_learner(algorithm, **settings) for _ in range(2))
    poisoned, untouched = (worker._Worker(each, each.config) for each in (learner, clean))
    items = make_items(6, turns=2)

    def update(one: worker._Worker, items: list[TrainItem], version: int) -> str | None:
        path = str(tmp_path / f"{'poisoned' if one is poisoned else 'untouched'}-{version}")
        reply = update_and_save(one, Update(request_id=1, items=tuple(items), version=version, path=path))
        assert isinstance(reply, Updated)
        return reply.skipped

    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    for version in (1, 2):  # of a fresh learner, and of one with moments
        before = snapshot(learner)
        torch.set_rng_state(random_state)
        assert "not finite" in str(update(poisoned, poison(learner, items), version))
        assert is_equal(before, snapshot(learner))
        assert (learner.training.step, learner.training.version) == (version - 1, version - 1)
        learner.training.config = clean.training.config
        assert update(poisoned, items, version) is None
        torch.set_rng_state(random_state)
        assert update(untouched, items, version) is None
        random_state = torch.get_rng_state()
        assert is_equal(snapshot(learner), snapshot(clean))
    assert learner.training.spread.state_dict() == clean.training.spread.state_dict()


@pytest.mark.parametrize("algorithm", CRITICS)
def test_critic_warmup_freezes_the_policy_and_counts_versions(make_learner, make_items, algorithm):
    learner = make_learner(algorithm, learner={"critic_warmup_updates": 2})
    for version, is_warming_up in ((1, True), (2, True), (3, False)):
        before = snapshot(learner)
        assert learner.update(make_items(4, seed=version, turns=2), version).skipped is None
        assert learner.training.version == version
        after = snapshot(learner)
        for parameters, is_frozen in (
            (learner.policy.parameters, is_warming_up),
            (learner.training.critic.parameters, False),
        ):
            assert all(torch.equal(before[name], after[name]) == is_frozen for name in parameters)


def identical(items: list[TrainItem], reward: float) -> list[TrainItem]:
    """Return games of one turn with equal content: there is nothing to learn with any baseline."""
    return [replace(items[0], reward=reward, trajectory=index) for index in range(len(items))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_before", [0, 2])
def test_update_without_an_advantage_keeps_policy_and_moments(make_learner, make_items, algorithm, num_before):
    """An optimizer with moments would keep moving, and weight decay would act."""
    settings = {"ppo_epochs": 2, "ppo_minibatches": 2, "weight_decay": 0.1}
    learner, has_critic = make_learner(algorithm, learner=settings), LEARNERS[algorithm].has_critic
    for version in range(1, num_before + 1):
        learner.update(make_items(6, seed=version, turns=2), version)
    before = snapshot(learner)
    # With a critic, centring leaves an advantage of 0; without one the reward is the advantage, up to rounding.
    result = learner.update(identical(make_items(6), 1.0 if has_critic else 1e-9), num_before + 1)
    after = snapshot(learner)
    assert result.skipped is None
    assert result.metrics["zero_advantage"] == 1
    steps = learner.training.step, learner.training.version, result.metrics["step"]
    assert steps == (num_before + 1,) * 3, "every update makes one version, no matter its steps"
    assert result.metrics["samples_seen"] == 6 * (num_before + 1)
    of_critic = {name for name in after if "critic" in name or "value_head" in name}
    assert is_equal(*({name: state[name] for name in state if name not in of_critic} for state in (before, after)))
    if has_critic:
        assert not is_equal(before, after), "the critic still learns"
    learner.update(make_items(6, seed=9, turns=2), num_before + 2)
    assert not torch.equal(
        torch.cat([p.detach().flatten() for p in learner.policy.parameters.values()]),
        torch.cat([after[name].flatten() for name in learner.policy.parameters]),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kl_holds_the_policy_at_the_initial_adapter(make_learner, make_items, tmp_path, algorithm):
    """A pull towards the base would make it unlearn the checkpoint even without any reward."""
    make_learner(algorithm).training.save(tmp_path)
    start = {"initial_lora_path": tmp_path}
    items = identical(make_items(6), 0.0)
    kl = {}
    for reference in ("initial", "base"):
        settings = {"kl_coefficient": 0.5, "kl_reference": reference}
        learner = make_learner(algorithm, has_signal=False, learner=settings, lora=start)
        before = [scored.adapter for scored in learner.policy.score(items)]
        sampled = [replace(item, logprobs=logp) for item, logp in zip(items, before, strict=True)]
        for version in (1, 2, 3):
            metrics = learner.update(sampled, version).metrics
        assert f"kl_to_{reference}" in metrics
        assert "kl_to_initial" not in metrics or "kl_to_base" not in metrics
        after = [scored.adapter for scored in learner.policy.score(items)]
        kl[reference] = max(np.abs(a - b).max() for a, b in zip(after, before, strict=True))
    assert kl["initial"] < 1e-5 < 1e-2 < kl["base"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_divisor_is_that_of_the_first_trained_batch(make_learner, make_items, algorithm):
    """Longer answers in later batches have the same weight per token; a skipped first batch does not count."""
    learner, first = make_learner(algorithm), make_items(6, turns=2)
    ones = [replace(item, completion_ids=item.completion_ids[:1], logprobs=item.logprobs[:1]) for item in make_items(4)]
    assert learner.update([replace(ones[0], reward=math.nan)], 1).skipped is not None
    assert learner.update(first, 1).skipped is None
    learner.update(ones, 2)
    assert learner.training.completion_len == mean_length(first) != 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_update_reports_if_the_gradient_was_clipped(make_learner, make_items, algorithm):
    for limit, share in ((1e-6, 1.0), (1e6, 0.0)):
        learner = make_learner(algorithm, learner={"gradient_clipping": limit})
        assert learner.update(make_items(6, turns=2), 1).metrics["grad_clipped"] == share


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kl_and_entropy_terms_act_without_an_advantage(make_learner, make_items, algorithm):
    items = identical(make_items(6), 1.0 if LEARNERS[algorithm].has_critic else 0.0)
    for settings in ({"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1, "learning_rate": 1e-4, "ppo_epochs": 1}):
        learner = make_learner(algorithm, learner=settings)
        before = {name: parameter.detach().clone() for name, parameter in learner.policy.parameters.items()}
        first, second = (learner.update(items, version).metrics for version in (1, 2))
        assert first["zero_advantage"] == 1
        assert not is_equal(before, learner.policy.parameters)
    assert second["entropy"] > first["entropy"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_before", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_saved_learner_resumes_bit_for_bit(make_learner, make_items, tmp_path, algorithm, num_before):
    """The order of minibatches and dropout depend on the random state, and the penalty on the initial adapter."""
    start, saved = (tmp_path / name for name in ("start", "saved"))
    for directory in (start, saved):
        directory.mkdir()
    make_learner(algorithm).training.save(start)
    settings = {"ppo_epochs": 2, "ppo_minibatches": 2, "critic_warmup_updates": 1, "kl_coefficient": 0.5}
    settings |= {"critic_learning_rate": 4e-3, "learning_rate_schedule": "linear"}
    sections: dict[str, Any] = {"learner": settings, "run": {"learning_steps": 5}}
    sections["lora"] = {"lora_dropout": 0.1, "initial_lora_path": start}
    learner, resumed = (make_learner(algorithm, has_signal=False, **sections) for _ in range(2))
    for version in range(1, num_before + 1):
        learner.update(make_items(6, seed=version, turns=2), version)
    random_state = torch.get_rng_state()
    learner.training.save(saved)
    initial = {n: p.clone() for n, p in learner.policy.model.named_parameters() if ".initial." in n}
    results = []
    for each in (learner, resumed):
        torch.set_rng_state(random_state)
        if each is resumed:
            torch.manual_seed(99)
            resumed.training.load(saved)
        for version in range(num_before + 1, num_before + 3):
            metrics = each.update(make_items(6, seed=version, turns=2), version).metrics
            results.append({**metrics, "seconds": 0, "tokens_per_s": 0})
    assert is_equal(snapshot(learner), snapshot(resumed))
    assert results[:2] == results[2:]
    assert results[1]["kl_to_initial"] > 1e-6 or not num_before
    assert is_equal(initial, {n: p for n, p in resumed.policy.model.named_parameters() if ".initial." in n})
    assert initial
    shares = [1 - done / 5 for done in (num_before, num_before + 1)]
    assert [metrics["lr"] for metrics in results[2:]] == pytest.approx([1e-3 * share for share in shares])
    if algorithm in CRITICS:
        assert [metrics["critic_lr"] for metrics in results[2:]] == pytest.approx([4e-3 * share for share in shares])


@pytest.mark.parametrize("algorithm", CRITICS)
def test_overlong_step_still_passes_its_reward_back(make_learner, make_items, algorithm):
    """The player won by that step, so the earlier steps must get its reward."""
    learner = make_learner(algorithm, has_signal=False, learner={"max_train_len": 30, "normalize_adv": False})
    first, second, last = (replace(item, reward=0.0, trajectory=0) for item in make_items(3))
    won = replace(last, prompt_ids=np.arange(40, dtype=np.int32), reward=2.0)
    metrics = learner.update([first, second, won], 1).metrics
    assert (metrics["dropped_too_long"], metrics["num_items"], metrics["num_steps"]) == (1, 2, 2)
    assert metrics["return_mean"] == 2.0
    assert metrics["value_mae"] == 2.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overlong_steps_are_dropped_whole(make_learner, make_items, algorithm):
    (fits,) = make_items(1, seed=3)
    long = np.arange(30, dtype=np.int32)
    answer = replace(fits, completion_ids=long, logprobs=np.full(30, -5, np.float32), trajectory=1)
    prompt = replace(fits, prompt_ids=np.arange(40, dtype=np.int32), trajectory=2)
    learner = make_learner(algorithm, learner={"max_train_len": len(fits.prompt_ids) + 16})
    metrics = learner.update([prompt, answer, fits], 1).metrics
    assert metrics["pct_truncated"] == pytest.approx(2 / 3)
    assert (metrics["dropped_too_long"], metrics["num_items"], metrics["samples_seen"]) == (2, 1, 1)
    assert metrics["num_tokens"] == len(fits.completion_ids)
    before = snapshot(learner)
    result = learner.update([answer], 2)
    assert result.skipped is not None and "max_train_len" in result.skipped
    assert is_equal(before, snapshot(learner))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_update_does_not_depend_on_micro_batches(make_learner, make_items, algorithm):
    states = []
    for settings in ({}, {"mini_batch_size": 1}, {"max_tokens_per_micro_batch": 50}):
        learner = make_learner(
            algorithm, learner=settings | {"ppo_epochs": 1, "ppo_minibatches": 2, "critic_learning_rate": 1e-3}
        )
        double(learner)
        torch.manual_seed(3)
        for version in (1, 2):
            learner.update(make_items(8, turns=2, seed=version), version)
        states.append(
            learner.policy.parameters
            | (learner.training.critic.parameters if learner.training.critic is not None else {})
        )
    assert largest_difference(states[0], states[1]) < 1e-6
    assert largest_difference(states[0], states[2]) < 1e-6
