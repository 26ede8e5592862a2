"""One REINFORCE update compared with its formula, and everything that must not change the update."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unstable_lite.errors import ConfigError
from unstable_lite.learner import LEARNERS, batching, load_learner
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.types import TrainItem

MakeLearner = Callable[..., REINFORCELearner]
MakeItems = Callable[..., list[TrainItem]]

METRICS = {
    *("loss", "logp_mean", "avg_train_len", "pct_truncated", "step", "samples_seen", "lr", "policy_grad_norm"),
    *("entropy", "importance_weight_mean", "importance_weight_clipped", "num_items", "num_tokens", "padding_share"),
    *("staleness_mean", "staleness_max", "dropped_too_long", "weight_mean", "weight_zero"),
    *("tokens_per_s", "seconds", "zero_advantage", "grad_clipped"),
}


def unrolled_gradient(
    learner: REINFORCELearner, items: list[TrainItem], temperature: float, cap: float, max_generation_len: int
) -> tuple[float, dict[str, Tensor]]:
    """Compute REINFORCE by its formula: one sequence at a time, with the model's own logits and the whole softmax."""
    total = torch.zeros((), dtype=torch.float64)
    for item in items:
        num_prompt = len(item.prompt_ids)
        tokens = torch.tensor(np.concatenate([item.prompt_ids, item.completion_ids]))[None].long()
        logits_TV = learner.policy.model(input_ids=tokens).logits[0] / temperature
        for t, token in enumerate(item.completion_ids.tolist()):
            logp = torch.log_softmax(logits_TV[num_prompt + t - 1], dim=-1)[token]
            ratio = math.exp(logp.item() - float(item.logprobs[t]))
            total = total - min(ratio, cap) * float(np.float32(item.reward)) * logp
    loss = total / (max_generation_len * len(items))
    gradients = torch.autograd.grad(loss, list(learner.policy.parameters.values()))
    return loss.item(), dict(zip(learner.policy.parameters, gradients, strict=True))


def gradient(learner: REINFORCELearner, items: list[TrainItem]) -> dict[str, Tensor]:
    for parameter in learner.policy.parameters.values():
        parameter.grad = None
    learner.add_gradient(items)
    gradients = {}
    for name, parameter in learner.policy.parameters.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
    return gradients


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def snapshot(learner: REINFORCELearner) -> dict[str, Tensor]:
    """Return everything that an update may change: parameters and optimizer state."""
    state = {name: parameter.detach().clone() for name, parameter in learner.policy.parameters.items()}
    for name, parameter in learner.policy.parameters.items():
        for key, value in learner.training.optimizer.state.get(parameter, {}).items():
            state[f"{key}/{name}"] = value.clone()
    return state


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradient_matches_the_formula(make_learner: MakeLearner, make_items: MakeItems, checkpointing: bool) -> None:
    settings = {
        "max_tokens_per_micro_batch": 60,
        "logits_chunk_tokens": 5,
        "activation_checkpointing": checkpointing,
    }
    learner = make_learner(learner=settings)
    learner.policy.model.double()
    items = make_items(9)
    loss, expected = unrolled_gradient(learner, items, temperature=0.7, cap=2.0, max_generation_len=16)
    ours = gradient(learner, items)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-2
    assert largest_difference(ours, expected) < 1e-9
    assert learner.add_gradient(items).loss == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"mini_batch_size": 1},
        {"mini_batch_size": 3},
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 50},
        {"logits_chunk_tokens": 1},
    ],
)
def test_gradient_does_not_depend_on_micro_batches(
    make_learner: MakeLearner, make_items: MakeItems, settings: dict[str, Any]
) -> None:
    items = make_items(12)
    whole, cut = make_learner(), make_learner(learner=settings)
    whole.policy.model.double()
    cut.policy.model.double()
    assert largest_difference(gradient(whole, items), gradient(cut, items)) < 1e-9


