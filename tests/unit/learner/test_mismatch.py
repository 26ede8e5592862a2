"""The measured disagreement of engines and learner on each batch, on steps of the adapter that sampled them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.learner_fixtures import update_and_save
from unstable_lite.learner import worker
from unstable_lite.transport.messages import LoadLearner, Update, Updated
from unstable_lite.types import TrainItem


class Trainer:
    """A learner worker, and steps as an engine would sample them from its current version."""

    def __init__(self, learner: Any, place: Path) -> None:
        self.worker = worker._Worker(learner, learner.config)
        self.learner = learner
        self._place = place

    def sampled(self, items: list[TrainItem], drift: float = 0.0) -> list[TrainItem]:
        """Return `items` as an engine with the current adapter would have sampled them, with `drift` nats too much."""
        scored = self.learner.policy.score(items)
        version = self.learner.training.version
        return [
            replace(item, logprobs=each.adapter + drift, adapter_version=version)
            for item, each in zip(items, scored, strict=True)
        ]

    def update(self, items: list[TrainItem], version: int) -> dict[str, float]:
        path = str(self._place / f"v{version}")
        message = Update(request_id=1, items=tuple(items), version=version, path=path)
        updated = update_and_save(self.worker, message)
        assert isinstance(updated, Updated), updated
        return updated.metrics


def num_tokens(items: list[TrainItem]) -> int:
    return sum(len(item.completion_ids) for item in items)


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
def test_stale_steps_are_measured_with_their_own_version(make_learner, make_items, tmp_path, algorithm):
    learner = make_learner(algorithm, learner={"learning_rate": 0.05}, lora={"lora_dropout": 0.3})
    trainer = Trainer(learner, tmp_path)
    items = []
    for version in (1, 2, 3):
        new = [replace(item, trajectory=10 * version + item.trajectory) for item in make_items(4, seed=version)]
        items += trainer.sampled(new)
        metrics = trainer.update(items, version)
        assert metrics["mismatch_tokens"] == num_tokens(items)
        assert metrics["mismatch_max"] < 1e-4, "the engine is exact"
    metrics = trainer.update([replace(item, adapter_version=3) for item in items], 4)
    assert metrics["mismatch_mean"] > 0.1, "these tokens are of versions 0, 1 and 2"


def test_engine_drift_is_measured_on_stale_steps(make_learner, make_items, tmp_path):
    trainer = Trainer(make_learner(), tmp_path)
    items = trainer.sampled(make_items(), drift=0.25)
    for version in (1, 2, 3):
        metrics = trainer.update(items, version)
        assert metrics["mismatch_mean"] == pytest.approx(0.25, abs=1e-4)
        assert metrics["mismatch_max"] == pytest.approx(0.25, abs=1e-4)


def test_step_of_an_unavailable_version_is_left_out(make_learner, make_items, tmp_path):
    trainer = Trainer(make_learner(buffer={"max_staleness": 1}), tmp_path)
    first = trainer.sampled(make_items())
    for version in (1, 2):
        assert trainer.update(first, version)["mismatch_tokens"] == num_tokens(first)
    metrics = trainer.update(first, 3)
    assert metrics["mismatch_tokens"] == 0
    assert "mismatch_mean" not in metrics and "mismatch_max" not in metrics, "0 would mean a perfect match"
    assert len(trainer.worker.past_adapters) == 2


def test_mismatch_sample_is_64_steps_chosen_by_update_number(make_learner, make_items):
    learner = make_learner()
    items = make_items(200)
    one, another = (worker._Worker(learner, learner.config) for _ in range(2))
    assert one._mismatch(items, 1) == another._mismatch(items, 1)
    assert one._mismatch(items, 1) != one._mismatch(items, 2)
    first = items[0]
    one_token = replace(first, completion_ids=first.completion_ids[:1], logprobs=first.logprobs[:1])
    assert one._mismatch([one_token] * 200, 1)["mismatch_tokens"] == 64


def test_measuring_does_not_change_the_learner(make_learner, make_items):
    learner = make_learner(lora={"lora_dropout": 0.3})
    one = worker._Worker(learner, learner.config)
    for parameter in learner.policy.parameters.values():
        parameter.data += 0.1
    before = {name: value.detach().clone() for name, value in learner.policy.parameters.items()}
    random_state = torch.get_rng_state()
    one._mismatch(make_items(), 1)
    assert all(torch.equal(before[name], value) for name, value in learner.policy.parameters.items())
    assert all(value.requires_grad for value in learner.policy.parameters.values())
    assert torch.equal(random_state, torch.get_rng_state())


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_only_saved_versions_are_measured_after_a_resume(make_learner, make_items, tmp_path, schedule):
    trainer = Trainer(make_learner(run={"schedule": schedule}), tmp_path)
    stale = trainer.sampled(make_items())
    trainer.update(stale, 1)
    fresh = trainer.sampled(make_items(3, seed=5))
    (tmp_path / "resumed").mkdir()
    resumed = Trainer(make_learner(run={"schedule": schedule}), tmp_path / "resumed")
    resumed.worker.answer(LoadLearner(request_id=2, path=str(tmp_path / "v1.state")))
    metrics = resumed.update([*stale, *fresh], 2)
    whole = trainer.update([*stale, *fresh], 2)
    assert whole["mismatch_tokens"] == num_tokens([*stale, *fresh])
    assert metrics["mismatch_tokens"] == num_tokens([*stale, *fresh] if schedule == "sync" else fresh)
    assert metrics["mismatch_max"] < 1e-4
    if schedule == "sync":
        assert metrics["mismatch_mean"] == whole["mismatch_mean"]
