"""What the critic reads, what it learns, and that it leaves the policy alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from unrolled import double, gradient, grads_of, is_equal, largest_difference, snapshot, value, value_loss
from unstable_lite.errors import ModelError
from unstable_lite.learners import adapter_files, losses
from unstable_lite.learners.batching import pad
from unstable_lite.types import TrainItem

MakeLearner = Callable[..., Any]
MakeItems = Callable[..., list[TrainItem]]


def test_values_are_the_head_on_the_last_prompt_token_under_the_critics_adapter(
    make_learner: MakeLearner, make_items: MakeItems
) -> None:
    learner = make_learner("a2c", learner={"infer_mini_batch_size": 3, "max_tokens_per_micro_batch": 40})
    double(learner)
    items = make_items(9)
    expected = [value(learner, item).item() for item in items]
    learner.policy.model.set_adapter("default")
    assert learner.critic.estimate(items) == pytest.approx(expected, abs=1e-9)
    assert np.std(expected) > 0.01


def test_the_whole_prompt_matters_to_a_value_and_the_answer_does_not(
    make_learner: MakeLearner, make_items: MakeItems
) -> None:
    critic = make_learner("a2c").critic
    (item,) = make_items(1)
    other_answer = replace(item, completion_ids=np.array([9, 9, 9], np.int32), logprobs=np.zeros(3, np.float32))
    assert np.array_equal(critic.estimate([item]), critic.estimate([other_answer]))
    for position in range(len(item.prompt_ids)):
        changed = item.prompt_ids.copy()
        changed[position] = (changed[position] + 150) % 300
        difference = critic.estimate([item]) - critic.estimate([replace(item, prompt_ids=changed)])
        assert abs(difference[0]) > 1e-5, position


def test_a_fresh_critic_expects_nothing(make_learner: MakeLearner, make_items: MakeItems) -> None:
    assert not make_learner("a2c", has_signal=False).critic.estimate(make_items(3)).any()


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("settings", [{}, {"mini_batch_size": 1}, {"max_tokens_per_micro_batch": 40}])
def test_the_critics_gradient_is_that_of_half_the_mean_squared_error_however_the_batch_is_cut(
    make_learner: MakeLearner, make_items: MakeItems, settings: dict[str, Any], checkpointing: bool
) -> None:
    flags = {"gradient_checkpointing": checkpointing, "activation_checkpointing": checkpointing}
    learner = make_learner("a2c", learner=settings | flags)
    double(learner)
    items, targets = make_items(6), np.random.default_rng(3).normal(size=6)
    expected_loss = value_loss(learner, items, targets.tolist())
    expected = gradient(expected_loss, learner.critic.parameters)
    learner.policy.model.set_adapter("default")
    assert learner.critic.add_gradient(items, targets) == pytest.approx(expected_loss.item(), abs=1e-6)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-2
    assert largest_difference(grads_of(learner.critic.parameters), expected) < 1e-8
    assert all(parameter.grad is None for parameter in learner.policy.parameters.values())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_policy_is_the_same_after_a_pass_of_the_critic(
    make_learner: MakeLearner, make_items: MakeItems, checkpointing: bool
) -> None:
    flags = {"gradient_checkpointing": checkpointing, "activation_checkpointing": checkpointing}
    learner, alone = make_learner("a2c", learner=flags), make_learner("reinforce", learner=flags)
    items = make_items(5)
    for name, parameter in alone.policy.parameters.items():
        parameter.data.copy_(learner.policy.parameters[name])
    learner.critic.estimate(items)
    learner.critic.add_gradient(items, np.ones(5))
    ours, theirs = (each.policy.score(items[:1])[0] for each in (learner, alone))
    assert np.array_equal(ours.adapter, theirs.adapter)
    assert np.array_equal(ours.base, theirs.base)
    assert not np.array_equal(ours.adapter, ours.base)
    for each in (learner, alone):
        each.add_gradient(items)
    assert is_equal(grads_of(learner.policy.parameters), grads_of(alone.policy.parameters))


def test_while_the_policys_loss_is_open_the_critic_and_the_base_may_be_asked(
    make_learner: MakeLearner, make_items: MakeItems
) -> None:
    """Layers that were checkpointed run again in the backward pass: the policy's adapter must be back by then."""
    results = []
    for asks in (False, True):
        learner = make_learner("a2c")
        (item,) = make_items(1)
        batch = pad([item])
        logp_N, _ = learner.policy.logprobs(batch)
        if asks:
            learner.critic.estimate([item])
            learner.policy.base_logprobs(batch)
        losses.policy_gradient_loss(logp_N, torch.ones(()), batch.advantage_N, 1.0).backward()
        results.append(grads_of(learner.policy.parameters))
    assert is_equal(*results)


