"""When a small model is computed in few operations, and that nothing of a version or a row shows in another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from random_models import make_adapter, make_model
from remote_engine import engine_spec, generate
from unstable_lite.engines import fused_model
from unstable_lite.engines.fused_model import FusedModel
from unstable_lite.engines.lora import LoraModel
from unstable_lite.engines.transformers import TransformersEngine
from unstable_lite.transport.messages import Generate
from unstable_lite.types import Generation

ADAPTED = ((1, ["q_proj", "up_proj"]), (2, ["k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]))


def load(path: Path, dtype: str = "float32") -> TransformersEngine:
    return TransformersEngine(engine_spec(model=str(path), kind="transformers", max_model_len=256, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "limit", "kind"),
    [("float32", 1 << 20, FusedModel), ("float32", 1 << 10, LoraModel), ("bfloat16", 1 << 20, LoraModel)],
)
def test_only_a_small_base_in_full_precision_is_copied_for_a_version(
    dtype: str, limit: int, kind: type, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_model, "LARGEST_BYTES", limit)
    assert isinstance(load(model_dir, dtype)._model, kind)


def test_the_models_of_the_quickstart_are_fused() -> None:
    engine = load(Path("builtin:tiny"))
    assert isinstance(engine._model, FusedModel) and engine.facts["fused"]


def test_what_is_built_alike_and_computes_something_else_runs_as_it_comes(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = fused_model.FusedLayer.add

    def add_a_little_more(self: fused_model.FusedLayer, hidden_NI: torch.Tensor, *args: object) -> None:
        add(self, hidden_NI, *args)  # type: ignore[arg-type]
        hidden_NI *= torch.linspace(1, 1.002, hidden_NI.shape[1])

    monkeypatch.setattr(fused_model.FusedLayer, "add", add_a_little_more)
    engine = load(model_dir)
    assert isinstance(engine._model, LoraModel) and not engine.facts["fused"]


def test_an_unloaded_version_leaves_nothing_behind(model_dir: Path, adapter_dirs: list[Path]) -> None:
    engine = load(model_dir)
    for version, path in enumerate(adapter_dirs, start=1):
        engine.load_adapter(version, path)
    generate(engine, 1, 2)
    engine.unload_adapter(1)
    assert isinstance(engine._model, FusedModel) and engine._model._weights.keys() == {0, 2}
    assert not (engine._cache._version_S == 1).any()


def test_rows_of_many_versions_in_pieces_beside_each_other_are_what_peft_computes_of_each(tmp_path: Path) -> None:
    """Some prompts are longer than a step takes, so that in some steps nothing is asked for."""
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
                prompt=f"{number} is where it begins" + " and goes on" * (14 - number),
                adapter_version=number % 3,
                max_tokens=5 + number,
                temperature=1.0,
                top_p=1.0,
                stop=(),
                seed=number,
            )
        )
    replies: dict[int, Generation] = {}
    nothing_asked = 0
    while engine.has_unfinished():
        finished, before = engine.step(), sum(len(row.logprobs) for row in engine._running)
        replies |= {reply.request_id: reply.generation for reply in finished}
        nothing_asked += not finished and not before
    assert nothing_asked > 1
    for number, generation in replies.items():
        ids = [*generation.prompt_ids.tolist(), *generation.completion_ids.tolist()]
        size = len(generation.completion_ids)
        with torch.inference_mode():
            logits = judges[number % 3].eval()(input_ids=torch.tensor([ids[:-1]])).logits[0, -size:]
        logprobs = logits.log_softmax(-1)[torch.arange(size), torch.tensor(ids[-size:])]
        np.testing.assert_allclose(generation.logprobs, logprobs.numpy(), atol=2e-4)
    assert len(replies) == 9
