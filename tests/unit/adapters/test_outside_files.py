"""Foreign files are accepted, or refused by name; no code in them ever runs."""

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.numpy
import torch

from unstable_lite.adapters.peft_files import (
    CONFIG,
    WEIGHTS,
    adapter_digest,
    check_adapter,
    digest_of,
    read_header,
    read_json,
    read_tensors,
    serialized,
    write_adapter,
)
from unstable_lite.config import Config
from unstable_lite.config.reading import parse_config
from unstable_lite.engines.embedded import stock_model
from unstable_lite.engines.lora import read_adapter
from unstable_lite.errors import AdapterError, ConfigError, ModelError
from unstable_lite.evaluation.models import find_models
from unstable_lite.learner import training
from unstable_lite.learner.model import Policy
from unstable_lite.models import BUILTIN
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.planning.validation import adapter_problems, find_problems
from unstable_lite.tracking.run_directory import LEAGUE, MANIFEST, WAITING, find_damage

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
PAIR = {Q_PROJ.format("A"): np.ones((4, 6), np.float32), Q_PROJ.format("B"): np.ones((8, 4), np.float32)}


def adapter(directory: Path, arrays: dict[str, Any] | None = None, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(PAIR if arrays is None else arrays, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps(PLAIN | config))
    return directory


def file_of(path: Path, header: Any, data: bytes = b"", header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)
    return path


def entry(start: int = 0, stop: int = 8, shape: Any = (2,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop], **more}


def test_adapter_written_by_peft_is_accepted(tmp_path):
    written = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    written["auto_mapping"] = {"base_model_class": "X", "parent_library": "os"}  # as PEFT does without a task_type
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in written.items()}
    config, header = check_adapter(adapter(tmp_path, **plain))
    assert config["r"] == 4
    assert header[Q_PROJ.format("A")].shape == (4, 6)
    for initial in (True, False, "gaussian", "eva", "orthogonal", None):  # pairs start from the unchanged base
        assert check_adapter(adapter(tmp_path, init_lora_weights=initial))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"use_variant_of_tomorrow": True}, "use_variant_of_tomorrow"),
        ({"base_model_name_or_path": "x" * 5000}, "base_model_name_or_path .* 5000"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16': .*path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"runs_this": {"module": "os"}}, "runs_this"),
        ({"r": 0}, r"\br = 0\b"),
        ({"r": True}, r"\br = True\b"),
        ({"r": 5000}, "rank 5000"),
        ({"r": 8}, "rank 8"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"lora_alpha": "8"}, "lora_alpha = 8"),
        ({"lora_alpha": 10**400}, "lora_alpha = 1000.* finite"),
        ({"target_modules": "(a+)+$"}, "target_modules"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"padding": "x" * (1 << 20)}, "large"),
    ],
)
def test_adapter_config_other_than_plain_lora_is_refused(tmp_path, config, says):
    with pytest.raises(AdapterError, match=says):
        check_adapter(adapter(tmp_path, **config))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "pairs"),
        ({Q_PROJ.format("A"): PAIR[Q_PROJ.format("A")]}, "pairs"),
        ({**PAIR, "../../etc/passwd": np.ones((4, 6), np.float32)}, "pair"),
        ({**PAIR, "base_model.model.lm_head.weight": np.ones((4, 6), np.float32)}, "pair"),
        ({name: array.reshape(-1) for name, array in PAIR.items()}, "pair"),
        ({name: array.astype(np.int32) for name, array in PAIR.items()}, "of type I32"),
    ],
)
def test_tensors_that_are_not_pairs_of_a_target_are_refused(tmp_path, arrays, says):
    with pytest.raises(AdapterError, match=says):
        check_adapter(adapter(tmp_path, arrays))


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "invalid offset"),
        ({"a": entry(0, 8), "b": entry(16, 24)}, bytes(24), "invalid offset"),
        ({"a": entry()}, bytes(7), "incomplete metadata"),
        ({"a": entry()}, bytes(9), "incomplete metadata"),
        ({"a": entry(8, 0)}, bytes(8), "invalid offset"),
        ({"a": entry(-8, 0)}, bytes(8), "invalid value"),
        ({"a": entry(shape=[2**40, 2**40, 2**40])}, bytes(8), "overflow"),
        ({"a": entry(shape=[2**70])}, bytes(8), "invalid type"),
        ({"a": entry(shape=[-2])}, bytes(8), "invalid value"),
        ({"a": entry(shape=[2.0])}, bytes(8), "invalid type"),
        ({"a": entry(dtype="U16", shape=[4])}, bytes(8), "of type U16"),
        ({"a": entry(dtype=["F32"])}, bytes(8), "invalid type"),
        ({"a": 7}, bytes(8), "invalid type"),
        ([], b"", "intact safetensors"),
        (b"[" * 100_000, b"", "intact safetensors"),
        (b"\xff\xfe", b"", "intact safetensors"),
    ],
)
def test_inconsistent_safetensors_file_is_refused_before_mapping(tmp_path, header, data, says):
    with pytest.raises(AdapterError, match=says):
        read_header(file_of(tmp_path / "x.safetensors", header, data))


