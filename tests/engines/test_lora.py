"""What a version leaves behind, and what a layer computes with rows of many versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remote_engine import engine_spec, generate
from unstable_lite.engines import lora
from unstable_lite.engines.lora import Group, Groups, LoraLinear
from unstable_lite.engines.transformers import TransformersEngine


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_merged", [True, False])
def test_each_group_of_rows_gets_its_own_terms(bias: bool, is_merged: bool) -> None:
    torch.manual_seed(0)
    groups = Groups()
    layer = LoraLinear(torch.nn.Linear(6, 5, bias=bias).requires_grad_(False), groups, is_merged)
    pairs = {version: (torch.randn(2, 6), torch.randn(5, 2)) for version in (3, 8)}
    for version, (a, b) in pairs.items():
        layer.load(version, a, b, scale=0.5)
    x = torch.randn(1, 9, 6)
    groups.current = [Group(0, 2, 0), Group(2, 5, 3), Group(5, 6, 4), Group(6, 9, 8)]
    expected = layer.base(x)
    for rows, version in ((slice(2, 5), 3), (slice(6, 9), 8)):
        a, b = pairs[version]
        expected[0, rows] += 0.5 * x[0, rows] @ a.T @ b.T
    torch.testing.assert_close(layer(x), expected)
    groups.current = [Group(0, 9, 3)]
    a, b = pairs[3]
    torch.testing.assert_close(layer(x), layer.base(x) + 0.5 * x @ a.T @ b.T)


@pytest.mark.parametrize(
    ("dtype", "limit", "is_merged"),
    [("float32", 1 << 20, True), ("float32", 1 << 10, False), ("bfloat16", 1 << 20, False)],
)
def test_only_a_small_base_in_full_precision_is_copied_for_a_version(
    dtype: str, limit: int, is_merged: bool, model_dir: Path, adapter_dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "MERGED_BYTES", limit)
    engine = TransformersEngine(engine_spec(model=str(model_dir), kind="transformers", max_model_len=128, dtype=dtype))
    engine.load_adapter(1, adapter_dirs[0])
    layers = engine._lora._layers.values()
    assert {len(layer._merged) for layer in layers} == {int(is_merged)}
    assert {len(layer._pairs) for layer in layers} == {int(not is_merged)}


def test_an_unloaded_version_leaves_nothing_behind(model_dir: Path, adapter_dirs: list[Path]) -> None:
    engine = TransformersEngine(engine_spec(model=str(model_dir), kind="transformers", max_model_len=128))
    for version, path in enumerate(adapter_dirs, start=1):
        engine.load_adapter(version, path)
    generate(engine, 1, 2)
    engine.unload_adapter(1)
    layers = engine._lora._layers.values()
    assert len(layers) == 14 and all(layer._pairs.keys() | layer._merged.keys() == {2} for layer in layers)
    assert not (engine._cache._version_S == 1).any()
