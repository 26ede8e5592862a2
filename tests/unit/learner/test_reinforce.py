"""Metrics of a REINFORCE update, the learners that a config names, and algorithms whose result is refused."""

import math
import re
from dataclasses import replace

import pytest

from fakes.unrolled import grads_of, mean_length
from unstable_lite.errors import ConfigError
from unstable_lite.learner import LEARNERS, load_learner
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.learner.batching import length


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
    loose.add_gradient(items)
    norm = math.sqrt(sum(g.square().sum().item() for g in grads_of(loose.policy.parameters).values()))
    norm *= 16 / mean_length(items)  # the divisor is the first batch's mean length
    for learner in (tight, loose):
        assert learner.update(items, 1).metrics["policy_grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_staleness_and_padding_are_those_of_all_tokens(make_learner, make_items):
    learner = make_learner()
    learner.policy.layout = "rows"
    for version in (1, 2, 3):
        learner.update(make_items(seed=version), version)
    fresh, stale = make_items(2, adapter_version=3), make_items(1, seed=9, adapter_version=1)
    metrics = learner.update([*fresh, *stale], 4).metrics
    assert metrics["staleness_max"] == 2
    num_stale = len(stale[0].completion_ids)
    assert metrics["staleness_mean"] == pytest.approx(2 * num_stale / metrics["num_tokens"])
    lengths = [length(item) for item in (*fresh, *stale)]
    assert metrics["padding_share"] == pytest.approx(1 - sum(lengths) / (3 * max(lengths)))


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