def test_padding_is_never_trained(
    make_learner: MakeLearner, make_items: MakeItems, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour without advantage pads every other row; its length must not matter."""
    monkeypatch.setitem(batching.BATCH_COST, "cpu", 10_000)  # everything in one micro-batch
    learner = make_learner()
    learner.policy.model.double()
    items = make_items(4)
    short = replace(items[0], reward=0.0)
    long = replace(short, prompt_ids=np.arange(200, dtype=np.int32))
    assert learner.add_gradient([*items, long]).metrics(0, 2.0, "kl_to_base")["padding_share"] > 0.5
    assert largest_difference(gradient(learner, [*items, short]), gradient(learner, [*items, long])) < 1e-9


def test_stop_token_is_trained_and_the_prompt_is_not(make_learner: MakeLearner) -> None:
    ids = np.arange(6, dtype=np.int32)
    item = TrainItem(
        prompt_ids=ids[:4],
        completion_ids=ids[4:],
        logprobs=np.full(2, -5, np.float32),
        reward=1.0,
        adapter_version=0,
        trajectory=0,
    )
    stop_only = replace(item, prompt_ids=ids[:5], completion_ids=ids[5:], logprobs=item.logprobs[1:])
    first_only = replace(item, completion_ids=ids[4:5], logprobs=item.logprobs[:1])
    learner = make_learner()
    learner.policy.model.double()
    both, stop, first = gradient(learner, [item]), gradient(learner, [stop_only]), gradient(learner, [first_only])
    assert max(g.abs().max().item() for g in stop.values()) > 1e-3
    # Qwen3's norms round to float32 in every dtype, and a sum is rounded differently from its parts.
    assert largest_difference(both, {name: stop[name] + first[name] for name in stop}) < 1e-7


def test_positive_advantage_raises_and_negative_lowers_the_likelihood(
    make_learner: MakeLearner, make_items: MakeItems
) -> None:
    for advantage in (1.0, -1.0):
        learner = make_learner(has_signal=False)
        (item,) = make_items(1)
        (before,) = learner.policy.score([item])
        assert np.array_equal(before.adapter, before.base)  # a fresh adapter changes nothing
        learner.update([replace(item, reward=advantage, logprobs=before.adapter)], version=1)
        (after,) = learner.policy.score([item])
        assert (after.adapter.sum() - before.adapter.sum()) * advantage > 0.01
        assert np.array_equal(after.base, before.base)


def test_n_updates_make_n_steps_and_n_versions(make_learner: MakeLearner, make_items: MakeItems) -> None:
    learner = make_learner()
    states = [snapshot(learner)]
    for version in range(1, 6):
        result = learner.update(make_items(4, seed=version), version)
        assert result.skipped is None
        assert result.metrics["step"] == version == learner.training.version
        assert result.metrics["samples_seen"] == 4 * version
        states.append(snapshot(learner))
    assert not any(is_equal(a, b) for a, b in itertools.pairwise(states))


def test_update_reports_every_metric_as_a_finite_number(make_learner: MakeLearner, make_items: MakeItems) -> None:
    metrics = make_learner().update(make_items(), 1).metrics
    assert metrics.keys() == METRICS
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values()), metrics
    assert 0 < metrics["entropy"] < math.log(300)


@pytest.mark.parametrize("poison", ["reward", "logprobs", "weights"])
def test_non_finite_gradient_skips_the_update_and_changes_nothing(
    make_learner: MakeLearner, make_items: MakeItems, poison: str
) -> None:
    learner = make_learner()
    items = make_items(6)
    learner.update(items, 1)
    before = snapshot(learner)
    poisoned = list(items)
    embedding = learner.policy._base.get_input_embeddings().weight
    original = embedding[items[2].prompt_ids[0]].clone()
    if poison == "reward":
        poisoned[2] = replace(items[2], reward=math.nan)
    elif poison == "logprobs":
        poisoned[2] = replace(items[2], logprobs=np.full_like(items[2].logprobs, np.nan))
    else:
        embedding.data[items[2].prompt_ids[0]] = torch.nan
    result = learner.update(poisoned, 2)
    assert result.skipped is not None
    assert "not finite" in result.skipped
    assert is_equal(before, snapshot(learner))
    assert (learner.training.step, learner.training.version, result.metrics["samples_seen"]) == (1, 1, 6)
    embedding.data[items[2].prompt_ids[0]] = original
    clean = make_learner()
    clean.update(items, 1)
    clean.update(items, 2)
    assert learner.update(items, 2).skipped is None
    assert is_equal(snapshot(learner), snapshot(clean))


def test_gradient_norm_is_measured_before_clipping(make_learner: MakeLearner, make_items: MakeItems) -> None:
    items = [replace(item, reward=100.0) for item in make_items()]
    tight, loose = make_learner(learner={"gradient_clipping": 1e-3}), make_learner(learner={"gradient_clipping": 1e9})
    norm = math.sqrt(sum(g.square().sum().item() for g in gradient(make_learner(), items).values()))
    norm *= (
        16 * len(items) / sum(len(item.completion_ids) for item in items)
    )  # the divisor is the first batch's mean length
    clipped = tight.update(items, 1).metrics["policy_grad_norm"]
    assert clipped == pytest.approx(norm, rel=1e-4)
    assert loose.update(items, 1).metrics["policy_grad_norm"] == pytest.approx(norm, rel=1e-4)
    first_moments = [state["exp_avg"] for state in tight.training.optimizer.state.values()]
    assert math.sqrt(sum(m.square().sum().item() for m in first_moments)) == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_adapter_trains_in_float32_and_the_bfloat16_base_never_changes(
    make_learner: MakeLearner, make_items: MakeItems
) -> None:
    learner = make_learner(learner={"dtype": "bfloat16"})
    trained = set(learner.policy.parameters)
    base = {n: p.detach().clone() for n, p in learner.policy.model.named_parameters() if n not in trained}
    for version in (1, 2):
        assert learner.update(make_items(seed=version), version).skipped is None
    assert {p.dtype for p in learner.policy.parameters.values()} == {torch.float32}
    state = [value for s in learner.training.optimizer.state.values() for value in s.values()]
    assert state
    assert {value.dtype for value in state} == {torch.float32}
    assert {value.dtype for value in base.values()} == {torch.bfloat16}
    assert all(torch.equal(p, base[n]) for n, p in learner.policy.model.named_parameters() if n in base)


def test_learning_rate_of_1e_5_moves_a_weight_of_0_01(make_learner: MakeLearner, make_items: MakeItems) -> None:
    """A bfloat16 weight of that size has steps of 6e-5 and would never move."""
    learner = make_learner(learner={"dtype": "bfloat16", "learning_rate": 1e-5, "weight_decay": 0.0})
    parameters = list(learner.policy.parameters.values())
    for parameter in parameters:
        parameter.data.fill_(0.01)
        parameter.data.view(-1)[::2] *= -1  # equal entries would cancel
    before = [parameter.detach().clone() for parameter in parameters]
    learner.update(make_items(), 1)
    moved = torch.cat([(p - b).abs().flatten() for p, b in zip(parameters, before, strict=True)])
    assert ((moved > 5e-6) & (moved < 2e-5)).float().mean() > 0.9


def test_overlong_steps_are_counted_and_not_trained(make_learner: MakeLearner, make_items: MakeItems) -> None:
    (fits,) = make_items(1)
    fits = replace(fits, prompt_ids=np.arange(4, dtype=np.int32))
    answer = replace(fits, completion_ids=np.arange(30, dtype=np.int32), logprobs=np.full(30, -5, np.float32))
    prompt = replace(fits, prompt_ids=np.arange(40, dtype=np.int32))
    learner = make_learner(learner={"max_train_len": 20})
    metrics = learner.update([fits, answer, prompt, prompt], 1).metrics
    assert metrics["pct_truncated"] == 0.75
    assert metrics["dropped_too_long"] == 3
    assert metrics["num_items"] == metrics["samples_seen"] == 1
    assert metrics["num_tokens"] == len(fits.completion_ids)
    before = snapshot(learner)
    result = learner.update([answer], 2)
    assert result.skipped is not None
    assert "max_train_len" in result.skipped
    assert is_equal(before, snapshot(learner))


def test_staleness_is_mean_and_maximum_over_all_tokens(make_learner: MakeLearner, make_items: MakeItems) -> None:
    learner = make_learner()
    for version in (1, 2, 3):
        learner.update(make_items(seed=version), version)
    fresh, stale = make_items(2, adapter_version=3), make_items(1, seed=9, adapter_version=1)
    metrics = learner.update([*fresh, *stale], 4).metrics
    assert metrics["staleness_max"] == 2
    num_stale = len(stale[0].completion_ids)
    assert metrics["staleness_mean"] == pytest.approx(2 * num_stale / metrics["num_tokens"])


@pytest.mark.parametrize("num_before", [0, 3])
def test_saved_learner_resumes_bit_for_bit(
    make_learner: MakeLearner, make_items: MakeItems, tmp_path: Path, num_before: int
) -> None:
    sections: dict[str, Any] = {"lora": {"lora_dropout": 0.1}}  # so that the random state matters too
    learner = make_learner(**sections)
    for version in range(1, num_before + 1):
        learner.update(make_items(seed=version), version)
    random_state = torch.get_rng_state()
    learner.training.save(tmp_path)
    resumed = make_learner(has_signal=False, **sections)
    torch.manual_seed(123)
    resumed.training.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    results = []
    for each in (learner, resumed):
        torch.set_rng_state(random_state)
        for version in range(num_before + 1, num_before + 4):
            results.append(each.update(make_items(seed=version), version).metrics)
    assert is_equal(snapshot(learner), snapshot(resumed))
    for a, b in zip(results[:3], results[3:], strict=True):
        assert {**a, "seconds": 0, "tokens_per_s": 0} == {**b, "seconds": 0, "tokens_per_s": 0}


def test_learner_is_found_by_name_or_by_module_and_class(
    make_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_syntax.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    config = make_config()
    assert isinstance(load_learner(config, "cpu"), REINFORCELearner)
    by_path = config.model_copy(update={"algorithm": LEARNERS["reinforce"].target})
    assert isinstance(load_learner(by_path, "cpu"), REINFORCELearner)
    for name, says in (
        ("reinforced", "unknown algorithm 'reinforced'"),
        ("no.such:Learner", "'no.such:Learner'"),
        ("json:Nothing", "'json:Nothing'"),
        (
            "bad_syntax:Learner",
            "'bad_syntax:Learner'",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_learner(config.model_copy(update={"algorithm": name}), "cpu")