def test_there_is_one_base_and_what_is_trained_is_float32(make_learner: MakeLearner, make_items: MakeItems) -> None:
    alone = make_learner("reinforce", learner={"dtype": "bfloat16"}).policy
    learner = make_learner("a2c", learner={"dtype": "bfloat16"})
    lora = sum(parameter.numel() for parameter in learner.policy.parameters.values())
    head = sum(parameter.numel() for parameter in learner.critic.head.parameters())
    assert sum(p.numel() for p in learner.critic.parameters.values()) == lora + head
    number = sum(parameter.numel() for parameter in learner.policy.model.parameters())
    assert number == sum(parameter.numel() for parameter in alone.model.parameters()) + lora
    assert {p.dtype for p in learner.critic.parameters.values()} == {torch.float32}
    before = {name: p.clone() for name, p in learner.policy.model.named_parameters() if "lora" not in name}
    assert learner.update(make_items(4, turns=2), 1).skipped is None
    assert all(torch.equal(p, before[n]) for n, p in learner.policy.model.named_parameters() if n in before)


def test_the_published_adapter_knows_nothing_of_the_critic(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    learner, alone = make_learner("a2c"), make_learner("reinforce")
    learner.update(make_items(4, turns=2), 1)
    adapter_files.publish(tmp_path / "v1", *learner.policy.adapter_state())
    published = safetensors.torch.load_file(tmp_path / "v1/adapter_model.safetensors")
    assert published.keys() == alone.policy.adapter_state()[0].keys()
    assert learner.policy.adapter_state()[1] == alone.policy.adapter_state()[1]
    for name, parameter in learner.policy.parameters.items():
        assert torch.equal(published[name.replace(".default", "")], parameter)


def test_a_saved_critic_is_where_another_run_can_start(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    first, items = make_learner("a2c"), make_items(4, turns=2)
    first.update(items, 1)
    first.save(tmp_path)
    assert {path.suffix for path in (tmp_path / "critic").iterdir()} == {".safetensors", ".json"}
    start = {"lora_rank": 4, "lora_alpha": 8, "initial_critic_path": str(tmp_path / "critic")}
    second = make_learner("ppo", has_signal=False, lora=start)
    assert np.array_equal(second.critic.estimate(items), first.critic.estimate(items))
    ours, theirs = snapshot(first), snapshot(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in first.critic.parameters)
    assert not any(torch.equal(ours[name], theirs[name]) for name in first.policy.parameters)


def test_a_critic_of_another_base_or_none_at_all_is_refused(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path
) -> None:
    learner = make_learner("a2c")
    learner.save(tmp_path)
    head = tmp_path / "critic/value_head.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, head)
    with pytest.raises(ModelError, match=r"value head has .*\(1, 5\).*this run's .*\(1, 64\)"):
        learner.critic.load(tmp_path / "critic")
    head.write_bytes(b"cut off")
    with pytest.raises(ModelError, match="is no critic with"):
        learner.critic.load(tmp_path / "critic")
    head.unlink()
    with pytest.raises(ModelError, match="is no critic with"):
        learner.critic.load(tmp_path / "critic")
