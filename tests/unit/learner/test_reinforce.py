"""One REINFORCE update compared with its formula, and everything that must not change the update."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes.unrolled import gradient, grads_of, largest_difference, mean_length, policy_loss
from unstable_lite.errors import ConfigError
from unstable_lite.learner import LEARNERS, LOGITS_CHUNK_TOKENS, batching, load_learner
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.types import TrainItem


def gradient_of(learner: REINFORCELearner, items: list[TrainItem]) -> dict[str, Tensor]:
    for parameter in learner.policy.parameters.values():
        parameter.grad = None
    learner.add_gradient(items)
    return grads_of(learner.policy.parameters)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradient_matches_the_formula(make_learner, make_items, checkpointing, monkeypatch):
    monkeypatch.setitem(LOGITS_CHUNK_TOKENS, False, 5)
    learner = make_learner(learner={"max_tokens_per_micro_batch": 60, "activation_checkpointing": checkpointing})
    learner.policy.model.double()
    items = make_items(9)
    loss = policy_loss(learner, items, [float(np.float32(item.reward)) for item in items])
    expected = gradient(loss, learner.policy.parameters)
    assert max(g.abs().max().item() for g in expected.values()) > 1e-2
    assert largest_difference(gradient_of(learner, items), expected) < 1e-9
    assert learner.add_gradient(items).loss == pytest.approx(loss.item(), abs=1e-6)


def test_padding_is_never_trained(make_learner, make_items, monkeypatch):
    """A neighbour without advantage pads every other row; its length must not matter."""
    monkeypatch.setitem(batching.BATCH_COST, "cpu", 10_000)  # everything in one micro-batch
    learner = make_learner()
    learner.policy.layout = "rows"
    learner.policy.model.double()
    items = make_items(4)
    short = replace(items[0], reward=0.0)
    long = replace(short, prompt_ids=np.arange(200, dtype=np.int32))
    assert learner.add_gradient([*items, long]).metrics(0, 2.0, "kl_to_base")["padding_share"] > 0.5
    assert largest_difference(gradient_of(learner, [*items, short]), gradient_of(learner, [*items, long])) < 1e-9


@pytest.mark.parametrize("kept", [0, 5])
def test_items_that_an_algorithm_leaves_out_are_named(make_learner, make_items, kept):
    learner, items = make_learner(), make_items(7)
    whole = learner.add_gradient
    learner.add_gradient = lambda given: whole(given[2 : 2 + kept])  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"{7 - kept} of 7 items were not added .* weight 0 has no gradient"):
        learner.update(items, 1)
    learner.add_gradient = lambda given: whole([replace(item, weight=0.0) for item in given])  # type: ignore[method-assign]
    assert learner.update(items, 1).metrics["weight_zero"] == 1.0


def test_gradient_norm_is_measured_before_clipping(make_learner, make_items):
    items = [replace(item, reward=100.0) for item in make_items()]
    tight, loose = make_learner(learner={"gradient_clipping": 1e-3}), make_learner(learner={"gradient_clipping": 1e9})
    norm = math.sqrt(sum(g.square().sum().item() for g in gradient_of(make_learner(), items).values()))
    norm *= 16 / mean_length(items)  # the divisor is the first batch's mean length
    clipped = tight.update(items, 1).metrics["policy_grad_norm"]
    assert clipped == pytest.approx(norm, rel=1e-4)
    assert loose.update(items, 1).metrics["policy_grad_norm"] == pytest.approx(norm, rel=1e-4)
    first_moments = [state["exp_avg"] for state in tight.training.optimizer.state.values()]
    assert math.sqrt(sum(m.square().sum().item() for m in first_moments)) == pytest.approx(0.1 * 1e-3, rel=1e-2)


def test_adapter_trains_in_float32_and_the_bfloat16_base_never_changes(make_learner, make_items):
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


def test_staleness_is_mean_and_maximum_over_all_tokens(make_learner, make_items):
    learner = make_learner()
    for version in (1, 2, 3):
        learner.update(make_items(seed=version), version)
    fresh, stale = make_items(2, adapter_version=3), make_items(1, seed=9, adapter_version=1)
    metrics = learner.update([*fresh, *stale], 4).metrics
    assert metrics["staleness_max"] == 2
    num_stale = len(stale[0].completion_ids)
    assert metrics["staleness_mean"] == pytest.approx(2 * num_stale / metrics["num_tokens"])


def test_learner_is_found_by_name_or_by_module_and_class(make_config, tmp_path, monkeypatch):
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
        ("bad_syntax:Learner", "'bad_syntax:Learner'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            load_learner(config.model_copy(update={"algorithm": name}), "cpu")


def test_algorithm_must_return_a_trained(make_learner, make_items):
    learner = make_learner()
    learner.add_gradient = lambda items: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="algorithm: add_gradient must return a Trained; it returned None"):
        learner.update(make_items(9), 1)
