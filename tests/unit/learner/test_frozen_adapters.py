"""Scores of an adapter that the learner does not train equal those of PEFT, and leave the learner as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from fakes.unrolled import snapshot
from unstable_lite.adapters import peft_files
from unstable_lite.learner import worker
from unstable_lite.learner.other_adapters import read_parameters
from unstable_lite.transport.messages import Failed, Score, Scored


def write_frozen(directory: Path, model_path: Path, rank: int, alpha: float, modules: list[str]) -> Path:
    """Write an adapter by PEFT itself, with every matrix random."""
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), config)
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


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
    frozen = write_frozen(tmp_path / "frozen", model_path, rank, alpha, modules)
    learner, items = make_learner(), tuple(make_items())
    before, own = snapshot(learner), learner.policy.score(items)
    reply = worker._Worker(learner, learner.config).answer(Score(request_id=1, items=items, adapter=str(frozen)))
    assert isinstance(reply, Scored)
    for item, scored, trained in zip(items, reply.logprobs, own, strict=True):
        assert scored.adapter == pytest.approx(by_peft(frozen, model_path, item, 0.7), abs=1e-4)
        assert np.array_equal(scored.base, trained.base)
        assert np.abs(scored.adapter - trained.adapter).max() > 1e-3
    after = snapshot(learner)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(np.array_equal(a.adapter, b.adapter) for a, b in zip(learner.policy.score(items), own, strict=True))


@pytest.mark.parametrize(
    ("failures", "error"),
    [
        pytest.param(1, torch.OutOfMemoryError("out of memory"), id="memory once"),
        pytest.param(99, torch.OutOfMemoryError("out of memory"), id="memory always"),
        pytest.param(1, RuntimeError("shapes differ"), id="another error"),
    ],
)
def test_failed_score_leaves_the_learner_as_it_was(
    make_learner, make_items, model_path, tmp_path, monkeypatch, failures, error
):
    frozen = write_frozen(tmp_path / "frozen", model_path, 4, 8, ["q_proj", "down_proj"])
    learner, items = make_learner(), tuple(make_items())
    message = Score(request_id=1, items=items, adapter=str(frozen))
    policy, before, limit = learner.policy, snapshot(learner), learner.policy.max_tokens_per_micro_batch
    expected = worker._Worker(learner, learner.config).answer(message)
    assert isinstance(expected, Scored)
    item_logprobs, calls = policy.item_logprobs, []

    def fail_first(*args: Any) -> Any:
        calls.append(any(not torch.equal(before[name], value) for name, value in policy.parameters.items()))
        if len(calls) <= failures:
            raise error
        return item_logprobs(*args)

    monkeypatch.setattr(policy, "item_logprobs", fail_first)
    if isinstance(error, torch.OutOfMemoryError):
        reply = worker._Worker(learner, learner.config).answer(message)
        assert isinstance(reply, Failed if failures > 1 else Scored)
        if isinstance(reply, Scored):
            for ours, theirs in zip(reply.logprobs, expected.logprobs, strict=True):
                assert ours.adapter == pytest.approx(theirs.adapter, abs=1e-5)
    else:
        with pytest.raises(RuntimeError, match="shapes differ"):
            worker._Worker(learner, learner.config).answer(message)
    assert calls[0], "it failed while the policy had the other adapter's parameters"
    after = snapshot(learner)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert policy.max_tokens_per_micro_batch == limit


def test_scores_of_an_own_adapter_are_equal_to_the_last_bit(make_learner, make_items, tmp_path):
    learner, items = make_learner(), make_items()
    peft_files.write_adapter(tmp_path / "own", *learner.policy.adapter_state())
    parameters = read_parameters(tmp_path / "own", learner.policy)
    pairs = zip(learner.policy.score(items, parameters), learner.policy.score(items), strict=True)
    assert all(np.array_equal(a.adapter, b.adapter) for a, b in pairs)


@pytest.mark.parametrize(
    ("rank", "modules", "is_narrow", "says"),
    [
        pytest.param(8, ["q_proj"], False, "does not fit", id="higher rank"),
        pytest.param(4, ["k_proj"], False, "the learner's adapter does not", id="other layers"),
        pytest.param(4, ["q_proj"], True, "does not fit", id="other sizes"),
    ],
)
def test_unfit_adapter_is_a_failed_request(
    make_learner, make_items, model_path, tmp_path, rank, modules, is_narrow, says
):
    learner = make_learner(lora={"target_modules": ["q_proj"]})
    path = write_frozen(tmp_path / "frozen", model_path, rank, 8, modules)
    if is_narrow:
        tensors = safetensors.torch.load_file(path / peft_files.WEIGHTS)
        narrow = {name: t[:, :-1].contiguous() if "lora_A" in name else t for name, t in tensors.items()}
        safetensors.torch.save_file(narrow, path / peft_files.WEIGHTS)
    message = Score(request_id=1, items=tuple(make_items()), adapter=str(path))
    reply = worker._Worker(learner, learner.config).answer(message)
    assert isinstance(reply, Failed)
    assert str(path) in reply.error and says in reply.error
    absent = worker._Worker(learner, learner.config).answer(
        Score(request_id=2, items=message.items, adapter="/nowhere")
    )
    assert isinstance(absent, Failed)
