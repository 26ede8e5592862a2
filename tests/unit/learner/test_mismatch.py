"""Scores of other adapters, and the measured disagreement of engines and learner on each batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from fakes.learner_fixtures import update_and_save
from fakes.random_models import make_adapter
from fakes.unrolled import is_equal, snapshot
from unstable_lite.adapters import peft_files
from unstable_lite.learner import worker
from unstable_lite.learner.other_adapters import read_parameters
from unstable_lite.transport.messages import Failed, LoadLearner, Score, Scored, Update, Updated
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


def test_stale_steps_are_measured_with_their_own_version(make_learner, make_items, tmp_path):
    learner = make_learner("ppo", learner={"learning_rate": 0.05}, lora={"lora_dropout": 0.3})
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
    items = trainer.sampled(make_items(), drift=0.25)
    for version in (5, 6):
        metrics = trainer.update(items, version)
        assert (metrics["mismatch_mean"], metrics["mismatch_max"]) == pytest.approx((0.25, 0.25), abs=1e-4)


def test_step_of_an_unavailable_version_is_left_out(make_learner, make_items, tmp_path):
    trainer = Trainer(make_learner(buffer={"max_staleness": 1}), tmp_path)
    first = trainer.sampled(make_items())
    for version in (1, 2):
        assert trainer.update(first, version)["mismatch_tokens"] == num_tokens(first)
    metrics = trainer.update(first, 3)
    assert metrics["mismatch_tokens"] == 0
    assert "mismatch_mean" not in metrics and "mismatch_max" not in metrics, "0 would mean a perfect match"
    assert len(trainer.worker.past_adapters) == 2


def test_mismatch_sample_is_64_steps_chosen_by_update_number_and_measured_without_a_change(make_learner, make_items):
    learner = make_learner(lora={"lora_dropout": 0.3})
    items = make_items(200)
    one, another = (worker._Worker(learner, learner.config) for _ in range(2))
    for parameter in learner.policy.parameters.values():
        parameter.data += 0.1
    before, random_state = snapshot(learner), torch.get_rng_state()
    assert one._mismatch(items, 1) == another._mismatch(items, 1)
    assert one._mismatch(items, 1) != one._mismatch(items, 2)
    first = items[0]
    one_token = replace(first, completion_ids=first.completion_ids[:1], logprobs=first.logprobs[:1])
    assert one._mismatch([one_token] * 200, 1)["mismatch_tokens"] == 64
    assert is_equal(before, snapshot(learner))
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


def by_peft(directory: Path, model_path: Path, item: Any, temperature: float) -> Any:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_path), directory).eval()
    tokens_T = torch.from_numpy(np.concatenate([item.prompt_ids, item.completion_ids])).long()
    with torch.no_grad():
        logp_TV = (model(input_ids=tokens_T[None]).logits[0] / temperature).log_softmax(-1)
    n = len(item.completion_ids)
    return logp_TV[-n - 1 : -1].gather(-1, tokens_T[-n:, None])[:, 0].numpy()


@pytest.mark.parametrize(
    ("rank", "alpha", "modules"),
    [(4, 8, ["q_proj", "down_proj"]), (2, 9, ["q_proj", "v_proj", "up_proj"]), (1, 1, ["o_proj"])],
)
def test_scores_equal_those_of_peft_at_any_lower_rank_and_scale(
    make_learner, make_items, model_path, tmp_path, rank, alpha, modules
):
    frozen = make_adapter(model_path, tmp_path / "frozen", rank, r=rank, lora_alpha=alpha, target_modules=modules)
    learner, items = make_learner(), tuple(make_items())
    before, own = snapshot(learner), learner.policy.score(items)
    reply = worker._Worker(learner, learner.config).answer(Score(request_id=1, items=items, adapter=str(frozen)))
    assert isinstance(reply, Scored)
    for item, scored, trained in zip(items, reply.logprobs, own, strict=True):
        assert scored.adapter == pytest.approx(by_peft(frozen, model_path, item, 0.7), abs=1e-4)
        assert np.array_equal(scored.base, trained.base)
        assert np.abs(scored.adapter - trained.adapter).max() > 1e-3
    assert is_equal(before, snapshot(learner))
    assert all(np.array_equal(a.adapter, b.adapter) for a, b in zip(learner.policy.score(items), own, strict=True))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("shapes differ")], ids=repr)
def test_failed_score_leaves_the_learner_as_it_was(make_learner, make_items, model_path, tmp_path, monkeypatch, error):
    frozen = make_adapter(model_path, tmp_path / "frozen", 4, r=4, target_modules=["q_proj", "down_proj"])
    learner, calls = make_learner(), []
    policy, before, limit = learner.policy, snapshot(learner), learner.policy.max_tokens_per_micro_batch

    def fail(*args: Any) -> Any:
        calls.append(any(not torch.equal(before[name], value) for name, value in policy.parameters.items()))
        raise error

    monkeypatch.setattr(policy, "item_logprobs", fail)
    message = Score(request_id=1, items=tuple(make_items()), adapter=str(frozen))
    if isinstance(error, torch.OutOfMemoryError):
        assert isinstance(worker._Worker(learner, learner.config).answer(message), Failed)
    else:
        with pytest.raises(RuntimeError, match="shapes differ"):
            worker._Worker(learner, learner.config).answer(message)
    assert calls[0], "it failed while the policy had the other adapter's parameters"
    assert is_equal(before, snapshot(learner))
    assert policy.max_tokens_per_micro_batch == limit


def test_scores_of_an_own_adapter_are_equal_to_the_last_bit(make_learner, make_items, tmp_path):
    learner, items = make_learner(), make_items()
    peft_files.write_adapter(tmp_path / "own", *learner.policy.adapter_state())
    parameters = read_parameters(tmp_path / "own", learner.policy)
    pairs = zip(learner.policy.score(items, parameters), learner.policy.score(items), strict=True)
    assert all(np.array_equal(a.adapter, b.adapter) for a, b in pairs)


def narrow(path: Path) -> Path:
    """Take a column from each matrix of inputs."""
    tensors = safetensors.torch.load_file(path / peft_files.WEIGHTS)
    fewer = {name: t[:, :-1].contiguous() if "lora_A" in name else t for name, t in tensors.items()}
    safetensors.torch.save_file(fewer, path / peft_files.WEIGHTS)
    return path


def test_unfit_adapter_is_a_failed_request(make_learner, make_items, model_path, tmp_path):
    learner, items = make_learner(lora={"target_modules": ["q_proj"]}), tuple(make_items())
    unfit = {
        tmp_path / "nowhere": "adapter_model.safetensors",
        make_adapter(model_path, tmp_path / "rank", 1, r=8, target_modules=["q_proj"]): "does not fit",
        make_adapter(model_path, tmp_path / "layers", 1, r=4, target_modules=["k_proj"]): "learner's adapter does not",
        narrow(make_adapter(model_path, tmp_path / "sizes", 1, r=4, target_modules=["q_proj"])): "does not fit",
    }
    for path, says in unfit.items():
        reply = worker._Worker(learner, learner.config).answer(Score(request_id=1, items=items, adapter=str(path)))
        assert isinstance(reply, Failed)
        assert str(path) in reply.error and says in reply.error
