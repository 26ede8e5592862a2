"""`check` names each fault of a model directory before any process starts, and refuses no healthy one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fakes.random_models import make_model
from unstable_lite.config import Config
from unstable_lite.models import BUILTIN
from unstable_lite.planning.validation import find_problems

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DENSE = {"num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
CONFIG, GENERATION, UP = "tokenizer_config.json", "generation_config.json", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a model once, and returns a copy of it with a chat template."""
    made: dict[str, Path] = {}

    def copy(target: Path, name: str = "Qwen3", **fields: Any) -> Path:
        key = json.dumps([name, fields])
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model"), name, **(DENSE | fields))
            (made[key] / "chat_template.jinja").write_text(CHATML)
        return Path(shutil.copytree(made[key], target))

    return copy


def problems_of(model: Path | str, template: str = "chat") -> list[str]:
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": template}
    lengths = {"kind": "transformers", "max_model_len": 900, "max_generation_len": 12}
    return find_problems(Config.model_validate({"model_name": str(model), "engine": lengths, "train_envs": [env]}))


def edit(file: str = "config.json", **fields: Any) -> Callable[[Path], Any]:
    return lambda model: (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | fields))


def rewrite(model: Path, change: Callable[[dict[str, Any]], object], file: str = WEIGHTS) -> None:
    tensors = load_file(model / file)
    change(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, model / file, {"format": "pt"})


def drop(part: str) -> Callable[[Path], Any]:
    return lambda model: rewrite(model, lambda t: [t.pop(name) for name in [*t] if part in name])


def shape(part: str, rows: int) -> Callable[[Path], Any]:
    return lambda model: rewrite(model, lambda t: t.update({name: t[name][:rows] for name in [*t] if part in name}))


