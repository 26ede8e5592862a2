"""The models that are fused; versions and rows of a fused model do not affect each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from fakes.random_models import make_adapter, make_model
from fakes.remote_engine import engine_spec, generate
from unstable_lite.engines.embedded import fused_model
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.engines.embedded.fused_model import FusedModel
from unstable_lite.engines.lora import LoraModel
from unstable_lite.transport.messages import Generate
from unstable_lite.types import Generation

ADAPTED = ((1, ["q_proj", "up_proj"]), (2, ["k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]))


def load(path: Path, dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(engine_spec(model=str(path), kind="transformers", max_model_len=256, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "limit", "kind"),
    [("float32", 1 << 20, FusedModel), ("float32", 1 << 10, LoraModel), ("bfloat16", 1 << 20, LoraModel)],
)
def test_only_small_full_precision_bases_are_fused(
    dtype: str, limit: int, kind: type, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_model, "LARGEST_BYTES", limit)
    assert isinstance(load(model_dir, dtype)._model, kind)


def test_quickstart_models_are_fused() -> None:
    engine = load(Path("builtin:tiny"))
    assert isinstance(engine._model, FusedModel) and engine.info["fused"]


def test_model_that_computes_something_else_is_not_fused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = fused_model.FusedLayer.add

    def add_and_scale(self: fused_model.FusedLayer, hidden_NI: torch.Tensor, *args: object) -> None:
        add(self, hidden_NI, *args)  # type: ignore[arg-type]
        hidden_NI *= torch.linspace(1, 1.002, hidden_NI.shape[1])

    monkeypatch.setattr(fused_model.FusedLayer, "add", add_and_scale)
    engine = load(model_dir)
    assert isinstance(engine._model, LoraModel) and not engine.info["fused"]


def test_unloaded_version_leaves_nothing_behind(model_dir: Path, adapter_dirs: list[Path]) -> None:
    engine = load(model_dir)
    for version, path in enumerate(adapter_dirs, start=1):
        engine.load_adapter(version, path)
    generate(engine, 1, 2)
    engine.unload_adapter(1)
    assert isinstance(engine._model, FusedModel) and engine._model._weights.keys() == {0, 2}
    assert not (engine._cache._version_S == 1).any()


def test_interleaved_rows_of_many_versions_match_peft(tmp_path: Path) -> None:
    """Some prompts are longer than a step, so that some steps sample nothing."""
    path = make_model(tmp_path / "model", "Qwen2", head_dim=16, use_sliding_window=False)
    adapters = [make_adapter(path, tmp_path / str(seed), seed, target_modules=targets) for seed, targets in ADAPTED]
    judges = [transformers.AutoModelForCausalLM.from_pretrained(path)]
    engine = load(path)
    assert isinstance(engine._model, FusedModel)
    engine._prompt_tokens_per_step = 50
    for version, adapter in enumerate(adapters, start=1):
        engine.load_adapter(version, adapter)
        judges.append(peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(path), adapter))
    for number in range(9):
        engine.add_request(
            Generate(
                request_id=number,
                prompt=f"{number} starts here" + " and continues" * (14 - number),
                adapter_version=number % 3,
                max_tokens=5 + number,
                temperature=1.0,
                top_p=1.0,
                stop=(),
                seed=number,
            )
        )
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
