"""Engine, learner, merge and `check --model` refuse a model whose weights are not those of its architecture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import unstable_lite
from fakes.random_models import make_model
from unstable_lite.engines.embedded import stock_model
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.learner.base_model import load_base
from unstable_lite.models import model_errors
from unstable_lite.models.files import file_problems
from unstable_lite.models.layers import check_layers
from unstable_lite.models.loading import compare
from unstable_lite.sharing.merging import write_merged

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
LOADERS: dict[str, Callable[[Path], object]] = {
    "engine": lambda model: stock_model.load(str(model), "auto", CPU, 128),
    "learner": lambda model: load_base(str(model), torch.float32, CPU, trust_remote_code=False),
    "merge": lambda model: write_merged(model / "no adapter", str(model), False, model / "merged"),
    "check --model": lambda model: compare(str(model), trust_remote_code=False),
}


def changed(model: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in [*tensors] if part in name]


def cut(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:8].clone() for name in tensors if part in name})


def add(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"model.layers.{layer}.{part}": torch.ones(128) for layer in (0, 1)})


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("up_proj"), "missing: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight"),
        (drop("model.norm"), "missing: model.norm.weight"),
        (cut("mlp.down_proj"), "of another shape than by config.json: model.layers.0.mlp.down_proj.weight [8, 128]"),
        (add("self_attn.q_proj.bias"), "unexpected: model.layers.0.self_attn.q_proj.bias, model.layers.1.self"),
    ],
    ids=["missing", "missing-outside-layers", "mismatched", "unexpected"],
)
def test_weights_of_another_architecture_are_refused_with_their_names(change, reason, loader, tmp_path):
    with pytest.raises(ModelError) as caught:
        LOADERS[loader](changed(make_model(tmp_path), change))
    assert str(tmp_path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("loader", ["engine", "learner", "merge"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weight_that_is_not_finite_is_named(value, loader, tmp_path):
    name = "model.layers.1.mlp.gate_proj.weight"
    model = changed(make_model(tmp_path), lambda tensors: tensors[name][3].fill_(value))
    with pytest.raises(ModelError, match=f"{name} has values that are not finite"):
        LOADERS[loader](model)


@pytest.mark.parametrize("loader", ["engine", "learner", "check --model"])
def test_parts_beside_the_text_decoder_may_stay_in_the_files(loader, tmp_path):
    others = {
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight": torch.ones(4, 4),
        "v_head.weight": torch.ones(1, 64),
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
        "model.layers.2.eh_proj.weight": torch.ones(4, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
    }
    model = changed(make_model(tmp_path, num_nextn_predict_layers=1), lambda tensors: tensors.update(others))
    LOADERS[loader](model)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("fields", [{"hidden_act": "nope"}, {"model_type": "resnet"}])
def test_exceptions_of_libraries_become_model_errors(fields, loader, tmp_path):
    config = make_model(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    assert not file_problems(tmp_path)
    with pytest.raises(ModelError, match=str(tmp_path)):
        LOADERS[loader](tmp_path)


def test_models_are_loaded_by_one_function():
    package = Path(unstable_lite.__file__).parent
    loading = [path for path in package.rglob("*.py") if "CausalLM.from_pretrained(" in path.read_text()]
    assert [path.relative_to(package).as_posix() for path in loading] == ["models/loading.py"]


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), KeyError("key"), Exception("untagged enum")])
def test_any_foreign_exception_becomes_a_model_error(error):
    with pytest.raises(ModelError) as caught, model_errors("models/mine", "cannot be loaded", "take another model"):
        raise error
    assert str(caught.value) == f"models/mine cannot be loaded: {type(error).__name__}: {error}\n(take another model)"


@pytest.mark.parametrize("error", [ConfigError("ours"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_own_errors_and_full_memory_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, model_errors("models/mine"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            {"text_config": {"attention_chunk_size": 8192, "no_rope_layers": []}},
            r"M: layer 0 .* chunks of 8192 .*; lower engine\.max_model_len to 8192, .* engine\.kind = 'vllm'",
        ),
        ({"linear_num_value_heads": 32, "full_attention_interval": 4}, "layer 0 is recurrent"),
    ],
)
def test_layer_that_is_not_computed_is_named(model, reason):
    with pytest.raises(ModelError, match=reason):
        check_layers("M", model, 16_384)


@pytest.mark.parametrize(
    "model",
    [
        {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
        {"text_config": {"sliding_window": 1024, "sliding_window_pattern": 6}},
        {"attention_chunk_size": 8192, "max_position_embeddings": 8192},
        {"mamba_d_state": 256, "layer_types": ["attention", "attention"]},  # a hybrid model without recurrent layers
        {"attn_logit_softcapping": None, "head_dim": 128},
    ],
)
def test_model_of_other_layers_is_not_refused(model):
    check_layers("M", model, 16_384)
