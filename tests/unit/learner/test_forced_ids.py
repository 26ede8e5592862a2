"""A completion with forced ids is trained like the two generations of which it was made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fakes.learner_fixtures import VOCAB
from fakes.unrolled import (
    MAX_GENERATION_LEN,
    double,
    gradient,
    grads_of,
    largest_difference,
    logprobs,
    policy_loss,
)
from unstable_lite.learner.algorithms.ppo import proximal_policy
from unstable_lite.types import Forced, TrainItem


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
    if algorithm == "grpo":
        learner.add_gradient(items, proximal_policy(learner.policy, items, learner.training.config))
        with torch.no_grad():
            old = [logprobs(learner, step) for step in steps]
        expected = policy_loss(learner, steps, advantages, old, length)
    else:
        learner.add_gradient(items)
        expected = policy_loss(learner, steps, advantages, length=length)
    ours = grads_of(learner.policy.parameters)
    theirs = gradient(expected, learner.policy.parameters)
    assert max(g.abs().max().item() for g in theirs.values()) > 1e-2
    assert largest_difference(ours, theirs) < 1e-7


def test_scores_are_those_of_two_steps(make_learner, make_items):
    learner = make_learner()
    items = with_forced(make_items(7))
    scores = learner.policy.score(items)
    for item, score in zip(items, scores, strict=True):
        of_steps = learner.policy.score(parts(item))
        for name in ("adapter", "base"):
            theirs = np.concatenate([getattr(one, name) for one in of_steps])
            np.testing.assert_allclose(getattr(score, name), theirs, atol=1e-4)


def test_critic_sees_one_turn(make_learner, make_items):
    """The critic reads prompts only, so forced ids change neither values nor the number of turns."""
    learner, twin = make_learner("a2c"), make_learner("a2c")
    items = make_items(6, turns=2)
    metrics = learner.update(with_forced(items), 1).metrics
    plain = twin.update(items, 1).metrics
    for name in ("value_loss", "value_mean"):
        assert metrics.get(name) == plain.get(name)
    assert plain.get("value_loss") is not None