def test_header_with_a_wrong_length_and_a_path_without_a_file_are_refused(tmp_path):
    for header_bytes in (0, 1, 100, 1 << 25, (1 << 64) - 1):
        with pytest.raises(AdapterError, match="intact safetensors"):
            read_header(file_of(tmp_path / "x.safetensors", {}, b"", header_bytes))
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 5000)):
        with pytest.raises(AdapterError):
            read_header(path)
        with pytest.raises(AdapterError):
            read_json(path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(AdapterError, match="is a FIFO"):
        read_json(tmp_path / "fifo")


class _Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Return a directory of pickles under every name that a library would look for."""
    directory, content = tmp_path / "evil", pickle.dumps(_Evil(tmp_path / "it ran"))
    directory.mkdir()
    names = "adapter_model.bin", "adapter_model.pt", "pytorch_model.bin", "optimizer.pt", "learner.pt", "rng_state.pth"
    for name in names:
        (directory / name).write_bytes(content)
    pickle.loads(content)
    (tmp_path / "it ran").rmdir()  # it would run
    (directory / CONFIG).write_text(json.dumps(PLAIN | {"target_modules": ["q_proj", "v_proj"]}))
    return directory


ENV = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}
ADVICE = "adapter_model.bin is a pickle.*python -c"


def parsed(**sections: Any) -> Config:
    config, problems = parse_config({"train_envs": [ENV], **sections})
    assert config is not None, problems
    return config


@pytest.mark.parametrize("key", ["initial_lora_path", "initial_critic_path"])
def test_run_that_would_start_from_pickles_is_refused_with_advice(evil, tmp_path, key):
    config = parsed(algorithm="a2c", lora={key: evil}, engine={"kind": "scripted"})
    with pytest.raises(ConfigError, match=ADVICE):
        raise ConfigError(*find_problems(config))
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"base_model_name_or_path": "organisation/other"}, "is an adapter of organisation/other"),
        ({"base_model_name_or_path": 5}, "is an adapter of 5; here model_name is organisation/model"),
        ({"use_rslora": True}, "use_rslora is True, not False"),
    ],
)
def test_initial_adapter_of_another_base_or_scale_is_refused(tmp_path, stored, says):
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config = parsed(model_name="organisation/model", lora=lora)
    assert not [*adapter_problems("lora.initial_lora_path", adapter(tmp_path / "good"), config)]
    (problem,) = adapter_problems("lora.initial_lora_path", adapter(tmp_path / "bad", **stored), config)
    assert says in problem


@pytest.mark.parametrize("targets", [{"target_modules": None}, {"target_modules": "all-linear"}, {}])
def test_missing_target_modules_are_listed_in_the_error(tmp_path, targets):
    directory = adapter(tmp_path)
    plain = {key: value for key, value in PLAIN.items() if key != "target_modules"}
    (directory / CONFIG).write_text(json.dumps(plain | targets))
    (problem,) = adapter_problems("lora.initial_lora_path", directory, parsed())
    assert problem.startswith(f"lora.initial_lora_path: {directory} ") and "target_modules" in problem
    assert problem.endswith('["q_proj"]')


def test_learners_engines_and_evaluations_open_no_pickle(evil, tmp_path):
    with pytest.raises(AdapterError, match=ADVICE):
        read_adapter(evil, 32)
    with pytest.raises(ConfigError, match=ADVICE):
        find_models([str(evil)])
    with pytest.raises(ModelError, match=r"learner\.safetensors"):
        training.read_state(evil / training.STATE, torch.device("cpu"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((BUILTIN["builtin:tiny"] / "config.json").read_bytes())
    (model / "pytorch_model.bin").write_bytes((evil / "pytorch_model.bin").read_bytes())
    with pytest.raises(ModelError, match="cannot"):
        stock_model.load(str(model), "float32", torch.device("cpu"), 64)
    with pytest.raises(ModelError, match="cannot"):
        Policy(parsed(model_name=str(model)), "cpu")
    assert not (tmp_path / "it ran").exists()


def test_digest_covers_names_types_shapes_weights_and_scale(tmp_path):
    a, b = Q_PROJ.format("A"), Q_PROJ.format("B")
    known = adapter_digest(adapter(tmp_path / "known"))
    (tmp_path / "known" / CONFIG).write_text(json.dumps(PLAIN | {"task_type": "CAUSAL_LM"}, indent=4))
    assert adapter_digest(tmp_path / "known") == known
    # The same tensors with metadata, in the reverse order.
    header = {"__metadata__": {"format": "pt"}, b: entry(0, 128, (8, 4)), a: entry(128, 224, (4, 6))}
    file_of(tmp_path / "known" / WEIGHTS, header, PAIR[b].tobytes() + PAIR[a].tobytes())
    assert adapter_digest(tmp_path / "known") == known

    changed = PAIR[a].copy()
    changed.view(np.uint32)[3, 5] ^= 1
    renamed = {name.replace("q_proj", "k_proj"): array for name, array in PAIR.items()}
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (PAIR | {a: changed}, {}),
        (renamed, {"target_modules": ["k_proj"]}),
        ({name: array.astype(np.float16) for name, array in PAIR.items()}, {}),
        (PAIR | {b: np.ones((16, 4), np.float32)}, {}),
        (PAIR, {"lora_alpha": 32}),
        (PAIR, {"use_rslora": True}),
    ]
    digests = [
        adapter_digest(adapter(tmp_path / f"{n}", arrays, **config)) for n, (arrays, config) in enumerate(others)
    ]
    assert len({known, *digests}) == 1 + len(others)
    with pytest.raises(AdapterError, match="safetensors"):
        digest_of(PLAIN, b"nothing")


def test_learner_and_engine_compute_the_same_digest(tmp_path):
    tensors = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in PAIR.items()}
    write_adapter(tmp_path / "v1", tensors, PLAIN)
    of_learner = digest_of(PLAIN, serialized(tensors))
    assert of_learner == read_adapter(tmp_path / "v1", 32)[2] == adapter_digest(tmp_path / "v1")


def test_non_finite_weight_is_found_when_an_adapter_is_loaded(tmp_path):
    name = Q_PROJ.format("B")
    for weights in np.full((8, 4), np.nan, np.float32), np.full((8, 4), np.inf, np.float32), np.full((8, 4), 1e300):
        path = adapter(tmp_path, PAIR | {name: weights})
        with pytest.raises(AdapterError, match="finite"):
            read_adapter(path, 32)
        with pytest.raises(AdapterError, match="finite"):
            read_tensors(path / WEIGHTS)


@pytest.mark.parametrize("where", ["engine", "tokenizer", "learner"])
def test_code_in_a_model_runs_only_on_request(tmp_path, monkeypatch, where):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, marker = tmp_path / f"model_{where}", tmp_path / "it ran"
    model.mkdir()
    (model / "code.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", "code.T"]}
    (model / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": names}))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": names}))

    def load(asked: bool) -> object:
        if where == "engine":
            return stock_model.load(str(model), "float32", torch.device("cpu"), 64, asked)
        if where == "tokenizer":
            return Tokenizer(str(model), asked)
        return Policy(parsed(model_name=str(model), trust_remote_code=asked), "cpu")

    for asked in (False, True):
        with pytest.raises((ModelError, AttributeError)):  # that code defines no class
            load(asked)
        assert marker.exists() == asked


def whole_checkpoint(path: Path) -> Path:
    path.mkdir()
    (path / LEAGUE).write_text("{}")
    (path / WAITING).write_bytes(b"")
    digest = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in (LEAGUE, WAITING)}
    manifest = {name: {"bytes": (path / name).stat().st_size, "sha256": digest[name]} for name in digest}
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize("name", ["../outside", "/dev/zero", "/etc/passwd", "a/../../outside"])
def test_manifest_may_name_only_files_of_its_checkpoint(tmp_path, name):
    (tmp_path / "outside").write_text("")
    path = whole_checkpoint(tmp_path / "ckpt-1")
    assert find_damage(path) is None
    manifest = json.loads((path / MANIFEST).read_text()) | {name: {"bytes": 0, "sha256": "0"}}
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert name in (find_damage(path) or "")


@pytest.mark.parametrize(
    ("file", "replace"),
    [
        (MANIFEST, lambda path: path.write_text("{}")),
        (LEAGUE, lambda path: path.symlink_to(LEAGUE)),
        (LEAGUE, os.mkfifo),
    ],
    ids=["no checksum of the league", "a link to itself", "a pipe, which would block"],
)
def test_checkpoint_with_a_replaced_file_is_damaged(tmp_path, file, replace):
    path = whole_checkpoint(tmp_path / "ckpt-1")
    (path / file).unlink()
    replace(path / file)
    assert LEAGUE in (find_damage(path) or "")
