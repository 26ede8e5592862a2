"""The input and the training of the critic, its independence from the policy, and moments in 8 bits."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from fakes.unrolled import double, gradient, grads_of, is_equal, largest_difference, snapshot, value, value_loss
from unstable_lite.adapters import peft_files
from unstable_lite.errors import ModelError
from unstable_lite.learner import losses
from unstable_lite.types import Forced


def test_value_is_the_head_on_the_last_prompt_token(make_learner, make_items, monkeypatch):
    monkeypatch.setattr("unstable_lite.learner.critic.ROWS_WITHOUT_GRADIENT", 3)
    learner = make_learner("a2c", learner={"max_tokens_per_micro_batch": 40})
    double(learner)
    # The ids that were forced into an answer are no part of its prompt.
    items = [replace(item, forced=Forced(at=1, ids=np.array([8], np.int32))) for item in make_items(9)]
    expected = [value(learner, item).item() for item in items]
    learner.policy.model.set_adapter("default")
    assert learner.training.critic.estimate(items) == pytest.approx(expected, abs=1e-9)
    assert np.std(expected) > 0.01


def test_fresh_critic_estimates_zero(make_learner, make_items):
    assert not make_learner("a2c", has_signal=False).training.critic.estimate(make_items(3)).any()


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("settings", [{}, {"mini_batch_size": 1}, {"max_tokens_per_micro_batch": 40}])
def test_critic_gradient_is_that_of_half_the_mean_squared_error(make_learner, make_items, settings, checkpointing):
    flags = {"activation_checkpointing": checkpointing}
    learner = make_learner("a2c", learner=settings | flags)
    double(learner)
    items, targets = make_items(6), np.random.default_rng(3).normal(size=6)
    expected_loss = value_loss(learner, items, targets.tolist())
    expected = gradient(expected_loss, learner.training.critic.parameters)
    learner.policy.model.set_adapter("default")
    assert learner.training.critic.add_gradient(items, targets) == pytest.approx(expected_loss.item(), abs=1e-6)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-2
    assert largest_difference(grads_of(learner.training.critic.parameters), expected) < 1e-8
    assert all(parameter.grad is None for parameter in learner.policy.parameters.values())


def test_critic_and_base_may_run_between_policy_forward_and_backward(make_learner, make_items):
    """Checkpointed layers run again in the backward pass, which needs the policy's adapter to be active again."""
    flags, items = {"activation_checkpointing": True}, make_items(5)
    learner, alone = make_learner("a2c", learner=flags), make_learner("reinforce", learner=flags)
    for name, parameter in alone.policy.parameters.items():
        parameter.data.copy_(learner.policy.parameters[name])
    learner.training.critic.add_gradient(items, np.ones(5))
    for each in (learner, alone):
        (batch,) = each.policy.micro_batches(items)
        logp_N, _ = each.policy.logprobs(batch)
        if each is learner:
            learner.training.critic.estimate(items)
            learner.policy.reference_logprobs(batch)
        losses.policy_gradient_loss(logp_N, torch.ones(()), batch.advantage_N, 1.0).backward()
    assert is_equal(grads_of(learner.policy.parameters), grads_of(alone.policy.parameters))


def test_policy_and_critic_train_in_float32_on_one_bfloat16_base_that_never_changes(make_learner, make_items):
    alone = make_learner("reinforce", learner={"dtype": "bfloat16"}).policy
    learner = make_learner("a2c", learner={"dtype": "bfloat16"})
    policy, critic = learner.policy, learner.training.critic
    lora = sum(parameter.numel() for parameter in policy.parameters.values())
    head = sum(parameter.numel() for parameter in critic.head.parameters())
    assert sum(p.numel() for p in critic.parameters.values()) == lora + head
    number = sum(parameter.numel() for parameter in policy.model.parameters())
    assert number == sum(parameter.numel() for parameter in alone.model.parameters()) + lora
    before = {name: p.clone() for name, p in policy.model.named_parameters() if "lora" not in name}
    for version in (1, 2):
        assert learner.update(make_items(4, seed=version, turns=2), version).skipped is None
    moments = [value for state in learner.training.optimizer.state.values() for value in state.values()]
    assert {one.dtype for one in (*policy.parameters.values(), *critic.parameters.values(), *moments)} == {
        torch.float32
    }
    assert len(moments) >= 3 * len(policy.parameters | critic.parameters)
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters() if n in before)


def test_written_adapter_contains_nothing_of_the_critic(make_learner, make_items, tmp_path):
    learner, alone = make_learner("a2c"), make_learner("reinforce")
    learner.update(make_items(4, turns=2), 1)
    peft_files.write_adapter(tmp_path / "v1", *learner.policy.adapter_state())
    written = safetensors.torch.load_file(tmp_path / "v1/adapter_model.safetensors")
    assert written.keys() == alone.policy.adapter_state()[0].keys()
    assert learner.policy.adapter_state()[1] == alone.policy.adapter_state()[1]
    for name, parameter in learner.policy.parameters.items():
        assert torch.equal(written[name.replace(".default", "")], parameter)


def test_saved_critic_can_start_another_run(make_learner, make_items, tmp_path):
    first, items = make_learner("a2c"), make_items(4, turns=2)
    first.update(items, 1)
    first.training.save(tmp_path)
    assert {path.suffix for path in (tmp_path / "critic").iterdir()} == {".safetensors", ".json"}
    start = {"lora_rank": 4, "lora_alpha": 8, "initial_critic_path": str(tmp_path / "critic")}
    second = make_learner("ppo", has_signal=False, lora=start)
    assert np.array_equal(second.training.critic.estimate(items), first.training.critic.estimate(items))
    ours, theirs = snapshot(first), snapshot(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in first.training.critic.parameters)
    assert not any(torch.equal(ours[name], theirs[name]) for name in first.policy.parameters)


def test_critic_that_is_missing_foreign_or_not_wanted_is_refused(make_learner, make_items, tmp_path):
    with_critic = make_learner("a2c")
    with_critic.update(make_items(4, turns=2), 1)
    with_critic.training.save(tmp_path)
    with pytest.raises(ModelError, match="another algorithm"):
        make_learner("reinforce").training.load(tmp_path)
    learner = make_learner("a2c")
    learner.training.save(tmp_path)
    head = tmp_path / "critic/value_head.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, head)
    with pytest.raises(ModelError, match=r"\(1, 5\).*\(1, 64\)"):
        learner.training.critic.load(tmp_path / "critic")
    head.write_bytes(b"cut off")
    with pytest.raises(ModelError, match="critic"):
        learner.training.critic.load(tmp_path / "critic")
    head.unlink()
    with pytest.raises(ModelError, match="critic"):
        learner.training.critic.load(tmp_path / "critic")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_moments_in_8_bits_survive_a_file_bit_for_bit(make_learner, make_items, tmp_path):
    large = {"learner": {"optimizer": "adamw8bit"}, "lora": {"lora_rank": 64}}  # smaller matrices keep 32 bits
    learner, resumed = (make_learner(**large) for _ in range(2))
    learner.update(make_items(6), 1)
    moments = [value for state in learner.training.optimizer.state.values() for value in state.values()]
    assert torch.uint8 in {value.dtype for value in moments if torch.is_tensor(value)}
    learner.training.save(tmp_path)
    resumed.training.load(tmp_path)
    for each in (learner, resumed):
        each.update(make_items(6, seed=2), 2)
    assert is_equal(learner.policy.parameters, resumed.policy.parameters)
