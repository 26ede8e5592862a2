"""The traces of an unloaded version, and the results of a layer with rows of many versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.remote_engine import engine_spec, generate
from unstable_lite.engines.embedded.engine import TransformersEngine
from unstable_lite.engines.lora import Group, LoraLinear, LoraModel
from unstable_lite.errors import ModelError


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
    assert len(layers) == 14 and all(layer._pairs.keys() == {2} for layer in layers)
    assert not (engine._cache._version_S == 1).any()