def eight_bits(model: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    edit(quantization_config={"quant_method": "fp8"})(model)
    tensors = load_file(model / WEIGHTS)
    save_file(tensors | {UP: tensors[UP].to(torch.float8_e4m3fn)}, model / WEIGHTS, {"format": "pt"})


def integers(model: Path) -> None:
    rewrite(model, lambda t: t.update({UP: t[UP].astype(np.int32)}))


def shard(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = sorted(tensors)
    places = {name: (FIRST, SECOND)[index % 2] for index, name in enumerate(names)}
    for file in (FIRST, SECOND):
        save_file({name: tensors[name] for name in names if places[name] == file}, model / file, {"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def shards_without(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def damage(model: Path) -> None:
        shard(model)
        change(model)

    return damage


def index_without_its_last(model: Path) -> None:
    places = json.loads((model / INDEX).read_text())["weight_map"]
    places.popitem()
    (model / INDEX).write_text(json.dumps({"weight_map": places}))


def cut(file: str, size: int) -> Callable[[Path], Any]:
    return lambda model: (model / file).write_bytes((model / file).read_bytes()[:size])


def rename(file: str, name: str) -> Callable[[Path], Any]:
    return lambda model: (model / file).rename(model / name)


def write(file: str, text: str) -> Callable[[Path], Any]:
    return lambda model: (model / file).write_text(text)


def template(text: str) -> Callable[[Path], Any]:
    return write("chat_template.jinja", text)


def add_token(token: str, token_id: int, is_special: bool) -> Callable[[Path], Any]:
    def damage(model: Path) -> None:
        table = json.loads((model / TOKENIZER).read_text())
        added = {"id": token_id, "content": token, "special": is_special, "single_word": False, "lstrip": False}
        table["added_tokens"].append(added | {"rstrip": False, "normalized": False})
        (model / TOKENIZER).write_text(json.dumps(table))

    return damage


def vocabulary_beyond(model: Path) -> None:
    table = json.loads((model / TOKENIZER).read_text())
    table["model"]["vocab"]["longword"] = 400
    (model / TOKENIZER).write_text(json.dumps(table))


def named_templates(templates: object) -> Callable[[Path], Any]:
    def change(model: Path) -> None:
        (model / "chat_template.jinja").unlink()
        edit(CONFIG, chat_template=templates)(model)

    return change


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5135149760\n"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "size is text": ({"hidden_size": "64"}, "hidden_size = '64'"),
    "size is zero": ({"num_attention_heads": 0}, "num_attention_heads = 0"),
    "number of positions is text": ({"max_position_embeddings": "1k"}, "max_position_embeddings = '1k'"),
    "size of the vocabulary is a list": ({"vocab_size": ["288"]}, "['288'] is not"),
    "text config is text": ({"text_config": "llama"}, "text_config = 'llama'"),
    "types of layers are a number": ({"layer_types": 1}, "layer_types = 1 is not"),
    "soft cap is text": ({"attn_logit_softcapping": "x"}, "is not the config"),
    "reward model": ({"architectures": ["Qwen3ForSequenceClassification"]}, "not a causal language model"),
    "unknown quantisation": ({"quantization_config": {"quant_method": "magic"}}, "know quant_method = 'magic'"),
    "quantised by a text": ({"quantization_config": "fp8"}, "is not of type dict"),
    "quantised by GPTQ": ({"quantization_config": GPTQ}, "needs the package gptqmodel"),
    "unknown type": ({"model_type": "qwen9"}, "model_type = 'qwen9'"),
    "end tokens are lists": ({"eos_token_id": [[1]]}, "eos_token_id = [[1]]"),
}
"""Changes of config.json, and the reason that is given."""
TEMPLATES = {
    "template ends in a tag": ("{% for m in messages %}{{ m.content", "SyntaxError"),
    "template imports": ("{% import 'x' as y %}{{ messages[0].content }}", "loader"),
    "template raises": ("{{ raise_exception('only tools') }}", "only tools"),
    "template divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "template is unsafe": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "template shows no message": ("Hello.", "does not show the question once"),
}
DAMAGED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "file ends within a tensor": (cut(WEIGHTS, 50_000), WEIGHTS, "not fully covered"),
    "empty file": (cut(WEIGHTS, 0), WEIGHTS, "not an intact safetensors file"),
    "LFS pointer of the weights": (write(WEIGHTS, LFS), WEIGHTS, "git lfs pull"),
    "no weights": (lambda model: (model / WEIGHTS).unlink(), WEIGHTS, "has no"),
    "weights as a pickle": (rename(WEIGHTS, "pytorch_model.bin"), "pytorch_model.bin", "save it as safetensors"),
    "shard is missing": (shards_without(lambda model: (model / SECOND).unlink()), SECOND, "not there"),
    "tensor is in no shard": (
        shards_without(lambda model: rewrite(model, lambda t: t.pop(min(t)) is None, FIRST)),
        f"model.embed_tokens.weight in {FIRST}",
        "differ",
    ),
    "tensor is not in the index": (shards_without(index_without_its_last), INDEX, "model.norm.weight in model-0000"),
    "index has no weight_map": (shards_without(write(INDEX, "{}")), INDEX, "weight_map"),
    "layer lacks its attention": (drop("layers.2.self_attn"), "layer 2 lacks", "self_attn.k_norm.weight"),
    "layer lacks one norm": (drop("layers.0.input_layernorm"), "layer 0 lacks", "input_layernorm.weight"),
    "layer is missing": (drop("layers.1."), "no layer 1", "num_hidden_layers = 3"),
    "more layers than configured": (edit(num_hidden_layers=2), "have a layer 2", "= 2"),
    "layer of another shape": (shape("layers.1.mlp.up_proj", 64), "layer 1", "mlp.up_proj.weight in another shape"),
    "no embedding": (drop("embed_tokens"), "no rows", "vocab_size"),
    "fewer rows than vocab_size": (shape("embed_tokens", 200), "200 rows", "vocab_size = 288"),
    "more rows than vocab_size": (edit(vocab_size=280), "288 rows", "vocab_size = 280"),
    "word beyond the embedding": (vocabulary_beyond, TOKENIZER, "'longword' (id 400)"),
    "added token beyond the embedding": (add_token("[rock]", 300, False), TOKENIZER, "'[rock]' (id 300)"),
    "markup beyond the embedding": (add_token("<|im_end|>", 301, True), TOKENIZER, "'<|im_end|>' (id 301)"),
    "tokenizer is cut off": (cut(TOKENIZER, 200), TOKENIZER, "cannot be read"),
    "tokenizer has no vocabulary": (write(TOKENIZER, '{"model": {}}'), TOKENIZER, "not a tokenizer: Exception"),
    "no tokenizer": (lambda model: [file.unlink() for file in model.glob("tok*")], "model", "has no tokenizer"),
    "tokenizer config is a list": (write("tokenizer_config.json", "[]"), "tokenizer_config.json", "not a JSON object"),
    "config is cut off": (cut("config.json", 40), "config.json", "cannot be read"),
    "more layers that predict than memory": (
        edit(num_hidden_layers=2, num_nextn_predict_layers=1 << 40, vocab_size=280),
        "model",
        "vocab_size = 280",
    ),
    "8-bit weights without scales": (eight_bits, UP, "have no scale"),
    "end token of another model": (edit(GENERATION, eos_token_id=[1, 151645]), GENERATION, "below vocab_size"),
    "begin token that the tokenizer has not": (
        edit(CONFIG, bos_token="<s>"),
        TOKENIZER,
        "has no '<s>', which tokenizer_config.json names",
    ),
    "tokenizer of another library": (rename(TOKENIZER, "tokenizer.model"), "model", "needs the package sentencepiece"),
    "template is not UTF-8": (
        lambda model: (model / "chat_template.jinja").write_bytes(b"\xff{{ messages[0].content }}"),
        "chat_template.jinja",
        "UnicodeDecodeError",
    ),
    "no default among several templates": (named_templates([{"name": "rag", "template": CHATML}]), CONFIG, "'default'"),
    "many layers too few": (edit(num_hidden_layers=1 << 40), "no layer 3", f"= {1 << 40}"),
    "weight of integers": (integers, UP, "are integers"),
    "adapter beside the weights": (write("adapter_config.json", "{}"), "adapter_config.json", "holds an adapter"),
    "end token is text": (edit(GENERATION, eos_token_id=["<|end|>"]), GENERATION, "eos_token_id"),
    "unknown post-processor": (edit(TOKENIZER, post_processor={"type": "Nope"}), TOKENIZER, "not a tokenizer"),
}
DAMAGED |= {fault: (edit(**fields), "config.json", reason) for fault, (fields, reason) in CONFIGS.items()}
DAMAGED |= {fault: (template(text), "chat_template.jinja", reason) for fault, (text, reason) in TEMPLATES.items()}


@pytest.mark.parametrize("fault", DAMAGED)
def test_check_names_the_fault_of_a_damaged_model(fault, models, tmp_path):
    damage, place, reason = DAMAGED[fault]
    damage(model := models(tmp_path / "model"))
    problem = problems_of(model)[0]
    assert str(model) in problem
    assert place in problem
    assert reason in problem


def test_check_names_an_expert_that_lacks_a_weight(models, tmp_path):
    model = models(tmp_path / "model", "Qwen3Moe", **EXPERTS)
    assert problems_of(model) == []
    drop("layers.1.mlp.experts.2.down_proj")(model)
    (problem,) = problems_of(model)
    assert "model.layers.1.mlp.experts.2 lacks down_proj.weight" in problem


HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "tied without a head": ("Qwen3", {}),
    "with a head": ("Llama", {"tie_word_embeddings": False}),
    "more rows than tokens": ("Qwen3", {"vocab_size": 320}),
    "layers of two types": ("Gemma3Text", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}),
}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
HARMLESS: dict[str, Callable[[Path], Any]] = {
    "sharded": shard,
    "buffers of an older version": lambda model: rewrite(
        model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)})
    ),
    "image token beyond the rows, in no prompt": add_token("<image_soft_token>", 288, True),
    "pickle beside safetensors": write("pytorch_model.bin", ""),
    "template marks the answers": template(
        "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% break %}{% else %}{{ m | tojson }}{{ strftime_now('%Y') }}{% endif %}{% endfor %}"
    ),
    "template asks for tools and a missing token": template(
        "{% if tools is not none %}{{ raise_exception('no') }}{% endif %}{{ bos_token + '>' }}" + CHATML
    ),
    "templates in a list": named_templates([{"name": n, "template": CHATML} for n in ("rag", "default")]),
    "heads by layer": edit(num_key_value_heads=[2, 1, 2]),
    "templates in a table": named_templates({"default": CHATML}),
    "template that needs a system text": template(NO_SYSTEM.replace("==", "!=") + CHATML),
    "template without system role": template(NO_SYSTEM + CHATML),
}


@pytest.mark.parametrize("form", [*HEALTHY, *HARMLESS])
def test_check_accepts_a_healthy_model(form, models, tmp_path):
    name, fields = HEALTHY.get(form, ("Qwen3", {}))
    model = models(tmp_path / "model", name, **fields)
    if form in HARMLESS:
        HARMLESS[form](model)
    assert problems_of(model) == []


@pytest.mark.parametrize("name", [*BUILTIN, "Qwen/Qwen3-0.6B"])
def test_check_accepts_built_in_models_and_names_of_the_hub(name):
    assert problems_of(name) == []
