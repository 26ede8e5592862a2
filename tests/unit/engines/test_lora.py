"""The traces of an unloaded version, and the results of a layer with rows of many versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from fakes.random_models import make_adapter, make_model
from fakes.remote_engine import engine_spec, generate, request
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.engines.lora import Group, LoraLinear, LoraModel
from unstable_lite.errors import ModelError
from unstable_lite.types import Generation

ADAPTED = ((1, ["q_proj", "up_proj"]), (2, ["k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]))


@pytest.mark.parametrize("bias", [True, False])
def test_each_group_of_rows_gets_its_own_terms(bias: bool) -> None:
    torch.manual_seed(0)
    groups: list[Group] = []
    layer = LoraLinear(torch.nn.Linear(6, 5, bias=bias).requires_grad_(False), groups)
    pairs = {version: (torch.randn(2, 6), torch.randn(5, 2)) for version in (3, 8)}
    for version, (a, b) in pairs.items():
        layer.load(version, a, b, scale=0.5)
    x = torch.randn(1, 9, 6)
    groups[:] = [Group(0, 2, 0), Group(2, 5, 3), Group(5, 6, 4), Group(6, 9, 8)]
    expected = layer.base(x)
    for rows, version in ((slice(2, 5), 3), (slice(6, 9), 8)):
        a, b = pairs[version]
        expected[0, rows] += 0.5 * x[0, rows] @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)
    groups[:] = [Group(0, 9, 3)]
    a, b = pairs[3]
    torch.testing.assert_close(layer(x), layer.base(x) + 0.5 * x @ a.T @ b.T)


def test_layer_given_only_some_tokens_cannot_assign_adapters() -> None:
    groups = [Group(0, 2, 3), Group(2, 5, 8)]
    layer = LoraLinear(torch.nn.Linear(6, 5), groups)
    with pytest.raises(ModelError, match="3 of 5 tokens"):
        layer(torch.randn(3, 6))


def test_unloaded_version_leaves_nothing_behind(model_dir: Path, adapter_dirs: list[Path]) -> None:
    engine = TransformersEngine(
        engine_spec(model=str(model_dir), kind="transformers", max_model_len=128, dtype="bfloat16")
    )
    for version, path in enumerate(adapter_dirs, start=1):
        engine.load_adapter(version, path)
    generate(engine, 1, 2)
    engine.unload_adapter(1)
    assert isinstance(engine._model, LoraModel)
    layers = engine._model._layers.values()
    assert len(layers) == 14 and all(layer.pairs.keys() == {2} for layer in layers)
    assert not (engine._cache._version_S == 1).any()


def test_interleaved_rows_of_many_versions_match_peft(tmp_path: Path) -> None:
    """Some prompts are longer than a step, so that some steps sample nothing."""
    path = make_model(tmp_path / "model", "Qwen2", head_dim=16, use_sliding_window=False)
    adapters = [make_adapter(path, tmp_path / str(seed), seed, target_modules=targets) for seed, targets in ADAPTED]
    judges = [transformers.AutoModelForCausalLM.from_pretrained(path)]
    engine = TransformersEngine(engine_spec(model=str(path), kind="transformers", max_model_len=256))
    engine._prompt_tokens_per_step = 50
    for version, adapter in enumerate(adapters, start=1):
        engine.load_adapter(version, adapter)
        judges.append(peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(path), adapter))
    for number in range(9):
        prompt = f"{number} starts here" + " and continues" * (14 - number)
        engine.add_request(request(number, number % 3, prompt=prompt, max_tokens=5 + number, temperature=1.0))
    replies: dict[int, Generation] = {}
    num_without_sample = 0
    while engine.has_unfinished():
        finished, before = engine.step(), sum(len(row.logprobs) for row in engine._running)
        replies |= {reply.request_id: reply.generation for reply in finished}
        num_without_sample += not finished and not before
    assert num_without_sample > 1
    for number, generation in replies.items():
        ids = [*generation.prompt_ids.tolist(), *generation.completion_ids.tolist()]
        size = len(generation.completion_ids)
        with torch.inference_mode():
            logits = judges[number % 3].eval()(input_ids=torch.tensor([ids[:-1]])).logits[0, -size:]
        logprobs = logits.log_softmax(-1)[torch.arange(size), torch.tensor(ids[-size:])]
        np.testing.assert_allclose(generation.logprobs, logprobs.numpy(), atol=2e-4)
    assert len(replies) == 9
