"""The input and the training of the critic, its independence from the policy, and the state of optimizers."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fakes.unrolled import double, gradient, grads_of, is_equal, largest_difference, snapshot, value, value_loss
from unstable_lite.adapters import peft_files
from unstable_lite.config.training import LearnerConfig
from unstable_lite.errors import ModelError
from unstable_lite.learner import losses
from unstable_lite.learner.training import load_state_tensors, make_optimizer, state_tensors


def test_value_is_the_head_on_the_last_prompt_token(make_learner, make_items, monkeypatch):
    monkeypatch.setattr("unstable_lite.learner.critic.ROWS_WITHOUT_GRADIENT", 3)
    learner = make_learner("a2c", learner={"max_tokens_per_micro_batch": 40})
    double(learner)
    items = make_items(9)
    expected = [value(learner, item).item() for item in items]
    learner.policy.model.set_adapter("default")
    assert learner.training.critic.estimate(items) == pytest.approx(expected, abs=1e-9)
    assert np.std(expected) > 0.01


def test_value_depends_on_the_whole_prompt_and_not_on_the_answer(make_learner, make_items):
    critic = make_learner("a2c").training.critic
    (item,) = make_items(1)
    other_answer = replace(item, completion_ids=np.array([9, 9, 9], np.int32), logprobs=np.zeros(3, np.float32))
    assert np.array_equal(critic.estimate([item]), critic.estimate([other_answer]))
    for position in range(len(item.prompt_ids)):
        changed = item.prompt_ids.copy()
        changed[position] = (changed[position] + 150) % 300
        difference = critic.estimate([item]) - critic.estimate([replace(item, prompt_ids=changed)])
        assert abs(difference[0]) > 1e-5, position


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


@pytest.mark.parametrize("checkpointing", [True, False])
def test_policy_is_unchanged_by_a_critic_pass(make_learner, make_items, checkpointing):
    flags = {"activation_checkpointing": checkpointing}
    learner, alone = make_learner("a2c", learner=flags), make_learner("reinforce", learner=flags)
    items = make_items(5)
    for name, parameter in alone.policy.parameters.items():
        parameter.data.copy_(learner.policy.parameters[name])
    learner.training.critic.estimate(items)
    learner.training.critic.add_gradient(items, np.ones(5))
    ours, theirs = (each.policy.score(items[:1])[0] for each in (learner, alone))
    assert np.array_equal(ours.adapter, theirs.adapter)
    assert np.array_equal(ours.base, theirs.base)
    assert not np.array_equal(ours.adapter, ours.base)
    for each in (learner, alone):
        each.add_gradient(items)
    assert is_equal(grads_of(learner.policy.parameters), grads_of(alone.policy.parameters))


def test_critic_and_base_may_run_between_policy_forward_and_backward(make_learner, make_items):
    """Checkpointed layers run again in the backward pass, which needs the policy's adapter to be active again."""
    results = []
    for asks in (False, True):
        learner = make_learner("a2c")
        (item,) = make_items(1)
        (batch,) = learner.policy.micro_batches([item])
        logp_N, _ = learner.policy.logprobs(batch)
        if asks:
            learner.training.critic.estimate([item])
            learner.policy.reference_logprobs(batch)
        losses.policy_gradient_loss(logp_N, torch.ones(()), batch.advantage_N, 1.0).backward()
        results.append(grads_of(learner.policy.parameters))
    assert is_equal(*results)


def test_critic_shares_the_base_and_trains_in_float32(make_learner, make_items):
    alone = make_learner("reinforce", learner={"dtype": "bfloat16"}).policy
    learner = make_learner("a2c", learner={"dtype": "bfloat16"})
    lora = sum(parameter.numel() for parameter in learner.policy.parameters.values())
    head = sum(parameter.numel() for parameter in learner.training.critic.head.parameters())
    assert sum(p.numel() for p in learner.training.critic.parameters.values()) == lora + head
    number = sum(parameter.numel() for parameter in learner.policy.model.parameters())
    assert number == sum(parameter.numel() for parameter in alone.model.parameters()) + lora
    assert {p.dtype for p in learner.training.critic.parameters.values()} == {torch.float32}
    before = {name: p.clone() for name, p in learner.policy.model.named_parameters() if "lora" not in name}
    assert learner.update(make_items(4, turns=2), 1).skipped is None
    assert all(torch.equal(p, before[n]) for n, p in learner.policy.model.named_parameters() if n in before)


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


NAMES = [
    "adamw",
    pytest.param(
        "adamw8bit",
        marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
    ),
]


def make_parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"large": nn.Parameter(torch.randn(64, 128)), "small": nn.Parameter(torch.randn(4))}


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def is_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_survives_a_file_bit_for_bit(name):
    config = LearnerConfig.model_validate({"optimizer": name})
    parameters = make_parameters()
    optimizer = make_optimizer([(parameters, 1e-2)], config)
    for seed in (1, 2):
        step(parameters, optimizer, seed)
    largest = {v.dtype for v in optimizer.state[parameters["large"]].values() if torch.is_tensor(v) and v.dim() == 2}
    assert largest == {torch.uint8 if name == "adamw8bit" else torch.float32}
    file = safetensors.torch.save(state_tensors(optimizer, parameters))
    resumed = {key: nn.Parameter(parameter.detach().clone()) for key, parameter in parameters.items()}
    resumed_optimizer = make_optimizer([(resumed, 1e-2)], config)
    load_state_tensors(resumed_optimizer, resumed, safetensors.torch.load(file))
    assert is_same(step(resumed, resumed_optimizer, 3), step(parameters, optimizer, 3))
    load_state_tensors(optimizer, parameters, {})
    assert not optimizer.state, "a fresh optimizer has no moments"
